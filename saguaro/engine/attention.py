"""Attention over paged keys and values: the seam, and the backend that runs everywhere.

A backend is planned once per step and run once per layer. The SDPA backend takes each row by itself, so a row's
arithmetic does not depend on its neighbours.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.engine.kv import KVCache
from saguaro.engine.layout import Layout

FOLD = 16  # up to this many query tokens, query heads are folded into the query axis instead of repeating keys


class AttentionBackend(Protocol):
    """Writes a step's keys and values to the cache and attends its queries to everything before them."""

    def plan(self, layout: Layout) -> None:
        """Take the next step's layout."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, d], k and v [T, H_kv, d] -> [T, H * d]."""


@dataclass(frozen=True)
class _Row:
    """Where one row's queries and keys lie.

        positions   |------------- length -------------|
        queries                        |-- stop-start --|
    """

    start: int  # of its queries in the flat step
    stop: int
    length: int  # keys it sees
    run: slice | None  # its pages, where they follow one another in memory: no copy is needed
    pages: Tensor | None  # [P] int64 otherwise
    mask: Tensor | None  # [n, length] additive, or None where every query sees every key


class SDPAttention:
    """torch's scaled_dot_product_attention, row by row."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: list[_Row] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def plan(self, layout: Layout) -> None:
        """Find each row's pages and mask."""
        self._slots = layout.slots
        self._rows = []
        dtype, device = self._cache.keys.dtype, self._cache.keys.device
        for index, (length, pages) in enumerate(zip(layout.lengths, layout.pages, strict=True)):
            start, stop = layout.starts[index], layout.starts[index + 1]
            used = list(pages[: -(-length // self._cache.page_size)])
            is_run = used == list(range(used[0], used[0] + len(used)))
            self._rows.append(
                _Row(
                    start=start,
                    stop=stop,
                    length=length,
                    run=slice(used[0], used[0] + len(used)) if is_run else None,
                    pages=None if is_run else torch.tensor(used, device=device),
                    mask=None if stop - start == 1 else causal_mask(stop - start, length, dtype, device),
                )
            )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionBackend.run."""
        self._cache.write(layer, self._slots, k, v)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        outs = [_attend(q[row.start : row.stop], _gather(keys, row), _gather(values, row), row.mask) for row in self._rows]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


def causal_mask(n: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [n, length]
    """Additive mask of the last n of `length` positions: 0 where a key is not after the query, else -inf.

    >>> causal_mask(2, 3, torch.float32, torch.device("cpu"))
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """
    query = torch.arange(length - n, length, device=device)[:, None]
    hidden = torch.arange(length, device=device)[None] > query
    return torch.zeros(n, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def _gather(cache: Tensor, row: _Row) -> Tensor:  # [pages, page_size, H_kv, d] -> [1, H_kv, length, d]
    pages = cache[row.run] if row.run is not None else cache.index_select(0, row.pages)  # type: ignore[arg-type]
    return pages.flatten(0, 1)[: row.length].transpose(0, 1)[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:  # q [n, H, d]; k, v [1, H_kv, length, d]
    n, n_heads, d = q.shape
    n_kv = k.shape[1]
    group = n_heads // n_kv
    if n > FOLD:
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=group > 1)
        return out[0].transpose(0, 1)
    # The query heads that share a key head become more query tokens: [n, H_kv, group, d] -> [1, H_kv, group * n, d]
    folded = q.view(n, n_kv, group, d).permute(1, 2, 0, 3).reshape(1, n_kv, group * n, d)
    if mask is not None:
        mask = mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
    return out[0].view(n_kv, group, n, d).permute(2, 0, 1, 3).reshape(n, n_heads, d)
