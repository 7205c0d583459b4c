"""Attention over paged keys and values: the seam, and the backend that runs everywhere.

A backend is planned once per step and run once per layer. The SDPA backend takes each row by itself, so a row's
arithmetic does not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.engine.kv import KVCache
from saguaro.engine.layout import Layout
from saguaro.model.transformer import Place


class AttentionBackend(Protocol):
    """Attends a step's queries to everything before them, once their keys and values are in the cache."""

    def plan(self, layout: Layout) -> None:
        """Take the next step's layout."""

    def place(self, layer: int) -> Place:
        """Where the step's keys and values go."""

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [T, H, d] -> [T, H * d]."""


@dataclass(frozen=True)
class Span:
    """Where the keys and values of a text's first `length` tokens lie."""

    length: int
    first: int  # slot of the first, where the pages follow one another in memory: no copy is needed
    slots: Tensor | None  # [length] int64 otherwise

    @staticmethod
    def of(pages: Sequence[int], length: int, cache: KVCache) -> "Span":
        """The span of a text on these pages."""
        pages = pages[: -(-length // cache.page_size)]
        is_run = all(page == pages[0] + i for i, page in enumerate(pages))
        slots = None if is_run else slots_of(pages, length, cache.page_size).to(cache.device)
        return Span(length, pages[0] * cache.page_size, slots)

    def gather(self, layer: Tensor) -> Tensor:  # [1, H_kv, slots, d] -> [1, H_kv, length, d]
        """Its keys, or its values, of one layer."""
        if self.slots is None:
            return layer.narrow(2, self.first, self.length)
        return layer[0].transpose(0, 1).index_select(0, self.slots).transpose(0, 1)[None]


@dataclass(frozen=True)
class _Row:
    """Where one row's queries and keys lie.

    positions   |------------- span ---------------|
    queries                        |-- stop-start --|
    """

    start: int  # of its queries in the flat step
    stop: int
    span: Span  # keys it sees
    mask: Tensor | None  # additive, or None where every query sees every key


class SDPAttention:
    """torch's scaled_dot_product_attention, row by row."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: list[_Row] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def plan(self, layout: Layout) -> None:
        """Find each row's keys and mask."""
        self._slots = layout.slots
        self._rows = [self._row(layout, index) for index in range(len(layout.lengths))]

    def place(self, layer: int) -> Place:
        """See AttentionBackend."""
        return Place(self._cache.layers[layer], self._slots)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionBackend."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if len(self._rows) == 1:
            row = self._rows[0]
            return _attend(q, row.span.gather(keys), row.span.gather(values), row.mask)
        outs = [
            _attend(q[row.start : row.stop], row.span.gather(keys), row.span.gather(values), row.mask)
            for row in self._rows
        ]
        return torch.cat(outs)

    def _row(self, layout: Layout, index: int) -> _Row:
        cache, length = self._cache, layout.lengths[index]
        start, stop = layout.starts[index], layout.starts[index + 1]
        return _Row(
            start=start,
            stop=stop,
            span=Span.of(layout.pages[index], length, cache),
            mask=None if stop - start == 1 else causal_mask(stop - start, length, cache.dtype, cache.device),
        )


def slots_of(pages: Sequence[int], length: int, page_size: int) -> Tensor:  # [length] int64
    """The slot of every token of a text.

    >>> slots_of([3, 1], 6, page_size=4)
    tensor([12, 13, 14, 15,  4,  5])
    """
    first = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).flatten()[:length]


def causal_mask(n: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [n, length]
    """Additive mask of the last n of `length` positions: 0 where a key is not after the query, else -inf.

    >>> causal_mask(2, 3, torch.float32, torch.device("cpu"))
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """
    query = torch.arange(length - n, length, device=device)[:, None]
    hidden = torch.arange(length, device=device)[None] > query
    return torch.zeros(n, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [n, H, d], k and v [1, H_kv, length, d] -> [n, H * d]."""
    n, n_heads, d = q.shape
    n_kv = k.shape[1]
    group = n_heads // n_kv
    if n == 1:  # the query heads that share a key head become its query tokens
        out = F.scaled_dot_product_attention(q.view(1, n_kv, group, d), k, v)
        return out.reshape(1, n_heads * d)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=group > 1)
    return out[0].transpose(0, 1).reshape(n, n_heads * d)
