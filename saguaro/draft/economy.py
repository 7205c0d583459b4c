"""Whether to prepare at all: where target and draft share a device, what is prepared slows what is verified.

Preparing or not decides how long it takes until the next preparation (the verification beside it, then misses drafted
just in time) and what is in flight by then. Either way is worth

    rate = (tokens that come of a row) / (seconds of a round)

and the better one is taken, by batch size. Tokens are not counted one way and the other: luck would take hundreds of
rounds to even out. What was prepared is what would have been drafted just in time, so it is learnt once how many
tokens stand of a speculation, by who made it and its length, and each way is judged by the speculations it makes.

Rounds in which somebody joined or was read say nothing; nor does a round that took far longer than others of its kind.
A mean of the rest is kept and no median: rounds are of two kinds, with a miss and without, and a median sees but one.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from saguaro.draft.average import Average
from saguaro.draft.rows import Row, Rows
from saguaro.engine.graphs import bucket
from saguaro.types import CACHE, DRAFT, Outcome

WARM_UP, FIRST = 2, 6  # rounds of either way at the start: not counted, and counted
HICCUP = 2.5  # a round takes at most as many times the usual
VISIT = 2  # rounds the other way, now and then; the first after a change is of both ways, and counts for neither
SPENT = 1 / 1500  # of the time, on visits: the worse the other way, the rarer
LEAST_GAP, MOST_GAP = 32, 4096  # rounds between visits
KEPT = 1 / 2  # of what was known of the other way, at a visit

Kind = tuple[int, int]  # of a speculation: who made it, and its length


class Economy(Protocol):
    """Decides whether to prepare."""

    def prepares(self, asked: Sequence[Row], known: Iterable[Row]) -> bool:
        """Whether to prepare, now that these rows were answered, of those that are known; asked once a round."""

    def learn(self, outcome: Outcome, rows: Rows) -> None:
        """What came of what is in flight; told before it is committed."""


class Lavish:
    """Always prepares."""

    def prepares(self, asked: Sequence[Row], known: Iterable[Row]) -> bool:
        """Yes."""
        return True

    def learn(self, outcome: Outcome, rows: Rows) -> None:
        """Nothing to decide."""


class Thrifty:
    """Prepares where that pays."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._worth: dict[Kind, Average] = defaultdict(lambda: Average(kept=0.998))  # tokens that stood of one
        self._books: dict[int, _Book] = defaultdict(_Book)  # by batch size
        self._asked: set[Row] = set()  # at the last preparation, if nobody was read
        self._began = 0.0

    def prepares(self, asked: Sequence[Row], known: Iterable[Row]) -> bool:
        """See Economy."""
        now, everybody, size = self._now(), set(known), bucket(len(asked))
        if everybody and everybody <= self._asked and size == bucket(len(self._asked)):
            self._books[size].count(now - self._began, [_kind(row, len(row.speculation)) for row in asked])
        self._asked, self._began = set(asked) if everybody.issubset(asked) else set(), now
        return self._books[size].choose(self._worth) if asked else True

    def learn(self, outcome: Outcome, rows: Rows) -> None:
        """See Economy."""
        facts = zip(outcome.slots.tolist(), outcome.length.tolist(), outcome.n_accepted.tolist(), strict=True)
        for slot, length, k in facts:
            row = rows.get(slot)
            if row is not None:
                self._worth[_kind(row, length)].add(k)


@dataclass
class _Way:
    """Rounds that were prepared for, or rounds that were not."""

    n_seen: int = 0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=7))  # seconds
    seconds: Average = field(default_factory=Average)  # of a round
    made: dict[Kind, float] = field(default_factory=dict)  # speculations, of which old ones count less

    def count(self, seconds: float, kinds: Sequence[Kind]) -> None:
        """One round more, unless it was a hiccup; what is usual follows when most are."""
        self.n_seen += 1
        self.last.append(seconds)
        if self.n_seen > WARM_UP and seconds <= HICCUP * median_low(self.last):
            self.seconds.add(seconds)
            self._fade_made(self.seconds.kept)
            for kind in kinds:
                self.made[kind] = self.made.get(kind, 0.0) + 1

    def fade(self, kept: float) -> None:
        """Count what was seen so far for less."""
        self.seconds.fade(kept)
        self._fade_made(kept)

    def rate(self, worth: dict[Kind, Average]) -> float:
        """Tokens of a row per second; nothing is known yet: 0."""
        n = sum(self.made.values())
        stood = sum(times * worth[kind].mean(0.0) for kind, times in self.made.items())
        return (n + stood) / n / self.seconds.mean(1.0) if n else 0.0

    def _fade_made(self, kept: float) -> None:
        self.made = {kind: kept * times for kind, times in self.made.items()}


@dataclass
class _Book:
    """Both ways at one batch size, and which is taken."""

    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))  # without preparing, with it
    is_taken: bool = True  # the way of this round
    is_steady: bool = False  # it is that of the round before, too
    n_since: int = 0  # rounds since the last visit, and of this one
    n_left: int = 0

    def count(self, seconds: float, kinds: Sequence[Kind]) -> None:
        """A round that was taken as it was last chosen."""
        if self.is_steady:
            self.ways[self.is_taken].count(seconds, kinds)

    def choose(self, worth: dict[Kind, Average]) -> bool:
        """The way of the next round."""
        before, self.is_taken = self.is_taken, self._next(worth)
        self.is_steady = self.is_taken == before
        return self.is_taken

    def _next(self, worth: dict[Kind, Average]) -> bool:
        for way in (True, False):
            if self.ways[way].n_seen < WARM_UP + FIRST:
                return way
        if self.n_left:
            self.n_left -= 1
            return self.is_taken
        without, with_it = (way.rate(worth) for way in self.ways)
        best = with_it >= without
        self.n_since += 1
        if self.n_since < self._gap(max(with_it, without) / min(with_it, without) - 1):
            return best
        self.n_since, self.n_left = 0, VISIT - 1
        self.ways[not best].fade(KEPT)
        return not best

    @staticmethod
    def _gap(loss: float) -> float:
        """Rounds between visits that each lose so many rounds' time per round."""
        return min(max(LEAST_GAP, VISIT * loss / SPENT), MOST_GAP)


def _kind(row: Row, length: int) -> Kind:
    return (DRAFT if row.source == CACHE else row.source, length)
