"""Accepted tokens to be expected of a tree, by the steps that it grew."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from saguaro.draft.policy.average import Average


@dataclass
class TokensBySteps:
    """Means over trees, after 1, 2, ... steps. A tree of n steps shows what a smaller one would be worth, too: a step
    adds at most one level.

    >>> curve = TokensBySteps()
    >>> curve.add([1.0, 1.5, 1.75])
    >>> curve.at(2), curve.at(9), curve.after(1.25, 1)
    (1.5, 1.75, 1.625)
    """

    means: list[Average] = field(default_factory=list)

    def add(self, levels: Sequence[float]) -> None:
        """Add a tree: what its first level is worth, its first two, ..."""
        while len(self.means) < len(levels):
            self.means.append(Average(kept=0.99))
        for mean, value in zip(self.means, levels, strict=False):
            mean.add(value)

    def at(self, steps: float) -> float:
        """After so many steps; as many as after the most that were seen, beyond them."""
        if not self.means or steps <= 0:
            return 0.0
        low = min(int(steps), len(self.means))
        below = self.means[low - 1].mean(0.0) if low else 0.0
        above = self.means[min(low, len(self.means) - 1)].mean(0.0)
        return below + (steps - low) * (above - below) if steps < len(self.means) else below

    def after(self, value: float, steps: int) -> float:
        """What a tree that is worth `value` is worth after so many steps more."""
        before = next((n for n in range(len(self.means)) if self.at(n + 1) > value), len(self.means))
        low, high = self.at(before), self.at(before + 1)
        part = (value - low) / (high - low) if high > low else 0.0
        return max(value, self.at(before + part + steps))

    def state(self) -> list[list[float]]:
        """To be kept (kept.py)."""
        return [mean.state() for mean in self.means]

    def restore(self, state: Any) -> None:
        """Continue from a kept state."""
        self.means = [Average(kept=0.99).restore(each) for each in state]
