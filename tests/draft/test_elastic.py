"""As many tokens as pay: what a step costs and what stands at each position decide. The clock is a number."""

from collections.abc import Sequence

import pytest

from saguaro.draft import elastic
from saguaro.draft.elastic import Elastic
from saguaro.draft.fallback import EVERY
from saguaro.draft.rows import Proposal, Row
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM
from tests.draft.test_fallback import Clock, Counting, K, World


class Stepping(Counting):
    """Takes a step for every token."""

    def propose(self, rows: Sequence[Row], lookahead: int) -> Proposal:
        self.clock.now += (lookahead - 1) * self.seconds
        return super().propose(rows, lookahead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(elastic, "now", clock)
    return clock


def settled(clock: Clock, step_s: float, stands: Sequence[int], n_rows: int = 1, backup: int = 0) -> list[int]:
    """Lengths asked of a primary, of whose speculations so many tokens stand in turn: the last EVERY - 1."""
    primary, other = Stepping(clock, DRAFT, step_s), Counting(clock, NGRAM, n_most=1)
    world = World(clock, Elastic(primary, other), n_rows)
    asked = []
    for at in range(6 * EVERY):
        before = len(primary.asked)
        world.play(accepted={DRAFT: stands[at % len(stands)], NGRAM: backup})
        asked.append(primary.asked[-1][1] if len(primary.asked) > before else 0)
    return asked[-EVERY + 1 :]


@pytest.mark.parametrize(
    ("step_s", "stands", "length"),
    [
        (0.01, [4], 4),  # all of them stand, for nearly nothing
        (0.1, [2], 2),  # the third never does
        (0.2, [0, 1], 1),  # 1.5 / 1.2 a second, and (1 + 0.5) / 1.4 for two
        (0.05, [0, 4], 4),  # if the first stands, all do
        (0.7, [0, 1], 0),  # 1.5 / 1.7 is less than 1
        (2.0, [4], 0),  # 5 / 9
    ],
)
def test_as_many_as_pay(clock: Clock, step_s: float, stands: list[int], length: int) -> None:
    """A verification takes a second."""
    rates = {n: (1 + sum(min(n, k) for k in stands) / len(stands)) / (1 + n * step_s) for n in range(K + 1)}
    assert rates[length] == max(rates.values())
    found = settled(clock, step_s, stands)
    assert sum(rates[n] for n in found) >= 0.97 * rates[length] * len(found)
    assert found.count(length) >= 0.8 * len(found)


def test_the_backup_where_it_is_as_good(clock: Clock) -> None:
    assert settled(clock, 0.3, [1], backup=1).count(0) >= EVERY - 3


def test_more_rows_wait_with_those_that_missed(clock: Clock) -> None:
    """One of eight misses: seven others wait for it."""
    primary, other = Stepping(clock, DRAFT, 0.2), Counting(clock, NGRAM, n_most=1)
    world = World(clock, Elastic(primary, other), n_rows=8)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    found = [world.play(list(range(1, 8)), stands)[0] for _ in range(40)]
    assert found[0] == DRAFT
    assert found[-20:].count(NGRAM) >= 19
    assert world.play([], stands)[0] == DRAFT, "all of them together do not"


def test_a_few_unlucky_ones_do_not_end_it(clock: Clock) -> None:
    primary, other = Stepping(clock, DRAFT, 0.1), Counting(clock, NGRAM, n_most=1)
    world = World(clock, Elastic(primary, other))
    assert [world.play(accepted={DRAFT: 0})[0] for _ in range(4)] == [DRAFT] * 4
    assert NGRAM in [world.play(accepted={DRAFT: 0})[0] for _ in range(40)]


def test_nobody_is_asked_where_nothing_was_missed(clock: Clock) -> None:
    primary, other = Stepping(clock, DRAFT, 0.1), Counting(clock, NGRAM)
    world = World(clock, Elastic(primary, other), n_rows=2)
    assert [world.play(hits=[0, 1]) for _ in range(3)] == [[CACHE, CACHE]] * 3
    assert (primary.asked, other.asked) == ([], [])
    assert world.play(room=0) == [EMPTY, EMPTY]
