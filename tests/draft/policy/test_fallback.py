"""Who drafts a miss: what the fallbacks measure, and what they make of it. The clock is a number."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from saguaro.algo.theory import critical_batch_size
from saguaro.draft.policy import fallback
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.fallback import (
    EVERY,
    BatchSizeFallback,
    Fallback,
    FixedFallback,
    MeasuredFallback,
    NoProposer,
    put_in_flight,
)
from saguaro.draft.rows import DraftRow, DraftRows, Proposal
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, Joined, Outcome

K = 4


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fallback, "time", SimpleNamespace(perf_counter=clock))
    return clock


class Counting:
    """Proposes 1, 2, 3 ... after every text, and takes its time."""

    def __init__(self, clock: Clock, source: int, seconds: float = 0.0, n_most: int = K) -> None:
        self.clock, self.source, self.seconds, self.n_most = clock, source, seconds, n_most
        self.asked: list[tuple[list[int], int]] = []  # slots and lookahead of each time

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        self.asked.append(([row.slot for row in rows], lookahead))
        self.clock.now += self.seconds
        return Proposal([list(range(1, min(lookahead, self.n_most) + 1)) for _ in rows])


class Drawing:
    """Proposes tokens with the q they were drawn from, which names the row."""

    source = DRAFT

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        q = [torch.full((lookahead, 3), float(row.slot)) for row in rows]
        return Proposal([[2] * lookahead for _ in rows], q)


class World:
    """Plays rounds of a fallback as the draft's side does."""

    def __init__(self, clock: Clock, parts: Fallback, n_rows: int = 1, verify_s: float = 1.0) -> None:
        self.clock, self.fallback, self.verify_s, self.token_s = clock, parts, verify_s, 0.0
        self.rows = DraftRows()
        self.rows.admit([Joined(slot, [1]) for slot in range(n_rows)])

    def row(self, slot: int) -> DraftRow:
        row = self.rows.get(slot)
        assert row is not None
        return row

    def play(
        self, hits: Sequence[int] = (), accepted: dict[int, int] | None = None, n_rows: int | None = None, room: int = K
    ) -> list[int]:
        """One round: these slots hit, the others miss; of each source so many tokens stand. The sources."""
        slots = [row.slot for row in self.rows]
        for slot in hits:
            self.row(slot).propose([1] * K, CACHE)
        missed = [(self.row(slot), room) for slot in slots if slot not in hits and room]
        self.fallback.draft(missed, len(slots) if n_rows is None else n_rows)
        sources = [self.row(slot).source for slot in slots]
        self.clock.now += self.verify_s + self.token_s * sum(len(row.speculation) for row in self.rows)
        k = [
            min((accepted or {}).get(source, 0), len(self.row(slot).speculation)) for slot, source in enumerate(sources)
        ]
        length = torch.tensor([len(self.row(slot).speculation) for slot in slots])
        outcome = Outcome(torch.tensor(slots), length, torch.tensor(k), torch.tensor([9] * len(slots)))
        self.fallback.learn(outcome, self.rows)
        self.rows.commit(outcome)
        return sources


def faded(values: Sequence[float]) -> float:
    """The mean in which a value counts 0.98 times as much as the next."""
    weights = [0.98 ** (len(values) - 1 - at) for at in range(len(values))]
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def test_an_average_forgets_slowly() -> None:
    average = Average()
    assert average.mean(0.7) == 0.7
    values = [3.0, 0.0, 5.0, 1.0, 1.0]
    for at, value in enumerate(values, 1):
        average.add(value)
        assert average.mean(0.7) == pytest.approx(faded(values[:at]))
    for _ in range(1000):
        average.add(2.0)
    assert average.mean(0.7) == pytest.approx(2.0)
    assert average.n == pytest.approx(50)


def test_rows_get_what_they_have_room_for(clock: Clock) -> None:
    world = World(clock, FixedFallback(NoProposer()), n_rows=3)
    some = Counting(clock, NGRAM)
    put_in_flight(some, [(world.row(2), 1), (world.row(0), 3)])
    assert some.asked == [([2, 0], 3)]
    assert [world.row(slot).speculation for slot in range(3)] == [[1, 2, 3], [], [1]]
    assert [world.row(slot).source for slot in range(3)] == [NGRAM, EMPTY, NGRAM]
    put_in_flight(Drawing(), [(world.row(1), 2), (world.row(2), 1)])
    assert (world.row(1).speculation, world.row(2).speculation) == ([2, 2], [2])
    for slot in (1, 2):
        q = world.row(slot).q
        assert q is not None
        assert q.unique().tolist() == [slot]


def both(clock: Clock) -> tuple[Counting, Counting]:
    return Counting(clock, DRAFT, seconds=0.5), Counting(clock, NGRAM, n_most=1)


@pytest.mark.parametrize("kind", [FixedFallback, BatchSizeFallback, MeasuredFallback])
def test_no_proposer_is_asked_where_nothing_was_missed(clock: Clock, kind: type) -> None:
    primary, backup = both(clock)
    parts = FixedFallback(primary) if kind is FixedFallback else kind(primary, backup)
    world = World(clock, parts, n_rows=2)
    for _ in range(3):
        assert world.play(hits=[0, 1]) == [CACHE, CACHE]
    assert (primary.asked, backup.asked) == ([], [])


def test_always_asks_the_same(clock: Clock) -> None:
    primary, _ = both(clock)
    world = World(clock, FixedFallback(primary), n_rows=3)
    assert world.play(hits=[1]) == [DRAFT, CACHE, DRAFT]
    assert primary.asked == [([0, 2], K)]
    without = World(clock, FixedFallback(NoProposer()))
    assert without.play() == [EMPTY]


# Theorem 17


def test_the_critical_batch_size_is_that_of_theorem_17(clock: Clock) -> None:
    primary, backup = both(clock)
    parts = BatchSizeFallback(primary, backup)
    assert parts.critical == math.inf
    world = World(clock, parts, n_rows=2, verify_s=2.0)
    stands = {DRAFT: 3, NGRAM: 1, CACHE: 4}
    #           both rows miss, slow and fast; then hits after hits and after misses
    rounds = [([], 1), ([], 99), ([0], 1), ([0, 1], 1), ([1], 99), ([0, 1], 1), ([0, 1], 1), ([0], 1)]
    was_hit: list[list[bool]] = [[], []]
    for hits, n_rows in rounds:
        slow = n_rows < parts.critical
        sources = world.play(hits, stands, n_rows)
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
    parts = BatchSizeFallback(primary, backup)
    world = World(clock, parts, n_rows=4, verify_s=1.0)
    for at in range(200):  # three rows of four hit, each time others
        world.play([slot for slot in range(4) if (slot + at) % 4], {DRAFT: 2, NGRAM: 0, CACHE: 2}, n_rows=1)
    edge = parts.critical
    assert 1 < edge < 50
    assert edge != round(edge)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    assert world.play([0, 1, 2], stands, n_rows=math.floor(edge))[3] == DRAFT
    assert world.play([0, 1, 2], stands, n_rows=math.ceil(parts.critical))[3] == NGRAM


def test_waiting_for_a_primary_that_is_no_better_never_pays(clock: Clock) -> None:
    primary, backup = both(clock)
    parts = BatchSizeFallback(primary, backup)
    world = World(clock, parts)
    for _ in range(10):
        world.play(accepted={DRAFT: 0, NGRAM: 1})
    assert parts.critical == 0
    assert world.play(accepted={DRAFT: 0, NGRAM: 1}) == [NGRAM]


# By measurement


def sources(world: World, n: int, accepted: dict[int, int], room: int = K) -> list[int]:
    """Who drafted in n rounds of one missing row."""
    return [world.play(accepted=accepted, room=room)[0] for _ in range(n)]


def test_a_primary_that_pays_is_asked_but_for_a_sample(clock: Clock) -> None:
    primary, backup = both(clock)
    found = sources(World(clock, MeasuredFallback(primary, backup)), 2 * EVERY, {DRAFT: 3, NGRAM: 0})
    assert [at for at, source in enumerate(found, 1) if source == NGRAM] == [EVERY, 2 * EVERY]


def test_a_primary_that_is_slow_is_left_until_it_is_quick(clock: Clock) -> None:
    """3 tokens more for 0.5 s pay where a round of 1 s gives less than 4; for 5 s they do not."""
    primary, backup = both(clock)
    primary.seconds = 5.0
    world, stands = World(clock, MeasuredFallback(primary, backup)), {DRAFT: 3, NGRAM: 0}
    found = sources(world, 2 * EVERY, stands)
    assert found[0] == DRAFT, "before anything is known"
    assert [at for at, source in enumerate(found, 1) if source == DRAFT] == [1, EVERY, 2 * EVERY]
    primary.seconds = 0.01
    sources(world, 200 * EVERY, stands)
    assert sources(world, EVERY - 1, stands).count(DRAFT) == EVERY - 1


def test_a_primary_that_is_of_no_use_is_left(clock: Clock) -> None:
    primary, backup = both(clock)
    primary.seconds = 0.01
    world = World(clock, MeasuredFallback(primary, backup))
    found = sources(world, 4 * EVERY, {DRAFT: 0, NGRAM: 1})
    assert found[2 * EVERY :].count(DRAFT) == 2


def test_a_few_unlucky_misses_do_not_end_it(clock: Clock) -> None:
    """What the primary prepared stands well: its first misses need not."""
    primary, backup = both(clock)
    world = World(clock, MeasuredFallback(primary, backup))
    for _ in range(20):
        world.play([0], {CACHE: 3})
    found = []
    for _ in range(4):
        found += world.play([], {CACHE: 3, DRAFT: 0})
        world.play([0], {CACHE: 3, DRAFT: 0})
    assert found == [DRAFT] * 4
    found = [world.play([], {DRAFT: 0})[0] for _ in range(40)]
    assert NGRAM in found, "many are no bad luck"


def test_one_row_alone_does_not_hold_up_a_large_batch(clock: Clock) -> None:
    """2 tokens for half a second: worth it where a round gives 1, not where it gives 8."""
    primary, backup = both(clock)
    parts = MeasuredFallback(primary, backup)
    world = World(clock, parts, n_rows=8)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    found = [world.play(list(range(1, 8)), stands)[0] for _ in range(20)]
    assert found == [DRAFT] + [NGRAM] * 19
    assert world.play([], {DRAFT: 2, NGRAM: 0})[0] == DRAFT, "but all of them do"


def test_rounds_that_hit_do_not_lengthen_the_verification(clock: Clock) -> None:
    """A verification lasts from the last answer to the outcome, whoever answered."""
    primary, backup = both(clock)
    for parts in (MeasuredFallback(primary, backup), BatchSizeFallback(primary, backup)):
        world = World(clock, parts, verify_s=0.25)
        for at in range(40):
            world.play(hits=[] if at % 8 == 0 else [0], accepted={DRAFT: 1})
        assert parts._seen.verify_s.mean(0.0) == pytest.approx(0.25)


def test_only_whoever_was_asked_is_judged(clock: Clock) -> None:
    """A row without room says nothing about the backup, and a primary that has nothing to say is still the primary."""
    primary, backup = both(clock)
    parts = MeasuredFallback(primary, backup)
    world = World(clock, parts)
    world.play(room=0)
    seen = parts._seen
    assert (seen.accepted_slow.n, seen.accepted_fast.n, seen.draft_s.n) == (0, 0, 0)
    primary.n_most = 0
    assert world.play() == [EMPTY]
    assert (seen.accepted_slow.n, seen.accepted_fast.n) == (1, 0)
    backup.n_most = 0
    seen.draft_s.add(1e9)
    assert world.play() == [EMPTY]
    assert (seen.accepted_slow.n, seen.accepted_fast.n) == (1, 1)


def test_a_new_row_does_not_inherit_the_luck_of_the_one_before(clock: Clock) -> None:
    parts = BatchSizeFallback(*both(clock))
    world = World(clock, parts)
    world.play(hits=[0])
    world.play(hits=[0])
    seen = parts._seen
    assert (seen.hit_after_hit.n, seen.hit_after_miss.n) == (1, 0)
    world.rows.retire([0])
    world.rows.admit([Joined(0, [1])])
    world.play()
    assert (seen.hit_after_hit.n, seen.hit_after_miss.n) == (1, 0)
    world.play(hits=[0])
    assert seen.hit_after_miss.mean(0.0) == 1


def test_an_outcome_of_a_row_that_left_counts_for_nothing(clock: Clock) -> None:
    parts = MeasuredFallback(*both(clock))
    world = World(clock, parts)
    world.play()
    n = parts._seen.accepted.n
    gone = torch.tensor([7])
    parts.learn(Outcome(gone, gone, gone, gone), world.rows)
    assert parts._seen.accepted.n == n
