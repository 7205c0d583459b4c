"""Every link gives what the draft's side says: one suite for all of them."""

import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from saguaro.link.apart import Apart
from saguaro.link.inline import Inline
from saguaro.round import DraftSide
from saguaro.types import DraftLink, Joined, Outcome
from tests.link.echo import Echo
from tests.link.service import connect, serving
from tests.link.target import AGES, ROWS, K, Target, draft_config, start


@pytest.fixture(scope="module", params=["inline", "process", "service"])
def link(request: pytest.FixtureRequest) -> Iterator[DraftLink]:
    """A draft that is there."""
    if request.param == "inline":
        yield Inline(cast(DraftSide, Echo(draft_config())))
        return
    with contextlib.ExitStack() as stack:
        apart = start() if request.param == "process" else connect(stack.enter_context(serving())[1])
        stack.enter_context(contextlib.closing(apart))
        apart.wait_ready(AGES)
        yield apart
        assert (apart.n_starts, apart.n_deaths, apart.n_late) == (1, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go_and_every_speculation_is_the_drafts(link: DraftLink, seed: int) -> None:
    link.is_fresh()
    target = Target(link, seed)
    for _ in range(200):
        target.play()
    assert target.n_spoken == 200
    assert target.n_fresh == 0
    assert not link.is_fresh()


def test_a_round_that_broke_off_is_made_good(link: DraftLink) -> None:
    """As Round does: whatever was said is taken back by introducing everybody anew."""
    link.is_fresh()
    target = Target(link, 3)
    for n in range(60):
        target.play()
        if n % 3 == 0:  # a speculation that is never decided
            slots = sorted(target.rows)
            link.speculate(target.outcome, slots, [K] * len(slots))
            target.introduce_all()
        for slot in set(range(ROWS)) - set(target.rows):  # an introduction that no turn follows
            link.admit([Joined(slot, [1])])
            link.retire([slot])
        times = target.play().times
        assert times is not None
        is_shifted = isinstance(link, Apart) and link.pid is None  # by another machine's clock
        assert is_shifted or times.prepare[1] == len(target.rows), "rows known"
    assert target.n_spoken == 120


def test_a_link_that_rests_asks_nothing_and_gets_all_rows_anew_afterwards(link: DraftLink) -> None:
    link.is_fresh()
    if not isinstance(link, Apart):
        return
    target = Target(link, 4)
    for n in range(40):
        target.play()
        if n % 4 == 1:
            link.rest()
            before = target.n_spoken, link._channel and link._channel.posted
            for _ in range(3):  # rows come and go meanwhile
                assert target.play().tokens.shape[1] == 0
                assert not link.was_asked
            assert before == (target.n_spoken, link._channel and link._channel.posted)
            link.wake()
    assert target.n_fresh == 10
    assert target.n_spoken == 40


def test_nothing_asked_nothing_said(link: DraftLink) -> None:
    link.is_fresh()
    assert link.speculate(Outcome.nothing(), [], []).length.tolist() == []
    link.overlap()
