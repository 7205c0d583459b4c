"""The link without a draft: every speculation is empty."""

from collections.abc import Sequence

from saguaro.types import Joined, Outcome, Speculation


class NullLink:
    """Says nothing, so the target decodes autoregressively."""

    def is_fresh(self) -> bool:
        """It knows no row, and needs none."""
        return False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Nobody listens."""

    def retire(self, slots: Sequence[int]) -> None:
        """Nobody listens."""

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """The empty speculation."""
        return Speculation.empty(len(slots))

    def overlap(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to give back."""
