"""The link to a draft in the same process: plain calls."""

from collections.abc import Sequence

from saguaro.round import DraftSide
from saguaro.types import Joined, Outcome, Speculation


class Inline:
    """Asks the draft's side."""

    def __init__(self, side: DraftSide) -> None:
        self.side = side

    def is_fresh(self) -> bool:
        """It never loses a row."""
        return False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these rows."""
        self.side.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows."""
        self.side.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Ask for the next speculation."""
        return self.side.respond(outcome, slots, room)

    def overlap(self) -> None:
        """Prepare, here and now."""
        self.side.prepare()

    def close(self) -> None:
        """Nothing to give back."""
