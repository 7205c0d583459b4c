"""Grammars as the engine sees them: which tokens may come next, and how that is written into logits.

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

Start = Callable[[Structured], "Grammar"]  # the grammar of an output of which nothing is written yet
Mask = NDArray[Any]  # [>= V / 8] uint8: bit t % 8 of byte t // 8 says whether token t may come


class Grammar(Protocol):
    """What one output must look like."""

    is_slow: bool
    """Whether the last mask took long. Such a row gets no speculation, and few of them share a round."""

    def mask(self, output: Sequence[int]) -> Mask:
        """Which tokens may follow this output; at least one. Where nothing may, the end of text."""

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end of text, is complete."""


class Guide:
    """The grammar of a row that is drafted: it is given up when its masks take long. Proposals need not keep to it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._all, self.is_slow = grammar, np.zeros(0, np.uint8), False

    def mask(self, output: Sequence[int]) -> Mask:
        """Which tokens may follow this output, or all of them."""
        if self.is_slow:
            return self._all
        mask = self._grammar.mask(output)
        if self._grammar.is_slow:
            self.is_slow, self._all = True, np.full_like(mask, 255)
        return mask

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end of text, is complete."""
        return self._grammar.accepts(output)


def forbid(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:  # [L, V], in place
    """Strike out, in each of these rows, what its mask does not allow of the first n_vocab tokens. A row in which that
    would leave nothing stays as it is: a draft with a reduced head may lack all that is allowed.

    >>> logits = torch.zeros(2, 3)
    >>> forbid(logits, [1], [np.array([0b101], np.uint8)], 3)
    >>> logits
    tensor([[0., 0., 0.],
            [0., -inf, 0.]])
    """
    (_row_by_row if logits.device.type == "cpu" else together)(logits, rows, masks, n_vocab)


def _row_by_row(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:
    """For a CPU: one row stays in the core's own cache."""
    for row, mask in zip(rows, masks, strict=True):
        may = torch.from_numpy(np.unpackbits(mask, count=n_vocab, bitorder="little").view(np.bool_))
        kept = logits[row, :n_vocab].where(may, NEVER)
        if float(kept.amax()) > NEVER:
            logits[row, :n_vocab] = kept


def together(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:
    """For a device: the bits travel packed, and nobody waits."""
    packed = torch.from_numpy(np.stack(masks)).to(logits.device)[..., None]  # [R, V / 8, 1]
    may = (packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1).flatten(1)[:, :n_vocab] == 1
    at = torch.tensor(rows, device=logits.device)
    given = logits[at, :n_vocab]
    kept = given.where(may, NEVER)
    logits[at, :n_vocab] = kept.where(kept.amax(1, keepdim=True) > NEVER, given)
