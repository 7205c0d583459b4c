"""The link to a draft in the same process: plain calls."""

from collections.abc import Sequence

from saguaro.types import Drafter, Joined, Outcome, Speculation


class Inline:
    """Asks a drafter."""

    def __init__(self, drafter: Drafter, lookahead: int) -> None:
        self._drafter, self._lookahead = drafter, lookahead

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these rows."""
        self._drafter.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows."""
        self._drafter.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int]) -> Speculation:
        """Commit the outcome, then draft for every row."""
        self._drafter.commit(outcome)
        return self._drafter.draft(slots, self._lookahead)

    def overlap(self) -> None:
        """Nothing is prepared yet."""

    def close(self) -> None:
        """Nothing to give back."""
