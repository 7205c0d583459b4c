"""The link without a draft: every speculation is empty."""

from collections.abc import Sequence

from saguaro.types import Joined, Outcome, Speculation


class NullLink:
    """Never speculates, so the target decodes autoregressively."""

    def is_fresh(self) -> bool:
        """Always False: no rows are kept."""
        return False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Ignored."""

    def retire(self, slots: Sequence[int]) -> None:
        """Ignored."""

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """The empty speculation."""
        return Speculation.empty(len(slots))

    def overlap(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to release."""
