"""The link to a draft in the same process: plain calls."""

from collections.abc import Sequence

import torch

from saguaro.device.graphs import guard
from saguaro.round import DraftSide
from saguaro.types import Joined, Outcome, Speculation


class Inline:
    """Calls the draft side directly, with its device as the current one."""

    def __init__(self, side: DraftSide, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.side, self._device = side, device

    def warm(self, size: int) -> None:
        """Warm up for batches of this size."""
        with guard(self._device):
            self.side.warm(size)

    def is_fresh(self) -> bool:
        """Always False: rows are never lost."""
        return False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Add these rows."""
        with guard(self._device):
            self.side.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows."""
        self.side.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Return the next speculation."""
        with guard(self._device):
            return self.side.respond(outcome, slots, room)

    def overlap(self) -> None:
        """Prepare now, in this thread."""
        with guard(self._device):
            self.side.prepare()

    def close(self) -> None:
        """Keep what was learnt."""
        self.side.keep()
