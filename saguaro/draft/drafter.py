"""A drafter keeps the rows' texts and prepares speculations for possible outcomes."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from saguaro.draft.policy.kept import State
from saguaro.draft.rows import DraftRow, Wanted
from saguaro.types import Outcome


class Prepared(Protocol):
    """A preparation that was launched."""

    def seconds(self) -> float | None:
        """Device time, available after the result; None on a CPU."""


class Drafter(Protocol):
    """Keeps rows and prepares speculations for possible outcomes."""

    prepares: bool  # whether it can prepare at all

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows."""

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """After a commit: keep the computed part of each text."""

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Apply an outcome: what was prepared for it goes in flight. Returns the rows for which nothing was."""

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Compute more of texts that are far behind, until done or late, or for about so many seconds. Returns whether
        there was anything to read."""

    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """Prepare for the outcome of what is in flight, until done or late. `outcome` is the last one, to learn from.
        Returns None if there was nothing to do."""

    def warm(self, size: int) -> None:
        """Warm up for batches of this size."""

    def state(self) -> State:
        """What was learnt, to be kept (policy/kept.py)."""

    def restore(self, state: State) -> None:
        """Continue from a kept state."""


def never() -> bool:
    """Always False."""
    return False


class NoDrafter:
    """A drafter without a model. Prepares nothing."""

    prepares = False

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Ignored."""

    def retire(self, slots: Sequence[int]) -> None:
        """Ignored."""

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Ignored."""

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """All rows: nothing was prepared."""
        return list(wanted)

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """There is nothing to read."""
        return False

    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """Nothing is prepared."""
        return None

    def warm(self, size: int) -> None:
        """Ignored."""

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""
