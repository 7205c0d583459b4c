"""The nouns of a round (DESIGN sections 1 and 4), with their shapes.

B rows (sequences) in a batch, K lookahead, N nodes of a speculation (a chain has N = K), V vocabulary.
A row is named by its slot: a small number that a request keeps from admission until it leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FinishReason = str  # "stop", "length", "abort" or "error"


@dataclass(frozen=True)
class Speculation:
    """What the draft proposes for a batch: row b proposes tokens[b, :length[b]]."""

    tokens: Tensor  # [B, N] int64; beyond length: 0
    length: Tensor  # [B] int64, 0 <= length <= N
    hit: Tensor  # [B] bool: came from the speculation cache

    @staticmethod
    def empty(n_rows: int) -> "Speculation":
        """The speculation of autoregressive decoding."""
        none = torch.zeros(n_rows, dtype=torch.int64)
        return Speculation(torch.zeros(n_rows, 0, dtype=torch.int64), none, none.bool())

    @staticmethod
    def of(proposed: "Sequence[Sequence[int]]", lookahead: int) -> "Speculation":
        """Proposals of any length up to the lookahead, none of them a hit.

        >>> Speculation.of([[7], []], lookahead=2).length
        tensor([1, 0])
        """
        padded = [[*tokens, *[0] * (lookahead - len(tokens))] for tokens in proposed]
        length = torch.tensor([len(tokens) for tokens in proposed], dtype=torch.int64)
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(proposed), lookahead)
        return Speculation(tokens, length, torch.zeros(len(proposed), dtype=torch.bool))

    def clip(self, limit: Tensor) -> "Speculation":  # limit: [B] int64
        """The same speculation, no row longer than its limit."""
        return Speculation(self.tokens, self.length.minimum(limit), self.hit)


@dataclass(frozen=True)
class TokenLogprobs:
    """One emitted token's log-probability and the likeliest alternatives, under the model's own distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


@dataclass(frozen=True)
class Outcome:
    """What verification decided: row b accepted n_accepted[b] tokens, then the target put bonus[b]."""

    slots: Tensor  # [B] int64: the rows that got a token this round
    n_accepted: Tensor  # [B] int64, 0..K
    bonus: Tensor  # [B] int64
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # per row, for the accepted tokens and the bonus; or empty

    def without(self, slots: Sequence[int]) -> "Outcome":
        """The same without some rows: one that left has no next speculation, and its slot may serve another.

        >>> two = Outcome(torch.tensor([3, 5]), torch.tensor([1, 2]), torch.tensor([7, 8]))
        >>> two.without([3]).bonus
        tensor([8])
        """
        keep = ~torch.isin(self.slots, torch.tensor(slots, dtype=torch.int64))
        return Outcome(self.slots[keep], self.n_accepted[keep], self.bonus[keep])

    @staticmethod
    def nothing() -> "Outcome":
        """The outcome before the first round."""
        none = torch.zeros(0, dtype=torch.int64)
        return Outcome(none, none, none)


@dataclass(frozen=True)
class Joined:
    """A row the draft must know from now on: its slot and its text so far."""

    slot: int
    tokens: Sequence[int]


class Drafter(Protocol):
    """Proposes tokens after texts. It follows each row from admissions and outcomes alone."""

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these rows and their text."""

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows; one that is not known is none to forget."""

    def commit(self, outcome: Outcome) -> None:
        """Append to each row what the target accepted and put."""

    def draft(self, slots: Sequence[int], lookahead: int) -> Speculation:
        """Propose up to `lookahead` tokens for each of these rows, in this order."""


class DraftLink(Protocol):
    """Where speculations come from. It never fails a request: what it cannot give is an empty speculation."""

    def admit(self, rows: Sequence[Joined]) -> None:
        """Learn these rows and their text."""

    def retire(self, slots: Sequence[int]) -> None:
        """Forget these rows; one that is not known is none to forget."""

    def speculate(self, outcome: Outcome, slots: Sequence[int]) -> Speculation:
        """Take the last outcome to heart and propose for these rows, in this order."""

    def overlap(self) -> None:
        """Prepare the next speculations while the target verifies."""

    def close(self) -> None:
        """Give back whatever the link holds."""
