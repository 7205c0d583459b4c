"""Whether to prepare at all: where target and draft share a device, what is prepared slows what is verified.

Preparing or not decides how long it takes until the next preparation (the verification beside it, then misses drafted
just in time) and what is in flight by then. Either way is worth

    rate = (tokens that come of a row) / (seconds of a round)

and the better one is taken, by batch size. Tokens are not counted one way and the other: luck would take hundreds of
rounds to even out. What was prepared is what would have been drafted just in time, so it is learnt once how many
tokens stand of a speculation, by who made it and its length, and each way is judged by the speculations it makes.

Rounds in which somebody joined or was read say nothing; nor do the first after a change, when the draft catches up
with text it did not compute. The others come in stretches of one way, which take turns until the difference is beyond
chance; from then on the other way is visited, the more rarely the worse it is and the more often that changed nothing.
In a stretch a round that took far longer than most counts for nothing. Of the rest a mean is kept and no median: rounds
are of two kinds, with a miss and without, and a median sees but one.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Protocol

from saguaro.device.graphs import bucket
from saguaro.draft.policy.average import Average
from saguaro.draft.rows import DraftRow, DraftRows
from saguaro.types import CACHE, DRAFT, Outcome

WARM_UP = 2  # rounds after a change that are not counted
FIRST, MOST_FIRST = 6, 48  # rounds of a stretch before the better way is known, and of either way in all
SURE = 2  # standard errors by which one way is known for the better
VISIT = 4  # rounds the other way, now and then
LEAST_GAP, MOST_GAP = 32, 4096  # rounds between visits
SPENT = 0.005  # of the time, at most, on visits: where the other way is much worse they begin further apart
KEPT = 1 / 4  # of what was known of a way, with every stretch more
NEWS, LEAST_NEWS = 4, 0.08  # standard errors and share by which a stretch is news: one small hiccup is none
HICCUP = 2.5  # a round takes at most as many times the usual

Kind = tuple[int, int]  # of a speculation: who made it, and its length
Round = tuple[float, Sequence[Kind]]  # its seconds, and the speculations it made


class PreparePolicy(Protocol):
    """Decides whether to prepare."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Whether to prepare, now that these rows were answered, of those that are known; asked once a round."""

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """What came of what is in flight; told before it is committed."""


class AlwaysPrepare:
    """Always prepares."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Yes."""
        return True

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to decide."""


class NeverPrepare:
    """Never prepares: the target's own thread would have to, and nothing would be hidden."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """No."""
        return False

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to decide."""


class MeasuredPrepare:
    """Prepares where that pays."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._worth: dict[Kind, Average] = defaultdict(lambda: Average(kept=0.998))  # tokens that stood of one
        self._books: dict[int, _Book] = defaultdict(_Book)  # by batch size
        self._asked: set[DraftRow] = set()  # at the last preparation, if nobody was read
        self._began = 0.0
        self._last, self._n_alike = (0, True), 0  # batch size and way of the last round; so many in a row

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """See PreparePolicy."""
        now, everybody, size = self._now(), set(known), bucket(len(asked))
        book, is_steady = self._books[size], size == self._last[0] and self._n_alike > WARM_UP
        if asked and is_steady and everybody <= self._asked:
            kinds = [_kind(row, len(row.speculation)) for row in asked]
            book.count((now - self._began, kinds), self._worth)
        self._asked, self._began = set(asked) if everybody.issubset(asked) else set(), now
        last, self._last = self._last, (size, book.is_taken or not asked)
        self._n_alike = self._n_alike + 1 if self._last == last else 1
        return self._last[1]

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """See PreparePolicy."""
        facts = zip(outcome.slots.tolist(), outcome.length.tolist(), outcome.n_accepted.tolist(), strict=True)
        for slot, length, k in facts:
            row = rows.get(slot)
            if row is not None:
                self._worth[_kind(row, length)].add(k)


@dataclass
class _Way:
    """What is known of rounds that were prepared for, or of rounds that were not."""

    seconds: Average = field(default_factory=lambda: Average(kept=1.0))  # of a round
    made: dict[Kind, float] = field(default_factory=dict)  # speculations, of which old ones count less

    def learn(self, rounds: Sequence[Round], kept: float) -> None:
        """One stretch more; so much is kept of what was known."""
        self.seconds.fade(kept)
        self.made = {kind: kept * times for kind, times in self.made.items()}
        for seconds, kinds in rounds:
            self.seconds.add(seconds)
            for kind in kinds:
                self.made[kind] = self.made.get(kind, 0.0) + 1

    def is_news(self, rounds: Sequence[Round]) -> bool:
        """Whether these are not what was known."""
        known = self.seconds.mean(0.0)
        chance = self.seconds.spread() * math.sqrt(1 / len(rounds) + 1 / self.seconds.n)
        return abs(fmean(seconds for seconds, _ in rounds) - known) > max(NEWS * chance, LEAST_NEWS * known)

    def rate(self, worth: dict[Kind, Average]) -> tuple[float, float]:
        """Tokens of a row per second, and the standard error of that."""
        n = sum(self.made.values())
        stood = sum(times * worth[kind].mean(0.0) for kind, times in self.made.items())
        mean = self.seconds.mean(1.0)
        rate = (n + stood) / n / mean
        return rate, rate * self.seconds.spread() / mean / math.sqrt(self.seconds.n)


@dataclass
class _Book:
    """Both ways at one batch size, and which is taken."""

    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))  # without preparing, with it
    best: bool | None = None  # the better way, once that is known
    is_taken: bool = True  # the way of this stretch
    rounds: list[Round] = field(default_factory=list)  # of this stretch
    loss: float = 0.0  # of the worse way, as a share of the better one's rate
    gap: int = LEAST_GAP  # rounds between visits
    n_left: int = 0  # until the next

    def count(self, one: Round, worth: dict[Kind, Average]) -> None:
        """A round of the way that is taken; after the last of a stretch it is decided how to go on."""
        self.rounds.append(one)
        if len(self.rounds) == self._length():
            is_news, is_open = self._learn(), self._judge(worth)
            self._go_on(is_news, is_open)

    def _length(self) -> int:
        if self.best is None:
            return FIRST
        return LEAST_GAP if self.is_taken == self.best else VISIT

    def _learn(self) -> bool:
        """Add the stretch to what is known; whether it is other than that was."""
        most = HICCUP * median_low(seconds for seconds, _ in self.rounds)
        usual = [one for one in self.rounds if one[0] <= most]
        way = self.ways[self.is_taken]
        is_news = self.best is not None and way.is_news(usual)
        way.learn(usual, kept=1.0 if self.best is None else 0.0 if is_news else KEPT)
        self.rounds = []
        return is_news

    def _judge(self, worth: dict[Kind, Average]) -> bool:
        """Find the way that is better beyond chance, or that seems so after long; whether that is new or in doubt."""
        n, before = min(way.seconds.n for way in self.ways), self.best
        if not n:
            return True
        (without, error), (with_it, error_with) = (way.rate(worth) for way in self.ways)
        seems, is_sure = with_it > without, abs(with_it - without) > SURE * math.hypot(error, error_with)
        self.loss = 1 - min(with_it, without) / max(with_it, without)
        if is_sure or (before is None and n >= MOST_FIRST):
            self.best = seems
        return self.best != before or (self.is_taken != before and self.is_taken == seems)

    def _go_on(self, is_news: bool, is_open: bool) -> None:
        """Choose the way of the next stretch: visits double their distance while they leave nothing open."""
        if self.best is None:  # one way twice in a row saves a change
            self.is_taken ^= self.ways[self.is_taken].seconds.n > self.ways[not self.is_taken].seconds.n
            return
        if is_news:  # the other way may have changed as well
            self.gap = self.n_left = LEAST_GAP
        elif is_open:
            self.gap = self.n_left = max(LEAST_GAP, math.ceil((WARM_UP + VISIT) * self.loss / SPENT))
        elif self.is_taken != self.best:
            self.gap = self.n_left = min(2 * self.gap, MOST_GAP)
        else:
            self.n_left -= LEAST_GAP
        self.is_taken = self.best == (self.n_left > 0)


def _kind(row: DraftRow, length: int) -> Kind:
    return (DRAFT if row.source == CACHE else row.source, length)
