"""Paged attention: kernels read keys and values through page tables held in tensors.

Invariant: a row's result does not depend on other rows, bit for bit (saguaro.kernels.attention). A step whose tensors
keep their addresses can be captured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.attention.step import Step
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.model.transformer import KVWrite

MAX_SPLITS = 32
LEAST_SPLIT = 128  # keys


@dataclass(frozen=True)
class Paged:
    """The metadata of a step for paged attention."""

    kv_index: Tensor  # [T] int64: where each token's key and value are written; -1: not written
    pages: Tensor  # [R, P] int32
    starts: Tensor  # [R + 1] int32: row r's queries are tokens starts[r] : starts[r + 1], the last of its text
    lengths: Tensor  # [R] int32: keys that its last query sees, itself included
    n_queries: int  # upper bound of a row's queries
    longest: int  # upper bound of lengths


class PagedAttention:
    """The attention backend with paged kernels."""

    def __init__(self, cache: KVCache, kernels: Kernels, longest: int) -> None:
        self._cache, self._kernels, self._split = cache, kernels, split_of(longest)
        self._at: Paged  # of the next step

    def plan(self, step: Step) -> None:
        """See AttentionBackend."""
        assert not any(step.paths), "trees are not computed on this device yet"
        device, n_pages = self._cache.device, max(map(len, step.pages))
        pages = torch.tensor([[*row, *[0] * (n_pages - len(row))] for row in step.pages], dtype=torch.int32)
        self.plan_paged(
            Paged(
                step.kv_index,
                pages.to(device),
                torch.tensor(step.starts, dtype=torch.int32).to(device),
                torch.tensor(step.lengths, dtype=torch.int32).to(device),
                n_queries=max(step.sizes),
                longest=max(step.lengths),
            )
        )

    def plan_paged(self, paged: Paged) -> None:
        """Plan a step whose metadata is on the device already."""
        self._at = paged

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


@dataclass(frozen=True)
class Ends:
    """Rows of K + 1 tokens, left-padded; keys and values of padding are not written.

    n = 2 of K = 4    tokens   . . t s s        t: the text's last token, s: the n tokens after it, .: padding
    positions                  2 3 4 5 6
    """

    positions: Tensor  # [R, K+1] int64; may be below 0 for padding
    paged: Paged


def ends(
    text: Tensor,  # [R] int64: tokens of each text; 0: padding row
    n: Tensor,  # [R] int64: tokens after it; -1: padding row
    steps: Tensor,  # [K+1] int64: 0..K
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: where each row's tokens begin
    page_size: int,
    longest: int,
) -> Ends:
    """Positions and metadata of left-padded rows."""
    k = len(steps) - 1
    positions = (text + n - 1 - k)[:, None] + steps
    kv_index = kv_indices_at(pages, positions, steps >= k - n[:, None], page_size)
    lengths = (text + n).clamp(min=0).int()
    return Ends(positions, Paged(kv_index.flatten(), pages, starts, lengths, k + 1, longest))


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
