"""Attention over paged keys and values: the backend protocol, and the torch backend for any device.

A backend is planned once per step and run once per layer. The SDPA backend always computes a query within its block of
BLOCK positions, over the keys up to the end of its tile of TILE positions. The shapes given to torch therefore do not
depend on the step, and a token's result is the same, bit for bit, whatever the other rows and the prompt chunks are,
and whether the token is verified with others or decoded alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.attention.step import Step
from saguaro.kv.memory import KVCache
from saguaro.model.products import KVWrite

BLOCK = 4  # queries computed together
TILE = 32  # keys are read up to a multiple of it; keys after the query are masked


class AttentionBackend(Protocol):
    """Causal attention of a step's queries, after the step's keys and values were written to the cache."""

    def plan(self, step: Step) -> None:
        """Plan the next step."""

    def place(self, layer: int) -> KVWrite:
        """Where the step's keys and values are written."""

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [T, H, d] -> [T, H * d]."""


@dataclass(frozen=True)
class Span:
    """The KV indices of a text's first tokens, padded to a multiple of a unit."""

    length: int
    first: int  # KV index of the first token; used if the pages are consecutive in memory: no copy is needed
    kv_index: Tensor | None  # [length] int64; None: the pages are consecutive

    @staticmethod
    def of(pages: Sequence[int], length: int, cache: KVCache, unit: int = 1) -> "Span":
        """The span of a text on these pages, up to a multiple of the unit; padding repeats the first token."""
        pages, n_more = pages[: -(-length // cache.page_size)], -length % unit
        is_run = n_more == 0 and all(page == pages[0] + i for i, page in enumerate(pages))
        kv_index = None if is_run else kv_indices(pages, length, cache.page_size)
        if kv_index is not None:
            kv_index = torch.cat((kv_index, kv_index[:1].expand(n_more))).to(cache.device)
        return Span(length + n_more, pages[0] * cache.page_size, kv_index)

    def gather(self, layer: Tensor) -> Tensor:  # [1, H_kv, tokens, d] -> [1, H_kv, length, d]
        """The span's keys, or values, of one layer."""
        if self.kv_index is None:
            return layer.narrow(2, self.first, self.length)
        return layer[0].transpose(0, 1).index_select(0, self.kv_index).transpose(0, 1)[None]


@dataclass(frozen=True)
class _Tile:
    """Queries of one tile: all read the same keys.

    positions   |--------------------------------|------- tile -------|
    blocks                                       |....|..qq|qqqq|q...|
    queries                                             |-------|
    """

    start: int  # of the queries in the flat step
    stop: int
    n_before: int  # padding queries, to the start of the first block and to the end of the last
    n_after: int
    mask: Tensor  # [blocks, 1, BLOCK * G, keys] additive


@dataclass(frozen=True)
class _Row:
    """One text's keys and queries."""

    span: Span  # up to the end of the last tile
    tiles: list[_Tile]


class SDPAttention:
    """torch's scaled_dot_product_attention, tile by tile."""

    def __init__(self, cache: KVCache, group: int, scale: float) -> None:
        """group: query heads per key head; scale: of query-key products."""
        self._cache, self._group, self._scale = cache, group, scale
        self._rows: list[_Row] = []
        self._kv_index = torch.empty(0, dtype=torch.int64)

    def plan(self, step: Step) -> None:
        """See AttentionBackend."""
        self._kv_index = step.kv_index
        self._rows = list(self._rows_of(step))

    def place(self, layer: int) -> KVWrite:
        """See AttentionBackend."""
        return KVWrite(self._cache.layers[layer], self._kv_index)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionBackend."""
        outs = []
        for row in self._rows:
            keys, values = row.span.gather(self._cache.keys[layer]), row.span.gather(self._cache.values[layer])
            outs += [_attend(q[tile.start : tile.stop], keys, values, tile, self._scale) for tile in row.tiles]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _rows_of(self, step: Step) -> Iterator[_Row]:
        """Each row's text, or its text and chain; then each node of its tree behind its own path."""
        starts, all_pages = step.starts.tolist(), step.pages.tolist()
        texts = (step.lengths if step.nodes is None else torch.minimum(step.nodes.texts, step.lengths)).tolist()
        facts = zip(all_pages, step.lengths.tolist(), texts, starts, starts[1:], strict=False)
        for pages, length, end, start, after in facts:
            stop = after - (length - end)
            if stop > start:
                yield self._row(Span.of(pages, end, self._cache, TILE), start, stop, end)
            text = kv_indices(pages, end, self._cache.page_size)
            for node in range(stop, after):
                assert step.nodes is not None
                seen = int(step.nodes.seen[node])
                own = torch.cat((text, step.nodes.paths[node, : seen - end].cpu()))
                own = torch.cat((own, own[:1].expand(-len(own) % TILE))).to(self._cache.device)
                yield self._row(Span(len(own), 0, own), node, node + 1, seen)

    def _row(self, span: Span, start: int, stop: int, length: int) -> _Row:
        """The queries start : stop of the flat step, of which the last sees so many keys."""
        first = length - (stop - start)  # position of the first query
        tiles = []
        for tile in range(first // TILE * TILE, length, TILE):
            begin, end = max(first, tile), min(length, tile + TILE)
            mask = block_masks(begin // BLOCK, -(-end // BLOCK), tile + TILE).to(self._cache.device, self._cache.dtype)
            places = (start + begin - first, start + end - first, begin % BLOCK, -end % BLOCK)
            tiles.append(_Tile(*places, mask.repeat_interleave(self._group, 2)))
        return _Row(span, tiles)


def kv_indices(pages: Sequence[int], length: int, page_size: int) -> Tensor:  # [length] int64
    """The KV index of each token of a text.

    >>> kv_indices([3, 1], 6, page_size=4)
    tensor([12, 13, 14, 15,  4,  5])
    """
    first = torch.tensor(pages, dtype=torch.int64)[:, None] * page_size
    return (first + torch.arange(page_size)).flatten()[:length]


def block_masks(first: int, last: int, n_keys: int) -> Tensor:  # [blocks, 1, BLOCK, n_keys]
    """Additive masks of the position blocks first : last: 0 where the key is not after the query, else -inf.

    >>> block_masks(0, 1, 6)[0, 0, 1:3]
    tensor([[0., 0., -inf, -inf, -inf, -inf],
            [0., 0., 0., -inf, -inf, -inf]])
    """
    hidden = torch.arange(n_keys)[None] > torch.arange(first * BLOCK, last * BLOCK)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).view(last - first, 1, BLOCK, n_keys)


def _attend(q: Tensor, k: Tensor, v: Tensor, tile: _Tile, scale: float) -> Tensor:
    """q [n, H, d], k and v [1, H_kv, at least the tile's keys, d] -> [n, H * d]."""
    n, n_heads, d = q.shape
    n_blocks, n_keys, n_kv = len(tile.mask), tile.mask.shape[3], k.shape[1]
    padded = F.pad(q, (0, 0, 0, 0, tile.n_before, tile.n_after))
    # the query heads that share a key head become its query tokens
    by_head = padded.view(n_blocks, BLOCK, n_kv, n_heads // n_kv, d).transpose(1, 2).flatten(2, 3)
    k, v = (part[:, :, :n_keys].expand(n_blocks, -1, -1, -1) for part in (k, v))
    out = F.scaled_dot_product_attention(
        by_head, k, v, attn_mask=tile.mask, scale=scale
    )  # [blocks, H_kv, BLOCK * G, d]
    out = out.unflatten(2, (BLOCK, -1)).transpose(1, 2).reshape(n_blocks * BLOCK, n_heads * d)
    kept: Tensor = out[tile.n_before : tile.n_before + n]
    return kept
