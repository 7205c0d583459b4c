"""The speculation cache: the prepared outcomes, by (row, number accepted, bonus token).

It lives for one round, because outcomes refer to the speculation they were prepared after.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from saguaro.draft.model import Drafter, Prepared
from saguaro.draft.rows import Wanted
from saguaro.types import CACHE, Outcome


class Served(Protocol):
    """A drafter whose trees hold what was prepared."""

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted], is_prepared: bool) -> list[Wanted]:
        """Apply an outcome: what was prepared for it goes in flight. Returns the rows for which nothing was."""


class TreeCache:
    """The cache of a drafter that grows trees: the trees themselves."""

    def __init__(self, trees: Served) -> None:
        self._trees, self._is_prepared = trees, False

    def fill(self, prepared: Prepared) -> None:
        """Trees were grown since the last outcome."""
        self._is_prepared = True

    def forget(self, slots: Collection[int]) -> None:
        """Nothing to do: the drafter drops the trees of rows that leave."""

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted], drafter: Drafter) -> list[Wanted]:
        """Put prepared speculations in flight and return the rows that missed."""
        is_prepared, self._is_prepared = self._is_prepared, False
        return self._trees.serve(outcome, wanted, is_prepared)


class SpeculationCache:
    """Maps an outcome to the index of the branch drafted after it."""

    def __init__(self) -> None:
        self._prepared: Prepared | None = None
        self._gone: set[int] = set()

    def fill(self, prepared: Prepared) -> None:
        """Replace all entries by these outcomes. They may still be computed; they are read at the next look-up.

        >>> import torch
        >>> from saguaro.algo.planning import Planned
        >>> cache = SpeculationCache()
        >>> cache.fill(Planned(torch.tensor([4]), torch.tensor([[0, 2, -1]]), torch.tensor([[7, 8, 0]])))
        >>> one = torch.tensor([4])
        >>> cache.look_up(Outcome(one, one * 0 + 2, one * 0 + 2, one * 0 + 8))
        {4: 1}
        """
        self._prepared, self._gone = prepared, set()

    def clear(self) -> None:
        """Drop all entries."""
        self._prepared = None

    def forget(self, slots: Collection[int]) -> None:
        """Drop the entries of these rows."""
        self._gone.update(slots)

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted], drafter: Drafter) -> list[Wanted]:
        """Put prepared speculations in flight and return the rows that missed. Drops all entries."""
        branches = self.look_up(outcome)
        hits = [(row, n) for row, n in wanted if row.slot in branches]
        prepared = drafter.adopt([(row, branches[row.slot]) for row, _ in hits])
        for (row, n), (tokens, q) in zip(hits, prepared, strict=True):
            row.propose(tokens[:n], CACHE, q)
        self.clear()
        return [(row, n) for row, n in wanted if row.slot not in branches]

    def look_up(self, outcome: Outcome) -> dict[int, int]:
        """Slot -> branch, for the rows whose outcome was prepared."""
        branches = self._prepared.branches() if self._prepared is not None else {}
        facts = zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), outcome.bonus.tolist(), strict=True)
        return {key[0]: branches[key] for key in facts if key in branches and key[0] not in self._gone}
