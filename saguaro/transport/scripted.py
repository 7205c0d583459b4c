"""A link that reads its speculations from a script: it tests the engine's side of a round without a draft model."""

from collections.abc import Callable, Sequence

import torch

from saguaro.types import Joined, Outcome, Speculation

Script = Callable[[Sequence[int], int], Sequence[int]]  # (text so far, lookahead) -> tokens to propose


class Scripted:
    """Follows every row's text from admissions and outcomes alone, as a real draft must, and asks the script."""

    def __init__(self, script: Script, lookahead: int) -> None:
        self._script, self._lookahead = script, lookahead
        self._texts: dict[int, list[int]] = {}
        self._proposed: dict[int, list[int]] = {}
        self.is_closed = False

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these texts."""
        for row in rows:
            assert row.slot not in self._texts, f"slot {row.slot} was admitted twice"
            self._texts[row.slot] = list(row.tokens)
            self._proposed[row.slot] = []

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these texts."""
        for slot in slots:
            del self._texts[slot], self._proposed[slot]

    def speculate(self, outcome: Outcome, slots: Sequence[int]) -> Speculation:
        """Commit the outcome, then ask the script for every row."""
        triples = zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), outcome.bonus.tolist(), strict=True)
        for slot, n_accepted, bonus in triples:
            self._texts[slot] += [*self._proposed[slot][:n_accepted], bonus]
        for slot in slots:
            self._proposed[slot] = list(self._script(self._texts[slot], self._lookahead))[: self._lookahead]
        tokens = torch.zeros(len(slots), self._lookahead, dtype=torch.int64)
        for b, slot in enumerate(slots):
            tokens[b, : len(self._proposed[slot])] = torch.tensor(self._proposed[slot], dtype=torch.int64)
        length = torch.tensor([len(self._proposed[slot]) for slot in slots], dtype=torch.int64)
        return Speculation(tokens, length, torch.zeros(len(slots), dtype=torch.bool))

    def overlap(self) -> None:
        """The script prepares nothing."""

    def close(self) -> None:
        """Remember that it was asked."""
        self.is_closed = True
