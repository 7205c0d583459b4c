"""The paper's choice by batch size: what it measures, and what it makes of it. The clock is a number."""

import math
from collections.abc import Sequence

import pytest

from saguaro.algo.theory import critical_batch_size
from saguaro.draft.policy.critical import BatchSizeMisses
from saguaro.types import CACHE, DRAFT, NGRAM, Joined
from tests.draft.policy.world import Clock, Counting, World


class Sized(World):
    """A world in which the batch seems to be of another size."""

    def __init__(self, clock: Clock, parts: BatchSizeMisses, n_rows: int = 1, verify_s: float = 1.0) -> None:
        super().__init__(clock, parts, n_rows=n_rows, verify_s=verify_s)
        self.misses = parts

    def play_as(self, hits: Sequence[int], accepted: dict[int, int], n_rows: int) -> list[int]:
        """A round of a batch of n_rows."""
        draft = self.misses.draft
        self.misses.draft = lambda missed, asked: draft(missed, list(asked)[:1] * n_rows)  # type: ignore[method-assign]
        found = self.play(hits, accepted)
        self.misses.draft = draft  # type: ignore[method-assign]
        return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


def both(clock: Clock) -> tuple[Counting, Counting]:
    return Counting(clock, DRAFT, seconds=0.5), Counting(clock, NGRAM, n_most=1)


def faded(values: Sequence[float]) -> float:
    """The mean in which a value counts 0.98 times as much as the next."""
    weights = [0.98 ** (len(values) - 1 - at) for at in range(len(values))]
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def test_the_critical_batch_size_is_that_of_theorem_17(clock: Clock) -> None:
    primary, backup = both(clock)
    parts = BatchSizeMisses(primary, backup, clock)
    assert parts.critical == math.inf
    world = Sized(clock, parts, n_rows=2, verify_s=2.0)
    stands = {DRAFT: 3, NGRAM: 1, CACHE: 4}
    #           both rows miss, slow and fast; then hits after hits and after misses
    rounds = [([], 1), ([], 99), ([0], 1), ([0, 1], 1), ([1], 99), ([0, 1], 1), ([0, 1], 1), ([0], 1)]
    was_hit: list[list[bool]] = [[], []]
    for hits, n_rows in rounds:
        slow = n_rows < parts.critical
        sources = world.play_as(hits, stands, n_rows)
        assert set(sources) - {CACHE} <= {DRAFT if slow else NGRAM}
        for slot in (0, 1):
            was_hit[slot].append(slot in hits)
    pairs = [(was_hit[slot][at], was_hit[slot][at + 1]) for at in range(len(rounds) - 1) for slot in (0, 1)]
    hit_p, hit_b = (faded([now for before, now in pairs if before == kind]) for kind in (True, False))
    assert 0 < hit_b < 1
    assert 0 < hit_p < 1
    assert {source for source, asked in ((DRAFT, primary.asked), (NGRAM, backup.asked)) if asked} == {DRAFT, NGRAM}
    assert parts.critical == pytest.approx(critical_batch_size(hit_p, hit_b, E_p=4.0, E_b=2.0, T=0.5 / 2.0))


def test_the_primary_below_the_critical_batch_size_and_the_backup_above(clock: Clock) -> None:
    primary, backup = both(clock)
    parts = BatchSizeMisses(primary, backup, clock)
    world = Sized(clock, parts, n_rows=4, verify_s=1.0)
    for at in range(200):  # three rows of four hit, each time others
        world.play_as([slot for slot in range(4) if (slot + at) % 4], {DRAFT: 2, NGRAM: 0, CACHE: 2}, 1)
    edge = parts.critical
    assert 1 < edge < 50
    assert edge != round(edge)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    assert world.play_as([0, 1, 2], stands, math.floor(edge))[3] == DRAFT
    assert world.play_as([0, 1, 2], stands, math.ceil(parts.critical))[3] == NGRAM


def test_waiting_for_a_primary_that_is_no_better_never_pays(clock: Clock) -> None:
    primary, backup = both(clock)
    parts = BatchSizeMisses(primary, backup, clock)
    world = Sized(clock, parts)
    for _ in range(10):
        world.play(accepted={DRAFT: 0, NGRAM: 1})
    assert parts.critical == 0
    assert world.play(accepted={DRAFT: 0, NGRAM: 1}) == [NGRAM]


def test_rounds_that_hit_do_not_lengthen_the_verification(clock: Clock) -> None:
    """A verification lasts from the last answer to the outcome, whoever answered."""
    primary, backup = both(clock)
    parts = BatchSizeMisses(primary, backup, clock)
    world = World(clock, parts, verify_s=0.25)
    for at in range(40):
        world.play(hits=[] if at % 8 == 0 else [0], accepted={DRAFT: 1})
    assert parts._verify_s.mean(0.0) == pytest.approx(0.25)


def test_a_new_row_does_not_inherit_the_luck_of_the_one_before(clock: Clock) -> None:
    parts = BatchSizeMisses(*both(clock), clock)
    world = World(clock, parts)
    world.play(hits=[0])
    world.play(hits=[0])
    assert (parts._after_hit.n, parts._after_miss.n) == (1, 0)
    world.rows.retire([0])
    world.rows.admit([Joined(0, [1])])
    world.play()
    assert (parts._after_hit.n, parts._after_miss.n) == (1, 0)
    world.play(hits=[0])
    assert parts._after_miss.mean(0.0) == 1
