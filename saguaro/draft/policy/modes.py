"""Two modes of decoding compared by tokens per second: with and without something that costs time and may bring tokens.

Each mode has

    rate = (tokens per row) / (seconds per round)

and the mode with the higher rate is used. Tokens are not counted per mode, because the variance would take hundreds of
rounds to average out. The accepted tokens are learnt once per proposer and length, and each mode is rated by the
speculations it makes.

Rounds form stretches of one mode. Stretches alternate until the difference is significant. After that the other mode is
visited, more rarely the worse it is and the more visits changed nothing. Within a stretch, outliers are dropped. The
rest is averaged, not reduced to a median: rounds with and without a miss form two clusters, and a median sees only one.

What was kept from an earlier start (kept.py) may have been measured while the machine was busier or quieter. The first
stretch shows by how much: both modes are rescaled alike, count as a few rounds, and the other one is visited soon.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low
from typing import Any

from saguaro.draft.policy.average import Average
from saguaro.draft.policy.cost import MOST_SCALE
from saguaro.draft.policy.kept import State, numbers
from saguaro.draft.policy.learnt import Kind

WARM_UP = 2  # rounds after a change that the caller does not count, at least
FIRST, MOST_FIRST = 6, 48  # rounds per stretch before the better mode is known, and in total per mode
SURE = 2  # standard errors for a significant difference
VISIT = 4  # rounds per visit of the other mode
LEAST_GAP, MOST_GAP = 32, 4096  # rounds between visits
SPENT = 0.005  # maximum share of time for visits: a much worse mode is visited less often from the start
SPENT_ON_NEWS = 0.02  # the same where something has changed
KEPT = 1 / 4  # decay of earlier measurements per stretch
NEWS, LEAST_NEWS = 4, 0.08  # standard errors, and minimum share, by which a stretch counts as a change
HICCUP = 2.5  # limit of a round's time, relative to the median
RESCALED = 1.25  # kept times that differ by so much from those of the first stretch are doubted
MOST_KEPT = 8.0  # rounds that kept times count as
AT_ONCE = 2.0  # most rounds whose time a visit of a doubted mode may take at once
LEAST_SPREAD = 0.5  # of the accepted tokens of a speculation, while few are known

Round = tuple[float, Sequence[Kind]]  # seconds, and the speculations made
Worth = Mapping[Kind, Average]  # accepted tokens of each kind of speculation


@dataclass
class Mode:
    """Measurements of one mode."""

    seconds: Average = field(default_factory=lambda: Average(kept=1.0))  # per round
    made: dict[Kind, float] = field(default_factory=dict)  # number of speculations, decayed

    def learn(self, rounds: Sequence[Round], kept: float) -> None:
        """Add a stretch, after decaying earlier measurements by `kept`."""
        self._fade(kept)
        for seconds, kinds in rounds:
            self.seconds.add(seconds)
            for kind in kinds:
                self.made[kind] = self.made.get(kind, 0.0) + 1

    def rescale(self, factor: float) -> None:
        """What was measured took so many times as long, and counts as few rounds."""
        self._fade(min(1.0, MOST_KEPT / self.seconds.n) if self.seconds.n else 1.0)
        self.seconds.scale(factor)

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
        return abs(_mean(rounds) - known) > max(NEWS * chance, LEAST_NEWS * known)

    def rate(self, worth: Worth, is_alike: bool = True) -> tuple[float, float]:
        """Tokens per row and second, and the standard error; is_alike: see Modes."""
        n = sum(self.made.values())
        tokens = 1 + sum(times * worth[kind].mean(0.0) for kind, times in self.made.items()) / n
        mean = self.seconds.mean(1.0)
        error = self.seconds.spread() / mean / math.sqrt(self.seconds.n)
        if not is_alike:
            error = math.hypot(error, self._luck(worth, n) / tokens)
        return tokens / mean, tokens / mean * error

    def _luck(self, worth: Worth, n: float) -> float:
        """The standard error of the tokens of a speculation."""
        known = [(times / n, worth[kind]) for kind, times in self.made.items() if kind[1]]
        return math.hypot(
            *(part * max(each.spread(), LEAST_SPREAD) / math.sqrt(max(each.n, 1)) for part, each in known)
        )

    def _fade(self, kept: float) -> None:
        self.seconds.fade(kept)
        self.made = {kind: kept * times for kind, times in self.made.items()}


@dataclass
class Modes:
    """Both modes at one batch size, and the current one."""

    is_alike: bool = True  # speculations of a kind are worth the same in both, so luck with them cancels out
    first: int = FIRST  # rounds of a stretch before the better mode is known
    warm_up: float = WARM_UP  # rounds after a change to the second mode that are not counted
    ways: tuple[Mode, Mode] = field(default_factory=lambda: (Mode(), Mode()))  # without and with it
    best: bool | None = None  # the better mode, once known
    is_taken: bool = True  # the mode of this stretch
    rounds: list[Round] = field(default_factory=list)  # of this stretch
    loss: float = 0.0  # of the worse mode, relative to the better one's rate
    gap: int = LEAST_GAP  # rounds between visits
    n_left: int = 0  # rounds until the next visit
    n_stayed: int = 0  # stretches by which a visit was extended
    is_kept: bool = False  # whether what was kept is not compared with a stretch yet

    def count(self, one: Round, worth: Worth, expected: float | None = None) -> None:
        """Count a round of the current mode. At the end of a stretch, choose the next mode. expected: tokens per row
        and second in the other mode, if they can be estimated before it is measured."""
        self.rounds.append(one)
        if len(self.rounds) == self._length():
            if self.is_kept:
                self._rescale()
            price = self.price  # before what may be news of one mode only
            is_news, is_open = self._learn(), self._judge(worth, expected)
            self._go_on(price if is_news else None, is_open)

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
            self.is_kept = True

    @property
    def price(self) -> float:
        """What a visit of the worse mode costs, in rounds of the better one."""
        better, worse = self.ways[bool(self.best)].seconds, self.ways[not self.best].seconds
        slower = worse.mean(1.0) / better.mean(1.0) if worse.n and better.n else 1.0
        return (self.warm_up + VISIT) * self.loss * slower

    def _length(self) -> int:
        if self.best is None:
            return self.first
        if self.is_kept:
            return FIRST
        return LEAST_GAP if self.is_taken == self.best else VISIT

    def _usual(self) -> list[Round]:
        """The rounds of this stretch without hiccups."""
        most = HICCUP * median_low(seconds for seconds, _ in self.rounds)
        return [one for one in self.rounds if one[0] <= most]

    def _rescale(self) -> None:
        """Compare what was kept with this stretch, and plan a visit of the other mode."""
        factor = _mean(self._usual()) / max(self.ways[self.is_taken].seconds.mean(1.0), 1e-9)
        factor = min(max(factor, 1 / MOST_SCALE), MOST_SCALE)
        for way in self.ways:
            way.rescale(factor)
        self.is_kept, is_doubted = False, max(factor, 1 / factor) > RESCALED
        self.gap = min(self.gap, _gap(self.price, SPENT_ON_NEWS))
        self.n_left = 0 if is_doubted and self.price <= AT_ONCE else self.gap + LEAST_GAP  # less this stretch

    def _learn(self) -> bool:
        """Add the stretch to the measurements. Returns whether it differs from earlier ones."""
        usual, way = self._usual(), self.ways[self.is_taken]
        is_news = self.best is not None and way.seconds.n > 0 and way.is_news(usual)
        way.learn(usual, kept=1.0 if self.best is None else 0.0 if is_news else KEPT)
        self.rounds = []
        return is_news

    def _judge(self, worth: Worth, expected: float | None) -> bool:
        """Find the significantly faster mode, or after MOST_FIRST rounds the faster one. True: changed or in doubt."""
        n, before = min(way.seconds.n for way in self.ways), self.best
        if not n:
            return self._expect(worth, expected)
        (without, error), (with_it, error_with) = (way.rate(worth, self.is_alike) for way in self.ways)
        seems, is_sure = with_it > without, abs(with_it - without) > SURE * math.hypot(error, error_with)
        self.loss = 1 - min(with_it, without) / max(with_it, without)
        is_watched = n >= MOST_FIRST if before is None else self.n_stayed >= MOST_FIRST // VISIT
        if is_sure or is_watched:
            self.best = seems
        return self.best != before or (self.is_taken != before and self.is_taken == seems)

    def _expect(self, worth: Worth, expected: float | None) -> bool:
        """A mode that was never measured, and is expected to be worse, is visited as rarely as its loss asks for."""
        rate, _ = self.ways[self.is_taken].rate(worth)
        if expected is None or expected >= rate:  # visited now
            self.n_left = 0
            return self.best is None
        is_new, self.best, self.loss = self.best is None, self.is_taken, 1 - expected / rate
        return is_new

    def _go_on(self, news: float | None, is_open: bool) -> None:
        """Choose the mode of the next stretch. The gap between visits doubles while they change nothing. news: what a
        visit cost before something changed."""
        if self.best is None:  # two stretches of one mode in a row save a change
            self.is_taken ^= self.ways[self.is_taken].seconds.n > self.ways[not self.is_taken].seconds.n
            return
        is_visit = self.is_taken != self.best
        if is_open and is_visit and not self.is_alike:  # it seems better: go on until luck is ruled out
            self.n_stayed += 1
            return
        self.n_stayed = 0
        if news is not None:  # the other mode may have changed as well
            self.gap = self.n_left = _gap(news, SPENT_ON_NEWS)
        elif is_open:
            self.gap = self.n_left = _gap(self.price, SPENT)
        elif is_visit:
            self.gap = self.n_left = min(2 * self.gap, MOST_GAP)
        else:
            self.n_left -= LEAST_GAP
        self.is_taken = self.best == (self.n_left > 0)


def _gap(price: float, spent: float) -> int:
    """Rounds between visits of such a price that take this share of the time."""
    return min(max(LEAST_GAP, math.ceil(min(price / spent, MOST_GAP))), MOST_GAP)


def _mean(rounds: Sequence[Round]) -> float:
    return fmean(seconds for seconds, _ in rounds)
