"""Whether to prepare. On a shared device, preparation slows the verification.

Preparing changes the time until the next preparation (the verification, then misses drafted just in time) and the
speculations in flight by then. Rounds with and without it are compared by tokens per second (modes.py), per batch size.
A prepared speculation equals the one drafted just in time, so both modes are rated by the same accepted tokens. A draft
that reads features of its target prepares without the latest ones: what it prepared is learnt apart.

Rounds in which a row joined or was read are not counted; nor are the first rounds after a change, in which the draft
catches up.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from saguaro.device.graphs import bucket
from saguaro.draft.policy.kept import State
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.modes import WARM_UP, Modes
from saguaro.draft.rows import DraftRow


class Prepares(Protocol):
    """Decides whether to prepare."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Whether to prepare for these rows, a part of the known ones. Called once per round, after the reply."""

    def state(self) -> State:
        """To be kept (kept.py)."""

    def restore(self, state: State) -> None:
        """Continue from a kept state."""


class AlwaysPrepare:
    """Always prepares."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Always True."""
        return True

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


class NeverPrepare:
    """Never prepares. Used if the draft runs in the target's thread, where nothing could overlap."""

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """Always False."""
        return False

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""


class MeasuredPrepare:
    """Prepares if measurements show a gain."""

    def __init__(self, learnt: Learnt) -> None:
        self._learnt = learnt
        self._books: dict[int, Modes] = defaultdict(Modes)  # by batch size
        self._asked: set[DraftRow] = set()  # rows of the last preparation, if no text was being read
        self._began = 0.0
        self._last, self._n_alike = (0, True), 0  # batch size and mode of the last round, and for how many rounds

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """See Prepares."""
        now, everybody, size = self._learnt.now(), set(known), bucket(len(asked))
        book, is_steady = self._books[size], size == self._last[0] and self._n_alike > WARM_UP
        if asked and is_steady and everybody <= self._asked:
            kinds = [self._learnt.kind_of(row, len(row.speculation)) for row in asked]
            book.count((now - self._began, kinds), self._learnt.worth)
        self._asked, self._began = set(asked) if everybody.issubset(asked) else set(), now
        last, self._last = self._last, (size, book.is_taken or not asked)
        self._n_alike = self._n_alike + 1 if self._last == last else 1
        return self._last[1]

    def state(self) -> State:
        """See Prepares."""
        return {str(size): book.state() for size, book in self._books.items()}

    def restore(self, state: State) -> None:
        """See Prepares."""
        for size, each in state.items():
            self._books[int(size)].restore(each)
