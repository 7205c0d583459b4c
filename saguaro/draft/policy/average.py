"""A mean of what was seen, the latest most, and how far values lie from it."""

import math
from dataclasses import dataclass


@dataclass
class Average:
    """A mean that slowly forgets.

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

    kept: float = 0.98  # of what was seen, with every value more
    total: float = 0.0
    squares: float = 0.0
    n: float = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self.fade(self.kept)
        self.total, self.squares, self.n = self.total + value, self.squares + value * value, self.n + 1

    def fade(self, kept: float) -> None:
        """Count what was seen so far for less."""
        self.total, self.squares, self.n = kept * self.total, kept * self.squares, kept * self.n

    def mean(self, before: float, weight: float = 0.0) -> float:
        """The mean; what was assumed before anything was seen counts as so many values."""
        n = self.n + weight
        return (self.total + weight * before) / n if n else before

    def spread(self) -> float:
        """The standard deviation of a value; nothing was seen: 0."""
        return math.sqrt(max(0.0, self.squares / self.n - self.mean(0.0) ** 2)) if self.n else 0.0
