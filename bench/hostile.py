"""Hostile bytes for a draft service and for its clients, at every stage of a connection.

They are those of tests/link/hostile.py, with as many examples as asked for.

    python -m bench.hostile --examples 20000

It ends with an error at the first that is not refused, or if the service does not serve a client that means well
afterwards.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tyro
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.link.hostile import STAGES, as_an_offer, offers, sent, to_a_client
from tests.link.service import connect, serving
from tests.link.target import AGES, Target


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """Try hostile bytes."""

    examples: int = 2000
    """Examples for each stage."""


def try_all(stage: Callable[[bytes], None], data: SearchStrategy[bytes], n: int) -> None:
    """Run a stage with n examples."""

    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data)
    def run(each: bytes) -> None:
        stage(each)

    began = time.perf_counter()
    run()
    name = getattr(stage, "func", stage).__name__
    print(f"{name.replace('_', ' ')}: {n} examples in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    """Run every stage."""
    n = tyro.cli(Hostile).examples
    logging.disable(logging.WARNING)  # the service's: one for each example
    with serving() as (_, address):
        for stage in STAGES:
            try_all(partial(stage, address), sent, n)
        with contextlib.closing(connect(address)) as link:
            link.wait_ready(AGES)
            target = Target(link)
            target.play_until(lambda: target.n_spoken > 3)
            assert (link.n_starts, link.n_deaths) == (1, 0)
    try_all(to_a_client, sent, n)
    try_all(as_an_offer, offers(), n)
    print("all were refused, and the service serves on")


if __name__ == "__main__":
    main()
