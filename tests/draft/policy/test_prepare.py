"""Whether to prepare: what is learnt from rounds, and what is made of it. The clock is a number, and so is chance."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import pytest
import torch

from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.modes import FIRST, LEAST_GAP, MOST_FIRST, MOST_GAP, SPENT, VISIT, WARM_UP
from saguaro.draft.policy.prepare import AlwaysPrepare, MeasuredPrepare
from saguaro.draft.rows import DraftRows
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, Joined, Outcome

K = 4
START, AWAY = WARM_UP + FIRST, WARM_UP + VISIT  # rounds of a stretch at the start, and of a visit
SEEDS = range(20)
SLOW = (1.5, 1.25)  # rounds in which the draft catches up, after others that were prepared for


@dataclass(frozen=True)
class World:
    """What a round takes, and gives."""

    hit_s: float  # it was prepared for, and every row hits
    miss_s: float  # it was prepared for, and some row misses
    without_s: float
    misses: float = 0.1  # of the rounds that were prepared for
    noise: float = 0.02  # of a round's time
    hiccups: float = 0.01  # of the rounds, that take up to ten times as long
    miss: int = DRAFT  # who drafts a miss

    @property
    def with_s(self) -> float:
        """What a round takes that was prepared for, on average."""
        return self.hit_s + self.misses * (self.miss_s - self.hit_s)

    def play(self, chance: Random, prepares: bool, n_rows: int) -> tuple[float, list[int]]:
        """Seconds of a round, and who made what is in flight after it."""
        hit_rate = (1 - self.misses) ** (1 / n_rows) if prepares else 0.0
        sources = [CACHE if chance.random() < hit_rate else self.miss for _ in range(n_rows)]
        seconds = (self.miss_s if self.miss in sources else self.hit_s) if prepares else self.without_s
        seconds *= max(0.5, chance.gauss(1.0, self.noise))
        return seconds * (chance.uniform(2, 10) if chance.random() < self.hiccups else 1), sources


class Play:
    """Rounds of rows that stay."""

    def __init__(self, n_rows: int, seed: int = 0) -> None:
        self.now, self.chance = 0.0, Random(seed)
        self.learnt = Learnt(lambda: self.now)
        self.policy = MeasuredPrepare(self.learnt)
        self.rows = DraftRows()
        self.n_behind = 0  # rounds in a row that were not prepared for
        self.admit(n_rows)

    def admit(self, n: int) -> None:
        """Rows that join."""
        taken = len(list(self.rows))
        self.rows.admit([Joined(taken + at, [1]) for at in range(n)])

    def rounds(self, n: int, world: World) -> list[bool]:
        """Which of n rounds are prepared for."""
        return [self.round(world) for _ in range(n)]

    def round(self, world: World, asked: Sequence[int] | None = None) -> bool:
        """One round of all rows, or of some while the others are read."""
        rows = [row for row in self.rows if asked is None or row.slot in asked]
        prepares = self.policy.prepares(rows, self.rows)
        seconds, sources = world.play(self.chance, prepares, len(rows))
        self.now += seconds * (1 if prepares else dict(enumerate(SLOW)).get(self.n_behind, 1))
        self.n_behind = 0 if prepares else self.n_behind + 1
        accepted = [self._accepted(row.source, len(row.speculation)) for row in rows]
        length = [len(row.speculation) for row in rows]
        slots, lengths, k = (torch.tensor(each) for each in ([row.slot for row in rows], length, accepted))
        self.learnt.outcome(Outcome(slots, lengths, k, bonus=k), self.rows)
        for row, source in zip(rows, sources, strict=True):
            row.propose([1] * (0 if source == EMPTY else K), source)
        return prepares

    def _accepted(self, source: int, length: int) -> int:
        """So many tokens stand, with luck: a model's are good, others hardly ever."""
        chance = 0.8 if source in (CACHE, DRAFT) else 0.1
        return next((k for k in range(length) if self.chance.random() > chance), length)


# DraftRows, the world, and whether preparing pays there.
CLEAR = {
    "two rows, as measured": (2, World(21.0, 24.4, 20.1, misses=0.09), False),
    "one row, costs 5%": (1, World(20.0, 23.4, 19.1, misses=0.05), False),
    "one row, pays 5%": (1, World(20.0, 23.4, 21.3, misses=0.05), True),
    "four rows, costs 10%": (4, World(20.0, 23.4, 18.5, misses=0.2), False),
    "four rows, pays 10%": (4, World(20.0, 23.4, 22.8, misses=0.2), True),
    "a preparation takes ages": (2, World(4.0, 4.2, 1.2), False),
    "misses get next to nothing": (4, World(1.2, 1.2, 1.0, misses=0.6, miss=NGRAM), True),
    "misses get nothing": (4, World(1.2, 1.2, 1.0, misses=0.6, miss=EMPTY), True),
}
UNCLEAR = {  # 5% among many misses
    "costs": (4, World(20.0, 23.4, 21.0, misses=0.6), False),
    "pays": (4, World(20.0, 23.4, 23.2, misses=0.6), True),
}
PAYS, COSTS = World(20.0, 23.4, 22.8), World(20.0, 23.4, 18.4)
CALM = World(22.0, 22.0, 20.0, noise=0.001, hiccups=0.0)


def test_the_lavish_always_prepare() -> None:
    assert AlwaysPrepare().prepares([], [])


@pytest.mark.parametrize("name", CLEAR)
def test_what_is_clear_is_found_at_once(name: str) -> None:
    """By evidence: within 40 rounds mostly, and within 120 always; then there are but visits."""
    n_rows, world, pays = CLEAR[name]
    n_at_once = 0
    for seed in SEEDS:
        play = Play(n_rows, seed)
        assert play.rounds(START, world) == [True] * START
        assert play.rounds(START, world) == [False] * START
        play.rounds(40 - 2 * START, world)
        n_at_once += play.rounds(80, world).count(not pays) <= 2 * AWAY
        assert play.rounds(120, world).count(not pays) <= 3 * AWAY
    assert n_at_once >= 18


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_less_clear_is_found_when_there_was_more_to_see(name: str) -> None:
    n_rows, world, pays = UNCLEAR[name]
    found = [Play(n_rows, seed).rounds(400, world)[160:].count(not pays) for seed in SEEDS]
    assert sorted(found)[-3] <= 4 * AWAY


def test_two_in_a_hundred_are_found_in_the_end() -> None:
    world = World(20.2, 23.6, 20.1, misses=0.09)
    found = [Play(2, seed).rounds(1000, world)[600:].count(True) for seed in SEEDS]
    assert sorted(found)[-3] < 100


def test_where_it_makes_no_difference_it_is_settled_all_the_same() -> None:
    """Both are watched for so long, and not for longer."""
    first = 2 * START * (MOST_FIRST // FIRST)
    for seed in SEEDS:
        found = Play(4, seed).rounds(first + 400, World(1.0, 1.0, 1.0))
        assert {True, False} == set(found[first:])
        assert sum(before != after for before, after in pairwise(found[first + 2 * START :])) <= 30


@pytest.mark.parametrize("name", ["four rows, costs 10%", "four rows, pays 10%"])
def test_in_the_long_run_the_worse_way_is_hardly_ever_taken(name: str) -> None:
    n_rows, world, pays = CLEAR[name]
    for seed in SEEDS[:3]:
        play = Play(n_rows, seed)
        play.rounds(5000, world)
        assert 0 < play.rounds(3 * MOST_GAP, world).count(not pays) < 0.005 * 3 * MOST_GAP


def test_visits_double_their_distance_until_something_is_new() -> None:
    """The ways stay in their order, and what is taken takes longer than before: it is looked at again soon."""
    play, world = Play(2), replace(CALM, hit_s=26.0, miss_s=26.0)
    found = play.rounds(2 * MOST_GAP + 2000, world)
    after = play.rounds(200, replace(world, without_s=24.0))
    begun = [at for at, (before, now) in enumerate(pairwise(found[2 * START :])) if now and not before]
    gaps = [later - earlier - AWAY - WARM_UP for earlier, later in pairwise(begun)]
    loss = 1 - world.without_s / world.hit_s
    slower = world.hit_s / world.without_s
    first = round(AWAY * loss * slower / SPENT)  # visits so far apart take the share of time they may
    assert begun[0] == pytest.approx(first, abs=2 * LEAST_GAP)
    assert gaps == [pytest.approx(min(first * 2**n, MOST_GAP), abs=LEAST_GAP) for n in range(1, len(gaps) + 1)]
    assert gaps[-1] == MOST_GAP
    assert after.count(True) == AWAY


@pytest.mark.parametrize(
    ("before", "after", "within"),
    [
        (PAYS, replace(PAYS, without_s=18.4), 1200),  # what is not taken gets better: a visit shows it
        (COSTS, replace(COSTS, hit_s=16.0, miss_s=19.0), 1200),
        (COSTS, PAYS, 200),  # what is taken gets worse
        (PAYS, World(84.0, 90.0, 80.0), 200),
        (COSTS, World(8.0, 9.0, 10.0), 200),  # everything gets better, and the other way more
        (replace(PAYS, without_s=21.8), replace(PAYS, without_s=21.8, misses=0.9), 200),  # only the text is another
    ],
)
def test_a_change_of_the_world_is_followed(before: World, after: World, within: int) -> None:
    """Shortly after a visit that left nothing open."""
    paid, pays = before.with_s < before.without_s, after.with_s < after.without_s
    for seed in SEEDS:
        play = Play(4, seed)
        assert play.rounds(600, before)[100:].count(not paid) < 40
        play.rounds(within, after)
        assert play.rounds(200, after).count(not pays) < 40


def test_a_hiccup_changes_nothing() -> None:
    """Wherever in the first rounds it comes."""
    for at in range(2 * START + 10):
        play = Play(8, at)
        play.rounds(at, CALM)
        play.now += 200.0
        play.rounds(2 * START + 10 - at, CALM)
        assert play.rounds(100, CALM).count(True) <= 2 * AWAY


def test_each_batch_size_has_a_choice_of_its_own_that_is_kept() -> None:
    """One row pays and five do not: what was learnt of the one is there when the others have left."""
    play = Play(1)
    play.rounds(100, PAYS)
    play.admit(4)
    assert play.rounds(START, COSTS) == [True] * START, "nothing is known of this size"
    assert play.rounds(100, COSTS)[2 * START :].count(True) <= 2 * AWAY
    play.rows.retire([1, 2, 3, 4])
    assert play.rounds(20, PAYS).count(False) <= AWAY
    play.admit(4)
    assert play.rounds(20, COSTS).count(True) <= AWAY


def test_rounds_in_which_somebody_joins_or_is_read_say_nothing() -> None:
    """They may take any time: here preparing pays, and is blamed for nothing that it did not do."""
    world = replace(CALM, without_s=24.0)
    for is_read in (False, True):
        play = Play(3)
        found = []
        for at in range(300):
            if at % 3 == 2 and is_read:
                play.admit(1)  # known, and not asked about before its text is read
                found.append(play.round(world, asked=[0, 1, 2]))
                play.now += 20.0 if found[-1] else 0.0
                play.rows.retire([3])
            elif at % 3 == 2:
                play.now += 20.0 if found[-1] else 0.0
                play.rows.retire([2])
                play.rows.admit([Joined(2, [1])])  # another in the same place
            found.append(play.round(world))
        assert False in found[:100]
        assert found[100:].count(False) <= 6 * AWAY


def test_a_round_of_two_batch_sizes_counts_for_neither() -> None:
    play = Play(5)
    play.rounds(WARM_UP + 2, CALM)
    play.rows.retire([4])
    play.rounds(1 + WARM_UP, CALM)
    assert [len(play.policy._books[size].rounds) for size in (8, 4)] == [1, 0]
    play.rounds(1, CALM)
    assert [len(play.policy._books[size].rounds) for size in (8, 4)] == [1, 1]


def test_whoever_leaves_disturbs_nobody() -> None:
    play = Play(8)
    found = []
    for at in range(80):
        if at % 2:
            play.rows.retire([7])
        elif at:
            play.rows.admit([Joined(7, [1])])
        found.append(play.round(COSTS))
    assert found[-10:].count(False) >= 10 - AWAY


def test_without_rows_nothing_is_decided() -> None:
    play = Play(2)
    play.rounds(5, PAYS)
    assert play.policy.prepares([], play.rows)
    play.now += 2.0
    assert play.rounds(3, PAYS) == [True] * 3
