"""A drafter that reads its proposals from a script: it tests the engine without a draft model."""

from collections.abc import Callable, Sequence

from saguaro.draft.texts import Texts
from saguaro.types import Joined, Outcome, Speculation

Script = Callable[[Sequence[int], int], Sequence[int]]  # (text so far, lookahead) -> tokens to propose


class Scripted:
    """Asks the script what comes after each row's text."""

    def __init__(self, script: Script) -> None:
        self._script, self._texts = script, Texts()

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these texts."""
        self._texts.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these texts."""
        self._texts.retire(slots)

    def commit(self, outcome: Outcome) -> None:
        """Append what the target accepted and put."""
        self._texts.commit(outcome)

    def draft(self, slots: Sequence[int], lookahead: int) -> Speculation:
        """What the script says, row by row."""
        proposed = {slot: list(self._script(self._texts[slot], lookahead))[:lookahead] for slot in slots}
        return self._texts.propose(proposed, lookahead)
