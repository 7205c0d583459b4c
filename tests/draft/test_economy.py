"""Whether to prepare: what is learnt from rounds, and what is made of it. The clock is a number, and so is chance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
import torch

from saguaro.draft.economy import FIRST, LEAST_GAP, MOST_GAP, VISIT, WARM_UP, Lavish, Thrifty
from saguaro.draft.rows import Rows
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, Joined, Outcome

K = 4
START = WARM_UP + FIRST  # rounds of either way before there is a choice
SEEDS = range(4)


@dataclass(frozen=True)
class World:
    """What a round takes, and gives."""

    with_s: float  # of a verification beside which something is prepared
    without_s: float
    draft_s: float = 0.2  # to draft misses just in time
    hit_rate: float = 0.8
    noise: float = 0.05  # of a round's time
    hiccups: float = 0.01  # rounds that take ten times as long
    miss: int = DRAFT  # who drafts a miss

    def play(self, chance: Random, prepares: bool, n_rows: int) -> tuple[float, list[int]]:
        """Seconds of a round, and who made what is in flight after it."""
        sources = [CACHE if prepares and chance.random() < self.hit_rate else self.miss for _ in range(n_rows)]
        seconds = self.with_s if prepares else self.without_s
        seconds += self.draft_s * (DRAFT in sources)
        seconds *= max(0.5, chance.gauss(1.0, self.noise))
        return seconds * (10 if chance.random() < self.hiccups else 1), sources


class Play:
    """Rounds of rows that stay."""

    def __init__(self, n_rows: int, seed: int = 0) -> None:
        self.now, self.chance = 0.0, Random(seed)
        self.economy = Thrifty(lambda: self.now)
        self.rows = Rows()
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
        prepares = self.economy.prepares(rows, self.rows)
        seconds, sources = world.play(self.chance, prepares, len(rows))
        self.now += seconds
        accepted = [self._accepted(row.source, len(row.speculation)) for row in rows]
        length = [len(row.speculation) for row in rows]
        slots, lengths, k = (torch.tensor(each) for each in ([row.slot for row in rows], length, accepted))
        self.economy.learn(Outcome(slots, lengths, k, bonus=k), self.rows)
        for row, source in zip(rows, sources, strict=True):
            row.propose([1] * (0 if source == EMPTY else K), source)
        return prepares

    def _accepted(self, source: int, length: int) -> int:
        """So many tokens stand, with luck: a model's are good, others hardly ever."""
        chance = 0.8 if source in (CACHE, DRAFT) else 0.1
        return next((k for k in range(length) if self.chance.random() > chance), length)


# At one row a round with a hit is spared the draft; at eight some row misses always.
WORLDS = {
    "one row, pays": (1, World(1.05, 1.0, draft_s=0.3), True),
    "one row, costs": (1, World(1.4, 1.0), False),
    "eight rows, pays": (8, World(1.0, 1.12), True),
    "eight rows, costs": (8, World(1.2, 1.0), False),
    "a preparation takes ages": (2, World(4.0, 1.0), False),
    "misses get next to nothing": (4, World(1.2, 1.0, draft_s=0.0, miss=NGRAM), True),
    "misses get nothing": (4, World(1.2, 1.0, draft_s=0.0, miss=EMPTY), True),
    "nothing is ever hit": (4, World(1.12, 1.0, hit_rate=0.0), False),
}


def test_the_lavish_always_prepare() -> None:
    assert Lavish().prepares([], [])


@pytest.mark.parametrize("name", WORLDS)
def test_the_better_is_found_at_once_and_kept(name: str) -> None:
    """Both ways are looked at, then the better is taken but for visits: less than 1% of the rounds."""
    n_rows, world, pays = WORLDS[name]
    for seed in SEEDS:
        play = Play(n_rows, seed)
        assert play.rounds(START, world) == [True] * START
        assert play.rounds(START + 1, world) == [False] * (START + 1)
        assert play.rounds(20, world).count(not pays) <= VISIT
        assert play.rounds(2000, world).count(not pays) < 20


def test_where_it_makes_no_difference_nothing_is_lost_and_both_are_watched() -> None:
    play = Play(4)
    found = play.rounds(2000, World(1.0, 1.0, hit_rate=0.0))
    assert found[500:].count(True) > 0
    assert found[500:].count(False) > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (World(1.0, 1.15), World(1.15, 1.0)),
        (World(1.15, 1.0), World(1.0, 1.15)),
        (World(1.0, 1.2), World(1.0, 0.8)),  # only what is not taken gets better
        (World(1.2, 1.0), World(0.8, 1.0)),
        (World(1.0, 1.2), World(4.2, 4.0)),
    ],
)
def test_a_change_of_the_world_is_followed(before: World, after: World) -> None:
    pays = after.with_s < after.without_s
    for seed in SEEDS:
        play = Play(8, seed)
        assert play.rounds(500, before)[100:].count(not (before.with_s < before.without_s)) < 20
        play.rounds(800, after)
        assert play.rounds(400, after).count(not pays) < 40


def test_a_hiccup_changes_nothing() -> None:
    """Wherever in the first rounds it comes."""
    calm = World(1.2, 1.0, hiccups=0.0)
    for at in range(2 * START + 10):
        play = Play(8, at)
        play.rounds(at, calm)
        play.now += 10.0
        play.rounds(2 * START + 10 - at, calm)
        assert play.rounds(100, calm).count(True) <= VISIT


def test_the_worse_the_other_way_the_rarer_it_is_taken_but_never_never() -> None:
    def gaps(with_s: float) -> list[int]:
        play = Play(8)
        found = play.rounds(3 * MOST_GAP, World(with_s, 1.0, hit_rate=0.0, noise=0.01, hiccups=0.0))[3 * START :]
        visits = [at for at, prepares in enumerate(found) if prepares]
        return [later - earlier for earlier, later in pairwise(visits) if later > earlier + 1]

    near, far, ages = (gaps(with_s) for with_s in (1.03, 1.3, 9.0))
    assert LEAST_GAP <= min(near) <= max(near) < min(far) <= max(far) < min(ages) <= MOST_GAP


def test_each_batch_size_has_a_choice_of_its_own_that_is_kept() -> None:
    """One row pays and five do not: what was learnt of the one is there when the others have left."""
    one, five = World(1.0, 1.12), World(1.12, 1.0)
    play = Play(1)
    play.rounds(100, one)
    play.admit(4)
    assert play.rounds(START, five) == [True] * START, "nothing is known of this size"
    assert play.rounds(100, five)[2 * START :].count(True) <= VISIT
    play.rows.retire([1, 2, 3, 4])
    assert play.rounds(20, one).count(False) <= VISIT
    play.admit(4)
    assert play.rounds(20, five).count(True) <= VISIT


def test_rounds_in_which_somebody_joins_or_is_read_say_nothing() -> None:
    """They may take any time: here preparing costs, and is blamed for nothing that it did not do."""
    world = World(1.0, 1.12, noise=0.0, hiccups=0.0)
    for is_read in (False, True):
        play = Play(3)
        found = []
        for at in range(300):
            if at % 3 == 2 and is_read:
                play.admit(1)  # known, and not asked about before its text is read
                found.append(play.round(world, asked=[0, 1, 2]))
                play.now += 2.0 if found[-1] else 0.0
                play.rows.retire([3])
            elif at % 3 == 2:
                play.now += 2.0 if found[-1] else 0.0
                play.rows.retire([2])
                play.rows.admit([Joined(2, [1])])  # another in the same place
            found.append(play.round(world))
        assert found[100:].count(False) <= 3 * VISIT


def test_whoever_leaves_disturbs_nobody() -> None:
    world, play = World(1.12, 1.0), Play(8)
    found = []
    for at in range(60):
        if at % 2:
            play.rows.retire([7])
        elif at:
            play.rows.admit([Joined(7, [1])])
        found.append(play.round(world))
    assert found[-10:].count(False) >= 10 - VISIT


def test_without_rows_nothing_is_decided() -> None:
    play = Play(2)
    play.rounds(5, World(1.0, 1.1))
    assert play.economy.prepares([], play.rows)
    play.now += 2.0
    assert play.rounds(3, World(1.0, 1.1)) == [True] * 3


def test_an_outcome_of_a_row_that_left_counts_for_nothing() -> None:
    play = Play(1)
    gone = torch.tensor([7])
    play.economy.learn(Outcome(gone, gone, gone, gone), play.rows)
    assert not play.economy._worth
