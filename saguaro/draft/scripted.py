"""A proposer that follows a script, to test the engine without a draft model."""

from collections.abc import Callable, Sequence

from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import SCRIPT

Script = Callable[[Sequence[int], int], Sequence[int]]  # (text so far, lookahead) -> tokens to propose


class Scripted:
    """Calls the script with each row's text."""

    source = SCRIPT

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """The script's tokens for each row."""
        return Proposal([list(self._script(row.text, lookahead))[:lookahead] for row in rows])
