"""Hostile bytes are refused at every stage of a connection, and others are served on.

`python -m bench.hostile` runs the same with as many examples as asked for.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from saguaro.link.address import Address
from saguaro.link.offer import decode_offer, sums_of
from tests.link.hostile import OFFER, STAGES, as_an_offer, offers, sent, to_a_client
from tests.link.service import TERMS, connect, serving
from tests.link.target import AGES, Target

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A service; after all, it serves somebody who means well."""
    with serving() as (_, address):
        yield address
        with contextlib.closing(connect(address)) as link:
            link.wait_ready(AGES)
            target = Target(link)
            target.play_until(lambda: target.n_spoken > 3)
            assert (link.n_starts, link.n_deaths) == (1, 0)


@pytest.mark.parametrize("stage", STAGES)
@few
@given(data=sent)
def test_a_service_closes(address: Address, stage: Callable[[Address, bytes], None], data: bytes) -> None:
    stage(address, data)


@few
@given(sent)
def test_a_client_refuses(data: bytes) -> None:
    to_a_client(data)


@few
@given(offers())
def test_an_offer_is_whole_or_refused(body: bytes) -> None:
    as_an_offer(body)


def test_an_offer_comes_out_as_it_went_in() -> None:
    found = decode_offer(np.frombuffer(OFFER, np.uint8))
    assert found.terms == TERMS
    assert found.sums.tolist() == sums_of({0: "a", 3: "é"}).tolist()
