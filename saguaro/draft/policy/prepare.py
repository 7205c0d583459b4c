"""Whether to prepare. On a shared device, preparation slows the verification.

Preparing changes the time until the next preparation (the verification, then misses drafted just in time) and the
speculations in flight by then. Each of the two modes has

    rate = (tokens per row) / (seconds per round)

and the mode with the higher rate is used, per batch size. Tokens are not counted per mode, because the variance would
take hundreds of rounds to average out. A prepared speculation equals the one drafted just in time. So the accepted
tokens are learnt once per proposer and length, and each mode is rated by the speculations it makes. A draft that reads
features of its target prepares without the latest ones: what it prepared is learnt apart.

Rounds in which a row joined or was read are not counted; nor are the first rounds after a change, in which the draft
catches up. Other rounds form stretches of one mode. Stretches alternate until the difference is significant. After
that the other mode is visited, more rarely the worse it is and the more visits changed nothing. Within a stretch,
outliers are dropped. The rest is averaged, not reduced to a median: rounds with and without a miss form two clusters,
and a median sees only one.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any, Protocol

from saguaro.device.graphs import bucket
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.kept import State, numbers
from saguaro.draft.policy.learnt import Kind, Learnt
from saguaro.draft.rows import DraftRow

WARM_UP = 2  # rounds after a change that are not counted
FIRST, MOST_FIRST = 6, 48  # rounds per stretch before the better mode is known, and in total per mode
SURE = 2  # standard errors for a significant difference
VISIT = 4  # rounds per visit of the other mode
LEAST_GAP, MOST_GAP = 32, 4096  # rounds between visits
SPENT = 0.005  # maximum share of time for visits: a much worse mode is visited less often from the start
KEPT = 1 / 4  # decay of earlier measurements per stretch
NEWS, LEAST_NEWS = 4, 0.08  # standard errors, and minimum share, by which a stretch counts as a change
HICCUP = 2.5  # limit of a round's time, relative to the median

Round = tuple[float, Sequence[Kind]]  # seconds, and the speculations made


class Prepares(Protocol):
    """Decides whether to prepare."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Whether to prepare for these rows, a part of the known ones. Called once per round, after the reply."""

    def state(self) -> State:
        """To be kept (kept.py)."""

    def restore(self, state: State) -> None:
        """Continue from a kept state."""


class AlwaysPrepare:
    """Always prepares."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Always True."""
        return True

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


class NeverPrepare:
    """Never prepares. Used if the draft runs in the target's thread, where nothing could overlap."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Always False."""
        return False

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


class MeasuredPrepare:
    """Prepares if measurements show a gain."""

    def __init__(self, learnt: Learnt) -> None:
        self._learnt = learnt
        self._books: dict[int, _Book] = defaultdict(_Book)  # by batch size
        self._asked: set[DraftRow] = set()  # rows of the last preparation, if no text was being read
        self._began = 0.0
        self._last, self._n_alike = (0, True), 0  # batch size and mode of the last round, and for how many rounds

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """See Prepares."""
        now, everybody, size = self._learnt.now(), set(known), bucket(len(asked))
        book, is_steady = self._books[size], size == self._last[0] and self._n_alike > WARM_UP
        if asked and is_steady and everybody <= self._asked:
            kinds = [self._learnt.kind_of(row, len(row.speculation)) for row in asked]
            book.count((now - self._began, kinds), self._learnt.worth)
        self._asked, self._began = set(asked) if everybody.issubset(asked) else set(), now
        last, self._last = self._last, (size, book.is_taken or not asked)
        self._n_alike = self._n_alike + 1 if self._last == last else 1
        return self._last[1]

    def state(self) -> State:
        """See Prepares."""
        return {str(size): book.state() for size, book in self._books.items()}

    def restore(self, state: State) -> None:
        """See Prepares."""
        for size, each in state.items():
            self._books[int(size)].restore(each)


@dataclass
class _Way:
    """Measurements of one mode: rounds with, or without, preparation."""

    seconds: Average = field(default_factory=lambda: Average(kept=1.0))  # per round
    made: dict[Kind, float] = field(default_factory=dict)  # number of speculations, decayed

    def learn(self, rounds: Sequence[Round], kept: float) -> None:
        """Add a stretch, after decaying earlier measurements by `kept`."""
        self.seconds.fade(kept)
        self.made = {kind: kept * times for kind, times in self.made.items()}
        for seconds, kinds in rounds:
            self.seconds.add(seconds)
            for kind in kinds:
                self.made[kind] = self.made.get(kind, 0.0) + 1

    def state(self) -> State:
        """To be kept (kept.py)."""
        return {"seconds": self.seconds.state(), "made": [[*kind, times] for kind, times in self.made.items()]}

    def restore(self, state: Any) -> None:
        """Continue from a kept state."""
        self.seconds.restore(state["seconds"])
        self.made = {(int(source), int(length)): numbers([times], 1)[0] for source, length, times in state["made"]}
        if self.seconds.n and not (self.seconds.total > 0 and sum(self.made.values()) > 0):
            raise ValueError(f"{state!r} has rounds that took no time, or made nothing")

    def is_news(self, rounds: Sequence[Round]) -> bool:
        """Whether these rounds differ significantly from earlier ones."""
        known = self.seconds.mean(0.0)
        chance = self.seconds.spread() * math.sqrt(1 / len(rounds) + 1 / self.seconds.n)
        return abs(fmean(seconds for seconds, _ in rounds) - known) > max(NEWS * chance, LEAST_NEWS * known)

    def rate(self, worth: dict[Kind, Average]) -> tuple[float, float]:
        """Tokens per row and second, and the standard error."""
        n = sum(self.made.values())
        stood = sum(times * worth[kind].mean(0.0) for kind, times in self.made.items())
        mean = self.seconds.mean(1.0)
        rate = (n + stood) / n / mean
        return rate, rate * self.seconds.spread() / mean / math.sqrt(self.seconds.n)


@dataclass
class _Book:
    """Both modes at one batch size, and the current one."""

    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))  # without and with preparation
    best: bool | None = None  # the better mode, once known
    is_taken: bool = True  # the mode of this stretch
    rounds: list[Round] = field(default_factory=list)  # of this stretch
    loss: float = 0.0  # of the worse mode, relative to the better one's rate
    gap: int = LEAST_GAP  # rounds between visits
    n_left: int = 0  # rounds until the next visit

    def count(self, one: Round, worth: dict[Kind, Average]) -> None:
        """Count a round of the current mode. At the end of a stretch, choose the next mode."""
        self.rounds.append(one)
        if len(self.rounds) == self._length():
            is_news, is_open = self._learn(), self._judge(worth)
            self._go_on(is_news, is_open)

    def state(self) -> State:
        """To be kept (kept.py)."""
        return {"best": self.best, "loss": self.loss, "gap": self.gap, "ways": [way.state() for way in self.ways]}

    def restore(self, state: Any) -> None:
        """Continue from a kept state, with the better mode."""
        for way, each in zip(self.ways, state["ways"], strict=True):
            way.restore(each)
        (self.loss,) = numbers([state["loss"]], 1)
        self.gap = self.n_left = min(max(int(state["gap"]), LEAST_GAP), MOST_GAP)
        if state["best"] is not None:
            self.best = self.is_taken = bool(state["best"])
            if not all(way.seconds.n for way in self.ways):
                raise ValueError("the better mode is known, and one was never measured")

    def _length(self) -> int:
        if self.best is None:
            return FIRST
        return LEAST_GAP if self.is_taken == self.best else VISIT

    def _learn(self) -> bool:
        """Add the stretch to the measurements. Returns whether it differs from earlier ones."""
        most = HICCUP * median_low(seconds for seconds, _ in self.rounds)
        usual = [one for one in self.rounds if one[0] <= most]
        way = self.ways[self.is_taken]
        is_news = self.best is not None and way.is_news(usual)
        way.learn(usual, kept=1.0 if self.best is None else 0.0 if is_news else KEPT)
        self.rounds = []
        return is_news

    def _judge(self, worth: dict[Kind, Average]) -> bool:
        """Find the significantly faster mode, or after MOST_FIRST rounds the faster one. True: changed or in doubt."""
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
        """Choose the mode of the next stretch. The gap between visits doubles while they change nothing."""
        if self.best is None:  # two stretches of one mode in a row save a change
            self.is_taken ^= self.ways[self.is_taken].seconds.n > self.ways[not self.is_taken].seconds.n
            return
        if is_news:  # the other mode may have changed as well
            self.gap = self.n_left = LEAST_GAP
        elif is_open:
            self.gap = self.n_left = max(LEAST_GAP, math.ceil((WARM_UP + VISIT) * self.loss / SPENT))
        elif self.is_taken != self.best:
            self.gap = self.n_left = min(2 * self.gap, MOST_GAP)
        else:
            self.n_left -= LEAST_GAP
        self.is_taken = self.best == (self.n_left > 0)
