"""All decisions of the draft's side: what drafts a miss, how far, and whether to prepare."""

from collections.abc import Iterable, Sequence

from saguaro.draft.policy.depth import Deepens, NeverDeepen
from saguaro.draft.policy.kept import State
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import Misses
from saguaro.draft.policy.prepare import Prepares
from saguaro.draft.rows import DraftRow, DraftRows, Wanted
from saguaro.types import Outcome


class Policy:
    """Decides, with what was learnt from rounds."""

    def __init__(self, learnt: Learnt, misses: Misses, prepare: Prepares, depth: Deepens | None = None) -> None:
        self.learnt, self.misses, self.prepare = learnt, misses, prepare
        self.depth: Deepens = NeverDeepen() if depth is None else depth

    @property
    def reads(self) -> bool:
        """Whether the model should read texts although nothing is prepared."""
        return self.misses.reads

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Learn the outcome of the speculations in flight. Called before the commit."""
        self.learnt.outcome(outcome, rows)
        self.misses.outcome(outcome, rows)

    def deepen(self, hits: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """Grow the prepared speculations of these rows, a part of the rows asked about, further where that pays."""
        self.depth.deepen(hits, asked)

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """Put a speculation in flight for each row that missed, a part of the rows asked about."""
        self.misses.draft(missed, asked)

    def answered(self, rows: DraftRows, asked: Sequence[DraftRow]) -> None:
        """The reply is complete."""
        self.learnt.answered(rows, asked)

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Whether to prepare for these rows, a part of the known ones. Called once per round, after the reply."""
        return self.prepare.prepares(asked, known)

    def state(self) -> State:
        """To be kept (kept.py)."""
        return {"learnt": self.learnt.state(), "misses": self.misses.state(), "prepare": self.prepare.state()}

    def restore(self, state: State) -> None:
        """Continue from a kept state."""
        self.learnt.restore(state["learnt"])
        self.misses.restore(state["misses"])
        self.prepare.restore(state["prepare"])

    def spent(self, read_s: float, is_beside: bool, is_disturbed: bool = False) -> None:
        """While the target verifies, texts were read for so long. is_beside: outcomes are prepared; is_disturbed: there
        was other work that not every round has."""
        if read_s:
            self.misses.read(read_s)
        self.learnt.until_outcome(is_beside, is_disturbed or read_s > 0)
