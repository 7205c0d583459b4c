"""A clock in place of the one by which the policy measures."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock of which every look takes as long."""

    now: float = 0.0

    def __call__(self) -> float:
        """One later than before."""
        self.now += 1
        return self.now
