"""Paged attention: kernels read keys and values through page tables held in tensors.

Invariant: a row's result does not depend on other rows, bit for bit (saguaro.kernels.attention). A step whose tensors
keep their addresses can be captured.
"""

import torch
from torch import Tensor

from saguaro.attention.step import Step
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.model.transformer import KVWrite

MAX_SPLITS = 32
LEAST_SPLIT = 128  # keys


class PagedAttention:
    """The attention backend with paged kernels."""

    def __init__(self, cache: KVCache, kernels: Kernels, longest: int) -> None:
        self._cache, self._kernels, self._split = cache, kernels, split_of(longest)
        self._at: Step  # the next one

    def plan(self, step: Step) -> None:
        """See AttentionBackend."""
        assert step.nodes is None, "trees are not computed on this device yet"
        self._at = step

    def place(self, layer: int) -> KVWrite:
        """See AttentionBackend."""
        return KVWrite(self._cache.layers[layer], self._at.kv_index)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionBackend."""
        at = self._at
        return self._kernels.attend(
            q, self._cache.layers[layer], at.pages, at.starts, at.lengths, self._cache.page_size,
            at.n_queries, at.longest, split=self._split,
        )  # fmt: skip


def left_padded(
    tokens: Tensor,  # [R, K+1] int64
    text: Tensor,  # [R] int64: tokens of each text; 0: padding row
    n: Tensor,  # [R] int64: tokens after it; -1: padding row
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: where each row's tokens begin
    page_size: int,
    longest: int,
) -> Step:
    """A step of rows of K + 1 tokens, left-padded; keys and values of padding are not written.

    n = 2 of K = 4    tokens   . . t s s        t: the text's last token, s: the n tokens after it, .: padding
    positions                  2 3 4 5 6        0 for padding before the text
    """
    k = tokens.shape[1] - 1
    column = torch.arange(k + 1, device=tokens.device)
    positions = (text + n - 1 - k)[:, None] + column
    kv_index = kv_indices_at(pages, positions, column >= k - n[:, None], page_size).flatten()
    lengths = (text + n).clamp(min=0).int()
    where = torch.arange(tokens.numel(), device=tokens.device)
    flat = positions.clamp(min=0).flatten()
    return Step(tokens.flatten(), flat, kv_index, where, pages, starts, lengths, k + 1, longest)


def from_left(n: Tensor, steps: Tensor) -> Tensor:  # [R], [K+1] -> [R, K+1] int64
    """Column indices that left-align such rows: of t and of the n tokens after it, then the last column repeated.

    >>> from_left(torch.tensor([1, 2]), torch.arange(3))
    tensor([[1, 2, 2],
            [0, 1, 2]])
    """
    k = len(steps) - 1
    return (k - n[:, None] + steps).clamp(max=k)


def split_of(longest: int) -> int:
    """Keys of a split, for texts up to this length: such that there are at most MAX_SPLITS splits.

    >>> split_of(8192), split_of(131072)
    (256, 4096)
    """
    return max(LEAST_SPLIT, 1 << (-(-longest // MAX_SPLITS) - 1).bit_length())


def kv_indices_at(
    pages: Tensor, positions: Tensor, is_real: Tensor, page_size: int
) -> Tensor:  # [R, P], [R, n], [R, n]
    """KV indices of these positions, [R, n] int64; -1 for padding.

    >>> kv_indices_at(torch.tensor([[3, 1]]), torch.tensor([[3, 4]]), torch.tensor([[True, True]]), page_size=4)
    tensor([[15,  4]])
    """
    page = pages.gather(1, (positions // page_size).clamp(0, pages.shape[1] - 1)).long()
    return torch.where(is_real, page * page_size + positions % page_size, -1)
