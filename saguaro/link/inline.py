"""The link to a draft in the same process: plain calls."""

from collections.abc import Sequence

from saguaro.round import DraftSide
from saguaro.types import Joined, Outcome, Speculation


class Inline:
    """Calls the draft side directly."""

    def __init__(self, side: DraftSide) -> None:
        self.side = side

    def is_fresh(self) -> bool:
        """Always False: rows are never lost."""
        return False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Add these rows."""
        self.side.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows."""
        self.side.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Return the next speculation."""
        return self.side.respond(outcome, slots, room)

    def overlap(self) -> None:
        """Prepare now, in this thread."""
        self.side.prepare()

    def close(self) -> None:
        """Nothing to release."""
