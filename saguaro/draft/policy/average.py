"""A decaying mean and standard deviation."""

import math
from dataclasses import dataclass
from typing import Any

from saguaro.draft.policy.kept import numbers


@dataclass
class Average:
    """A mean with exponential decay.

    >>> some = Average()
    >>> some.add(1.0)
    >>> some.mean(7.0), Average().mean(7.0), some.mean(7.0, weight=2)
    (1.0, 7.0, 5.0)
    >>> pair = Average(kept=1.0)
    >>> pair.add(1.0), pair.add(5.0)
    (None, None)
    >>> pair.mean(0.0), pair.spread()
    (3.0, 2.0)
    """

    kept: float = 0.98  # decay factor per value
    total: float = 0.0
    squares: float = 0.0
    n: float = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.fade(self.kept)
        self.total, self.squares, self.n = self.total + value, self.squares + value * value, self.n + 1

    def fade(self, kept: float) -> None:
        """Reduce the weight of all values so far."""
        self.total, self.squares, self.n = kept * self.total, kept * self.squares, kept * self.n

    def limit(self, most: float) -> None:
        """Let all values so far count as at most this many.

        >>> some = Average(kept=1.0, total=30.0, squares=90.0, n=10.0)
        >>> some.limit(5.0)
        >>> some.n, some.mean(0.0)
        (5.0, 3.0)
        """
        self.fade(min(1.0, most / self.n) if self.n else 1.0)

    def scale(self, factor: float) -> None:
        """Multiply all values so far."""
        self.total, self.squares = factor * self.total, factor * factor * self.squares

    def mean(self, before: float, weight: float = 0.0) -> float:
        """The mean; `before` is a prior with this weight."""
        n = self.n + weight
        return (self.total + weight * before) / n if n else before

    def state(self) -> list[float]:
        """To be kept (kept.py)."""
        return [self.total, self.squares, self.n]

    def restore(self, state: Any) -> "Average":
        """Continue from a kept state."""
        self.total, self.squares, self.n = numbers(state, 3)
        if 0 < self.n < 1:  # the last value counts in full
            raise ValueError(f"{state!r} is no average")
        return self

    def spread(self) -> float:
        """The standard deviation; 0 without values."""
        return math.sqrt(max(0.0, self.squares / self.n - self.mean(0.0) ** 2)) if self.n else 0.0
