"""Hostile bytes for a draft service and for its clients, at every stage of a connection: the tests of
tests/link/test_hostile.py with as many examples as asked for.

    python -m bench.hostile --examples 20000

It prints how many were tried, and ends with an error at the first that is not refused, or after which the service does
not serve a client that means well.
"""

import time
from dataclasses import dataclass

import tyro
from hypothesis import HealthCheck, settings

from tests.link import test_hostile
from tests.link.service import connect, serving
from tests.link.target import AGES, Target


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """Try hostile bytes."""

    examples: int = 2000
    """Examples for each stage."""


def main() -> None:
    """Run every stage."""
    command, began = tyro.cli(Hostile), time.perf_counter()
    many = settings(
        max_examples=command.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    with serving() as (_, address):
        for stage in (test_hostile.test_before_the_proof, test_hostile.test_after_the_proof):
            many(stage)(address)
        many(test_hostile.test_in_place_of_a_request)(address)
        link = connect(address)
        link.wait_ready(AGES)
        target = Target(link)
        target.play_until(lambda: target.n_spoken > 3)
        assert (link.n_starts, link.n_deaths) == (1, 0)
        link.close()
    many(test_hostile.test_what_a_client_hears)()
    many(test_hostile.test_an_offer_is_whole_or_refused)()
    print(f"{command.examples} examples of each of 5 stages were refused, in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
