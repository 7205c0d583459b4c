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

    def mask(self, output: Sequence[int]) -> Mask:
        """Which tokens may follow this output; at least one. Where nothing may, the end of text."""

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether this output, without its end of text, is complete."""


def forbid(logits: Tensor, rows: Sequence[int], masks: Sequence[Mask], n_vocab: int) -> None:  # [L, V], in place
    """Strike out, in each of these rows, what its mask does not allow of the first n_vocab tokens. A row in which that
    would leave nothing stays as it is: a draft with a reduced head may lack all that is allowed.

    >>> logits = torch.zeros(2, 3)
    >>> forbid(logits, [1], [np.array([0b101], np.uint8)], 3)
    >>> logits
    tensor([[0., 0., 0.],
            [0., -inf, 0.]])
    """
    packed = np.stack(masks)  # [R, V / 8]
    if logits.device.type == "cpu":
        allowed = torch.from_numpy(np.unpackbits(packed, axis=1, count=n_vocab, bitorder="little"))
    else:  # the bits travel packed
        bits = torch.from_numpy(packed).to(logits.device)[..., None] >> torch.arange(8, device=logits.device)
        allowed = (bits & 1).flatten(1)[:, :n_vocab]
    at = torch.tensor(rows, device=logits.device)
    given = logits[at, :n_vocab]
    kept = given.masked_fill(allowed == 0, NEVER)
    logits[at, :n_vocab] = torch.where(kept.amax(1, keepdim=True) == NEVER, given, kept)
