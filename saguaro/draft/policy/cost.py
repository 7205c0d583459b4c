"""What something takes, by a number: a verification by its tokens, a draft by its steps. Learnt from rounds as they
happen.

A straight line gives numbers that were never seen, and each number that was seen corrects it. The machine may be shared
and slow for a while; then all times grow alike, and comparisons of times from different moments would mislead. So the
machine's pace is followed apart, and every time is kept as if the pace were usual.

Times that were kept from an earlier start (kept.py) may have been measured while the machine was busier or quieter. So
they count as a shape with an unknown scale: the first measurements find it, and from then on what was kept counts as a
few measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from saguaro.draft.policy.average import Average
from saguaro.draft.policy.kept import State, numbers

FOLLOWS = 0.05  # share of a deviation that the pace follows
KEPT = 0.998  # decay of the line per measurement
KEPT_AT = 0.98  # decay of what is known of one number
BY_LINE = 4.0  # weight of the line at each number, in measurements
STIFF = 0.5  # weight of the slope assumed, in squares of numbers
HICCUP = 3.0  # limit of a time, relative to what was expected
SURE = 8  # measurements before hiccups are recognized and the pace is followed
TRIED = 5  # measurements that find the scale of kept times
MOST_SCALE = 1000.0
MOST_KEPT, MOST_KEPT_AT = 20.0, 5.0  # measurements that kept times count as: the line, and what is known of one number


@dataclass
class Pace:
    """How slow the machine is now, relative to its usual speed."""

    logarithm: float = 0.0

    @property
    def factor(self) -> float:
        """Seconds now per usual second."""
        return math.exp(self.logarithm)

    def follow(self, seconds: float, expected: float) -> None:
        """Something took so long instead of what was expected at this pace."""
        self.logarithm += FOLLOWS * math.log(min(max(seconds / expected, 1 / HICCUP), HICCUP))


@dataclass
class Scale:
    """How many times as long something takes now as in an earlier start: the median of the first ratios.

    >>> target = Scale()
    >>> draft = Scale(like=[target])
    >>> for ratio in (9.0, 0.5, 0.4):
    ...     target.add(ratio)
    >>> target.factor, draft.factor
    (0.5, 0.5)
    >>> draft.add(1.0)
    >>> draft.factor
    1.0
    """

    like: "Sequence[Scale]" = ()  # one that is assumed until the first ratio is known
    ratios: list[float] = field(default_factory=list)
    kept: list["SecondsByCount"] = field(default_factory=list)  # times that this is the scale of

    @property
    def factor(self) -> float:
        """The present estimate; 1 without any measurement."""
        return next((median_low(each.ratios) for each in (self, *self.like) if each.ratios), 1.0)

    def add(self, ratio: float) -> None:
        """Something took so many times as long as was kept. When the scale is found, the kept times are rescaled."""
        self.ratios.append(min(max(ratio, 1 / MOST_SCALE), MOST_SCALE))
        if len(self.ratios) == TRIED:
            kept, self.kept = self.kept, []
            for each in kept:
                each.rescale(self.factor)


@dataclass
class SecondsByCount:
    """Seconds as a function of a number.

    >>> verification = SecondsByCount()
    >>> for n in (1, 2, 5, 1, 2, 5) * 20:
    ...     verification.add(n, 10.0 + 2 * n)
    >>> round(verification.at(3), 1), round(verification.slope(), 1)
    (16.0, 2.0)
    >>> drafting = SecondsByCount(is_proportional=True)
    >>> drafting.add(4, 8.0)
    >>> drafting.at(1), drafting.slope()
    (2.0, 2.0)
    """

    pace: Pace = field(default_factory=Pace)
    scale: Scale = field(default_factory=Scale)  # of what is restored; several may have a scale in common
    is_reference: bool = False  # whether the pace follows these times
    is_proportional: bool = False  # what is assumed of the slope: that of a line through 0, else 0
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    known: dict[int, Average] = field(default_factory=dict)  # usual seconds of each number
    measured: list[tuple[int, float]] | None = None  # usual seconds since kept times were restored, until rescaled

    def add(self, count: int, seconds: float) -> None:
        """Add a measurement."""
        if self.measured is not None:
            usual = seconds / self.pace.factor
            self.measured.append((count, usual))
            self.scale.add(usual / max(self._at(count), 1e-9))
            return
        if self.n > SURE:
            expected = self.at(count)
            seconds = min(seconds, HICCUP * expected)
            if self.is_reference:
                self.pace.follow(seconds, expected)
        self._learn(count, seconds / self.pace.factor)

    def _learn(self, count: int, usual: float) -> None:
        sums = (self.n, self.x, self.y, self.xx, self.xy)
        more = (1.0, count, usual, count * count, count * usual)
        self.n, self.x, self.y, self.xx, self.xy = (KEPT * s + m for s, m in zip(sums, more, strict=True))
        self.known.setdefault(count, Average(kept=KEPT_AT)).add(usual)

    def at(self, count: float) -> float:
        """Seconds with this number, at the present pace; 0 before any measurement."""
        if not self.n:
            return 0.0
        low = math.floor(count)
        part = count - low
        seconds = (1 - part) * self._at(low) + (part * self._at(low + 1) if part else 0.0)
        return max(seconds * self._factor, 1e-9)

    def slope(self) -> float:
        """Seconds per additional one, at least 0."""
        return self._slope() * self._factor

    def state(self) -> State:
        """To be kept (kept.py)."""
        known = {str(count): average.state() for count, average in self.known.items()}
        return {"line": [self.n, self.x, self.y, self.xx, self.xy], "known": known}

    def restore(self, state: Any) -> None:
        """Continue from a kept state."""
        self.n, self.x, self.y, self.xx, self.xy = numbers(state["line"], 5)
        if 0 < self.n < 1:  # the last measurement counts in full
            raise ValueError(f"{state['line']!r} is no line")
        self.known = {int(count): Average(kept=KEPT_AT).restore(each) for count, each in state["known"].items()}
        if self.n:
            self.measured = []
            self.scale.kept.append(self)

    def rescale(self, factor: float) -> None:
        """What was kept took so many times as long, and counts as few measurements. Then add what was measured."""
        weight = min(1.0, MOST_KEPT / self.n) if self.n else 0.0
        self.n, self.x, self.xx = weight * self.n, weight * self.x, weight * self.xx
        self.y, self.xy = weight * factor * self.y, weight * factor * self.xy
        for each in self.known.values():
            each.limit(MOST_KEPT_AT)
            each.scale(factor)
        measured, self.measured = self.measured or [], None
        for count, usual in measured:
            self._learn(count, usual)

    @property
    def _factor(self) -> float:
        """From what is known to the present: the pace, and the scale of what was kept."""
        return self.pace.factor * (1.0 if self.measured is None else self.scale.factor)

    def _at(self, count: int) -> float:
        by_line = (self.y + self._slope() * (count * self.n - self.x)) / self.n
        known = self.known.get(count)
        return by_line if known is None else known.mean(by_line, weight=BY_LINE)

    def _slope(self) -> float:
        if not self.n:
            return 0.0
        assumed = self.y / self.x if self.is_proportional and self.x else 0.0
        spread = self.xx - self.x * self.x / self.n
        together = self.xy - self.x * self.y / self.n
        return max(0.0, (together + STIFF * assumed) / (max(spread, 0.0) + STIFF))
