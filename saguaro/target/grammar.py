"""The grammar interface of the engine: masks of allowed tokens, and how they are applied to logits.

Invariant: a mask is a function of the output so far and of nothing else, so that the target's token at a position is
the same for every method, batch and preemption.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saguaro.algo.sampling import NEVER
from saguaro.config import Structured

Start = Callable[[Structured], "Grammar | None"]  # the grammar at the start of an output; None: it is not followed
Mask = NDArray[Any]  # [>= V / 8] uint8: bit t % 8 of byte t // 8 is 1 if token t is allowed


class Grammar(Protocol):
    """The constraint of one output."""

    is_slow: bool
    """Whether the last mask took long. Such a row gets no speculation, and few of them share a round."""

    def mask(self, output: Sequence[int]) -> Mask:
        """The tokens that may follow this output; never empty. If no other token may follow: end of text."""

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end-of-text token, is complete."""


class Guide:
    """A drafted row's grammar. It is dropped when masks take long, because proposals need not satisfy it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._all, self.is_slow = grammar, np.zeros(0, np.uint8), False

    def mask(self, output: Sequence[int]) -> Mask:
        """The tokens that may follow this output; all tokens once the grammar is dropped."""
        if self.is_slow:
            return self._all
        mask = self._grammar.mask(output)
        if self._grammar.is_slow:
            self.is_slow, self._all = True, np.full_like(mask, 255)
        return mask

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end-of-text token, is complete."""
        return self._grammar.accepts(output)


def forbid(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:  # [L, V], in place
    """Set the logits of disallowed tokens, among the first n_vocab, to -inf in these rows. A row without any allowed
    token stays unchanged: a draft with a reduced head may lack all of them.

    >>> logits = torch.zeros(2, 3)
    >>> forbid(logits, [1], [np.array([0b101], np.uint8)], 3)
    >>> logits
    tensor([[0., 0., 0.],
            [0., -inf, 0.]])
    """
    (_row_by_row if logits.device.type == "cpu" else together)(logits, rows, masks, n_vocab)


def _row_by_row(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:
    """CPU version: one row fits into the core's cache."""
    for row, mask in zip(rows, masks, strict=True):
        may = torch.from_numpy(np.unpackbits(mask, count=n_vocab, bitorder="little").view(np.bool_))
        kept = logits[row, :n_vocab].where(may, NEVER)
        if float(kept.amax()) > NEVER:
            logits[row, :n_vocab] = kept


def together(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:
    """GPU version: sends packed bits, and does not synchronize."""
    packed = torch.from_numpy(np.stack(masks)).to(logits.device)[..., None]  # [R, V / 8, 1]
    may = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1).flatten(1)[:, :n_vocab] == 1
    at = torch.tensor(rows, device=logits.device)
    given = logits[at, :n_vocab]
    kept = given.where(may, NEVER)
    logits[at, :n_vocab] = kept.where(kept.amax(1, keepdim=True) > NEVER, given)
