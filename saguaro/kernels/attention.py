"""Paged attention: verification, decoding and prefill in one kernel.

Invariant: a query's output is, bit for bit, a function of the query and of the keys and values it sees. Other queries,
other rows, the bounds of the grid and the pages that hold the text do not change it. Therefore

* the tile size depends on model, dtype and split only, not on the number of queries;
* the context is split at absolute positions, regardless of its length:

      positions   0 ----------- SPLIT ---------- 2 * SPLIT ----- length
      splits      |---- 0 -----|------- 1 -------|------ 2 ------|
      blocks      |-----|------|-----|-----------|-----|---------|

* every split has its own online softmax. Splits are merged in order with the same products and fused sums, either by
  the one program that computes them all, or by the last of several programs that share a tile's splits;
* merging a split of which a query sees no key changes no bit of its result, nor does a block of such keys;
* a masked key has weight exactly 0, and keys and values outside the text are never loaded.

A query that is a node of a tree sees the text, then the nodes on its own path, each at its absolute position: its
result is that of the same token in a chain. Blocks that end before the nodes are shared by a tile's queries. A later
block is computed once for each query of the tile, with that query's keys; the others see none of them.

      positions   0 ------------------ edge ------ text ------ seen
      keys        |------------ on pages ------------|-- path --|
      blocks      |------|------|------|---- for each query ----|
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.kernels.launch import early, follow

SPLIT = 128  # keys of a split: affects the arithmetic, so it never depends on the batch
WHOLE_ABOVE = 32  # most queries per row for which splits run in parallel: prefill has enough programs, and no workspace
N_PROGRAMS = 512  # programs of a call, if there are enough splits: several per multiprocessor
ENOUGH = 256  # programs that fill a GPU: with so many tiles, each program computes all splits of its tile
N_COUNTERS = 64 * 512  # most tiles of a call, times key heads
UNROLL = 8  # splits whose loads are in flight together during a merge
MERGED_ROWS = 16  # rows of a tile merged at a time: few enough that UNROLL of their parts fit the registers
# Pipeline stages of the loop over a text's key blocks: page numbers two ahead, keys and values one. AMD's 64 KiB of
# shared memory have no room for a block ahead, and only for a smaller block.
N_STAGES = 2 if torch.version.hip else 3
MOST_IN_BLOCK = (64 if torch.version.hip else 128) * 128  # keys of a block times head size
LEAST_D = 16  # smallest dimension of tl.dot
LOG2_E = 1.4426950408889634

Nodes = tuple[Tensor, Tensor, Tensor]  # texts [R], seen [T], paths [T, D], all int32: see attention.step.Nodes


class Tile(NamedTuple):
    """Tile sizes of one program, and launch parameters."""

    block_m: int  # rows: pairs of a query and one of the heads that share a key head
    block_n: int  # keys
    n_warps: int
    n_stages: int  # pipeline stages of the loop over a split's key blocks: does not affect results


# A split is one block of keys, loaded at once; few rows, so that little is merged (bench/attention.py).
TILE = Tile(16, 128, 8, 1)
# Exact fp32 products do not use tensor cores: every thread holds whole rows, so the tile is small.
EXACT_TILE = Tile(16, 16, 4, 1)


def tile_of(group: int, d: int, dtype: torch.dtype, split: int = SPLIT) -> Tile:
    """The tile for a model; it must not depend on the batch.

    >>> [tile_of(group, 128, torch.bfloat16).block_m for group in (1, 2, 3, 8, 71)]
    [16, 16, 16, 16, 128]
    """
    tile = EXACT_TILE if dtype == torch.float32 else TILE
    return tile._replace(block_m=max(tile.block_m, power_of_two(group)), block_n=keys_of(tile.block_n, d, split))


def keys_of(block_n: int, d: int, split: int) -> int:
    """Keys of a block: block_n, limited by the split and by a program's memory."""
    return min(block_n, split, max(16, MOST_IN_BLOCK // padded(d)))


def counters(device: torch.device) -> Tensor:
    """Counters by which a tile's last program knows that it is the last: zero before and after each call.

    Use one tensor per stream: concurrent calls must not share it.
    """
    return torch.zeros(N_COUNTERS, dtype=torch.int32, device=device)


def attend(
    q: Tensor,  # [T, H, d], a view whose last dimension is contiguous
    memory: Tensor,  # [tokens, 2 * H_kv, d] contiguous: a token's keys, then its values
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: row r's queries are q[starts[r] : starts[r + 1]], the last tokens of its text
    lengths: Tensor,  # [R] int32: keys that its last query sees, itself included
    page_size: int,
    n_queries: int,
    longest: int,
    scale: float,  # of query-key products
    *,
    nodes: Nodes | None = None,  # None: every row is a chain
    split: int = SPLIT,
    arrived: Tensor | None = None,  # [N_COUNTERS] int32, see `counters`; None: allocated for this call
    _tile: Tile | None = None,
    _n_programs: int = N_PROGRAMS,
) -> Tensor:  # [T, H * d]
    """Causal attention of every query to its text, or of a node of a tree to its text and path.

    n_queries and longest are upper bounds of a row's queries and of `lengths`: they set the grid size and do not affect
    the output. A query that sees no key gets zeros; outputs of queries outside all rows are uninitialised.
    """
    n_tokens, n_heads, d = q.shape
    n_rows, n_kv = len(lengths), memory.shape[1] // 2
    tile = _tile or tile_of(n_heads // n_kv, d, q.dtype, split)
    assert q.stride(2) == pages.stride(1) == 1
    assert all(x.is_contiguous() for x in (memory, starts, lengths))
    assert split % tile.block_n == 0
    texts, seen, paths = nodes or (lengths, lengths, lengths)
    assert all(x.is_contiguous() for x in (texts, seen, paths))
    n_splits = max(1, ceil_div(longest, split))
    most = tile.block_m // (n_heads // n_kv)
    per_tile = most if nodes is None else queries_of(most, n_queries, n_rows * n_kv)
    n_blocks = ceil_div(n_queries, per_tile)
    n_shares = (
        1 if n_queries > WHOLE_ABOVE and nodes is None else shares(n_blocks * n_rows * n_kv, n_splits, _n_programs)
    )
    out = q.new_empty(n_tokens, n_heads * d)
    room = workspace(q, n_splits, arrived, n_blocks * n_rows * n_kv) if n_shares > 1 else (out, out, out, out)
    _attend_kernel[(n_blocks, n_rows * n_kv, n_shares)](
        q, memory, pages, starts, lengths, texts, seen, paths, out, *room,
        q.stride(0), q.stride(1), pages.stride(0), paths.stride(0), n_splits, scale * LOG2_E,
        H=n_heads, H_KV=n_kv, D=d, D_PAD=padded(d), PAGE_SIZE=page_size, SPLIT=split, IS_WHOLE=n_shares == 1,
        IS_TREE=nodes is not None, PER_TILE=per_tile, DOT=dot_dtype(q), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        ROWS=MERGED_ROWS, UNROLL=UNROLL,
        num_warps=tile.n_warps, num_stages=stages(tile, n_shares == 1, q.dtype), **early(q.device),
    )  # fmt: skip
    return out


def attend_plain(
    q: Tensor,
    memory: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    page_size: int,
    n_queries: int,
    longest: int,
    scale: float,
    *,
    nodes: Nodes | None = None,
    split: int = SPLIT,
    arrived: Tensor | None = None,
) -> Tensor:  # [T, H * d]
    """The twin of `attend`, row by row, of trees query by query; queries outside all rows get zeros."""
    n_tokens, n_heads, d = q.shape
    out = q.new_zeros(n_tokens, n_heads * d)
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        start, stop = bounds[row], bounds[row + 1]
        if nodes is not None:
            for token in range(start, stop):
                kv = seen_by(token, row, memory, pages[row], page_size, nodes)
                is_seen = torch.ones(1, len(kv), dtype=torch.bool, device=q.device)
                out[token] = weigh(q[token : token + 1], kv, is_seen, scale)
            continue
        positions = torch.arange(length, device=q.device)
        last = torch.arange(length - (stop - start), length, device=q.device)  # position of each query
        kv = text_of(memory, pages[row], length, page_size)
        out[start:stop] = weigh(q[start:stop], kv, positions[None] <= last[:, None], scale)
    return out


def seen_by(token: int, row: int, memory: Tensor, pages: Tensor, page_size: int, nodes: Nodes) -> Tensor:
    """Keys and values [seen, 2 * H_kv, d] that a token of this row sees: of its text, then of its path."""
    texts, seen, paths = nodes
    n_text, n_seen = int(texts[row]), int(seen[token])
    path = paths[token, : max(0, n_seen - n_text)].long()
    return torch.cat((text_of(memory, pages, min(n_text, n_seen), page_size), memory[path]))


def text_of(memory: Tensor, pages: Tensor, length: int, page_size: int) -> Tensor:  # [length, 2 * H_kv, d]
    """Keys and values of a text's first `length` tokens."""
    positions = torch.arange(length, device=memory.device)
    return memory[pages[positions // page_size].long() * page_size + positions % page_size]


def weigh(q: Tensor, kv: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    """q [n, H, d], kv [L, 2 * H_kv, d], is_seen [n, L] -> [n, H * d]: softmax attention in float32.

    >>> weigh(torch.zeros(1, 1, 1), torch.tensor([[[0.0], [2.0]], [[0.0], [4.0]]]), torch.tensor([[True, True]]), 1.0)
    tensor([[3.]])
    """
    n, n_heads, d = q.shape
    n_kv = kv.shape[1] // 2
    keys, values = kv.float().transpose(0, 1).split(n_kv)  # [H_kv, L, d]
    by_head = q.float().view(n, n_kv, n_heads // n_kv, d).permute(1, 2, 0, 3)  # [H_kv, G, n, d]
    scores = by_head @ keys[:, None].transpose(2, 3) * scale
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).masked_fill(~is_seen, 0)
    out: Tensor = weights @ values[:, None]  # [H_kv, G, n, d]
    return out.permute(2, 0, 1, 3).reshape(n, n_heads * d).to(q.dtype)


def shares(n_tiles: int, n_splits: int, n_programs: int) -> int:
    """How many programs share a tile's splits.

    One program per split would be fastest if all texts had the maximum length. Most are shorter, and programs without
    work delay the others.

    >>> [shares(n_tiles, 16, 512) for n_tiles in (8, 64, 128, 256)]
    [16, 8, 4, 1]
    """
    return 1 if n_tiles >= ENOUGH else min(n_splits, max(1, n_programs // n_tiles))


def queries_of(most: int, n_queries: int, n_texts: int) -> int:
    """Queries of a tile if they are nodes: they take turns at the keys of their paths, so as few as fill a GPU.

    >>> [queries_of(8, n_queries, 8) for n_queries in (1, 8, 16, 33, 64)]
    [1, 1, 1, 2, 4]
    """
    per_tile = 1
    while per_tile < most and ceil_div(n_queries, per_tile) * n_texts >= ENOUGH:
        per_tile *= 2
    return min(per_tile, most)


def stages(tile: Tile, is_whole: bool, dtype: torch.dtype) -> int:
    """Pipeline stages of the loop over key blocks: more if one program computes all splits."""
    return N_STAGES if is_whole and dtype != torch.float32 else tile.n_stages


def workspace(q: Tensor, n_parts: int, arrived: Tensor | None, n_tiles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for every part's largest score, sum of weights [T * H, S] and weighted values [T * H, S, d], in float32.

    Also the tiles' counters.
    """
    if arrived is None:
        arrived = counters(q.device)
    assert n_tiles <= len(arrived), (n_tiles, len(arrived))
    n, d = q.shape[0] * q.shape[1], padded(q.shape[2])
    tops, sums = (q.new_empty(n, n_parts, dtype=torch.float32) for _ in range(2))  # two tensors, both aligned
    return tops, sums, q.new_empty(n, n_parts, d, dtype=torch.float32), arrived


def dot_dtype(q: Tensor) -> tl.dtype:
    """The dtype of products: q's, but float32 on a CPU, where Triton's interpreter has no bf16 products."""
    return tl.bfloat16 if q.dtype == torch.bfloat16 and not q.is_cpu else tl.float32


def padded(d: int) -> int:
    """The padded width of a tile with d columns; padding is zero."""
    return max(LEAST_D, power_of_two(d))


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n.

    >>> [power_of_two(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (n - 1).bit_length()


@triton.jit(do_not_specialize=["n_pages", "n_path", "n_splits"])
def _attend_kernel(
    q, memory, pages, starts, lengths, texts, seen, paths, out, tops, sums, sides, arrived,
    stride_token, stride_head, n_pages, n_path, n_splits, scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, IS_WHOLE: tl.constexpr, IS_TREE: tl.constexpr, PER_TILE: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One block of queries of one row, for the query heads of one key head: all splits in order, or a share of them."""
    G: tl.constexpr = H // H_KV
    row, head = tl.program_id(1) // H_KV, tl.program_id(1) % H_KV
    share, n_shares = tl.program_id(2), tl.num_programs(2)
    first = tl.program_id(0) * PER_TILE
    lanes = tl.arange(0, BLOCK_M)
    text, memory_of_head = pages + row.to(tl.int64) * n_pages, memory + head * D
    start, length = tl.load(starts + row), tl.load(lengths + row)
    n = tl.load(starts + row + 1) - start
    query, n_here = first + lanes // G, tl.minimum(n - first, PER_TILE)
    n_lanes = n_here * G
    if IS_TREE:
        n_seen = tl.load(seen + start + query, mask=lanes < n_lanes, other=0)
        n_keys, n_text = tl.max(n_seen, 0), tl.load(texts + row)
        own = paths + (start + first).to(tl.int64) * n_path
        tree = (n_text, seen + start + first, own, n_path, lanes // G, n_here)
    else:
        n_seen = tl.where(lanes < n_lanes, length - n + 1 + query, 0)
        n_keys = length - n + tl.minimum(n, first + PER_TILE)  # seen by the tile's last query: no later key is loaded
        n_text, tree = n_keys, None
    n_parts = tl.maximum(tl.cdiv(tl.maximum(n_keys, 0), SPLIT), 1)
    if not IS_WHOLE:  # keys from before this step can be loaded before the wait
        position = share * SPLIT + tl.arange(0, BLOCK_N)
        n_paged = tl.minimum(n_keys, n_text)
        kv_index = kv_index_of(text, position, n_paged, PAGE_SIZE)
        is_new = (position >= length - n) & (position < n_paged)
        none = tl.zeros([BLOCK_N, D_PAD], memory.dtype.element_ty)
        keys, values = load_keys(memory_of_head, kv_index, (position < n_paged) & ~is_new, none, none, H_KV, D)
    follow(EARLY)
    if (first >= n) | (share >= n_parts):
        return
    cell = cells(start + first, head, lanes, H, G)
    queries = load_queries(q, start + first, head, lanes, n_lanes, stride_token, stride_head, G, D, D_PAD).to(DOT)
    if IS_WHOLE:
        top, total, side = attend_text(
            queries, n_seen, memory_of_head, text, n_keys, scale, H_KV, D, PAGE_SIZE, SPLIT, BLOCK_N, tree
        )
        store_result(out, cell, lanes < n_lanes, total, side, D)
    else:
        keys, values = load_keys(memory_of_head, kv_index, is_new, keys, values, H_KV, D)
        top, total, side = empty_softmax(BLOCK_M, D_PAD)
        top, total, side = extend_block(
            queries, n_seen, memory_of_head, keys, values, position, share * SPLIT < n_shared(n_keys, BLOCK_N, tree),
            top, total, side, scale, H_KV, D, tree,
        )  # fmt: skip
        top, total, side = extend_split(
            queries, n_seen, memory_of_head, text, share * SPLIT + BLOCK_N, (share + 1) * SPLIT, n_keys,
            top, total, side, scale, H_KV, D, PAGE_SIZE, BLOCK_N, tree,
        )  # fmt: skip
        if n_parts == 1:
            store_result(out, cell, lanes < n_lanes, total, side, D)
        else:
            store_part(tops, sums, sides, cell * n_splits + share, lanes < n_lanes, top, total, side)
            for split in range(share + n_shares, n_parts, n_shares):
                top, total, side = attend_split(
                    queries, n_seen, memory_of_head, text, split * SPLIT, n_keys, scale,
                    H_KV, D, PAGE_SIZE, SPLIT, BLOCK_N, tree,
                )  # fmt: skip
                store_part(tops, sums, sides, cell * n_splits + split, lanes < n_lanes, top, total, side)
            counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            if is_last(counter, tl.cdiv(n_parts - share, n_shares), n_parts):
                merge_tile(
                    tops, sums, sides, out, start + first, head, n_lanes, n_splits, n_parts, scale,
                    H, G, D, D_PAD, ROWS, UNROLL,
                )  # fmt: skip


@triton.jit
def cells(first, head, lanes, H: tl.constexpr, G: tl.constexpr):
    """The index (token, head) of each lane of a tile: the first token's query heads of a key head, then the next's."""
    return (first + lanes // G).to(tl.int64) * H + head * G + lanes % G


@triton.jit
def load_queries(
    q, first, head, lanes, n_lanes, stride_token, stride_head, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """The queries [BLOCK_M, D_PAD] of a tile's first n_lanes lanes; zeros for the others."""
    at = q + ((first + lanes // G).to(tl.int64) * stride_token + (head * G + lanes % G) * stride_head)[:, None]
    dims = tl.arange(0, D_PAD)[None]
    return tl.load(at + dims, mask=is_inside((lanes < n_lanes)[:, None], dims, D, D_PAD), other=0.0)


@triton.jit
def is_inside(mask, dims, D: tl.constexpr, D_PAD: tl.constexpr):
    """The mask without padding columns."""
    if D != D_PAD:
        mask = mask & (dims < D)
    return mask


@triton.jit
def attend_text(
    queries, n_seen, memory, pages, n_keys, scale,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    tree=None,
):  # fmt: skip
    """The softmax over all keys before n_keys: `attend_split` of all splits, merged in order."""
    top, total, side = empty_softmax(queries.shape[0], queries.shape[1])
    for base in range(0, n_keys, SPLIT):
        part_top, part_total, part = attend_split(
            queries, n_seen, memory, pages, base, n_keys, scale, H_KV, D, PAGE_SIZE, SPLIT, BLOCK_N, tree
        )
        top, total, side = merge(top, total, side, part_top, part_total, part, scale)
    return top, total, side


@triton.jit
def attend_split(
    queries, n_seen, memory, pages, base, n_keys, scale,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
    tree=None,
):  # fmt: skip
    """The softmax over keys base .. base + SPLIT that are before n_keys: its largest score, sum and weighted values.

    queries [BLOCK_M, D_PAD]; row i sees the keys before n_seen[i] <= n_keys. tree: see `extend_block`.
    """
    top, total, side = empty_softmax(queries.shape[0], queries.shape[1])
    return extend_split(
        queries, n_seen, memory, pages, base, base + SPLIT, n_keys, top, total, side, scale,
        H_KV, D, PAGE_SIZE, BLOCK_N, tree,
    )  # fmt: skip


@triton.jit
def extend_split(
    queries, n_seen, memory, pages, base, end, n_keys, top, total, side, scale,
    H_KV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, tree=None,
):  # fmt: skip
    """Extend a softmax by the keys base .. end. tree: see `extend_block`."""
    none = tl.zeros([BLOCK_N, queries.shape[1]], memory.dtype.element_ty)
    edge = n_shared(n_keys, BLOCK_N, tree)
    for first in range(base, tl.minimum(end, edge), BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        kv_index = kv_index_of(pages, position, n_keys, PAGE_SIZE)
        keys, values = load_keys(memory, kv_index, position < n_keys, none, none, H_KV, D)
        is_seen = position[None] < n_seen[:, None]
        top, total, side = extend_softmax(queries, keys, values, is_seen, top, total, side, scale)
    if tree is not None:
        for first in range(tl.maximum(base, edge), tl.minimum(end, n_keys), BLOCK_N):
            position = first + tl.arange(0, BLOCK_N)
            kv_index = kv_index_of(pages, position, tree[0], PAGE_SIZE)
            keys, values = load_keys(memory, kv_index, position < tree[0], none, none, H_KV, D)
            top, total, side = extend_block(
                queries, n_seen, memory, keys, values, position, False, top, total, side, scale, H_KV, D, tree
            )
    return top, total, side


@triton.jit
def n_shared(n_keys, BLOCK_N: tl.constexpr, tree):
    """Keys in blocks that a tile's queries share: all of a chain; of a tree the blocks that end before its nodes."""
    n = n_keys
    if tree is not None:
        n = tl.where(tree[0] < n_keys, tree[0] // BLOCK_N * BLOCK_N, n_keys)
    return n


@triton.jit
def extend_block(
    queries, n_seen, memory, keys, values, position, is_shared, top, total, side, scale,
    H_KV: tl.constexpr, D: tl.constexpr, tree,
):  # fmt: skip
    """Extend a softmax by one block: of the given keys of the text, and unless it is shared, of each query's path.

    tree: None, or a tuple of the keys before the nodes; each query's number of keys and path, and the paths' stride;
    the query of each row of the tile, and the number of its queries.
    """
    if tree is None:
        top, total, side = extend_softmax(
            queries, keys, values, position[None] < n_seen[:, None], top, total, side, scale
        )
    else:
        n_text, seen, paths, n_path, query_of_row, n_queries = tree
        for query in tl.range(0, tl.where(is_shared, 1, n_queries), num_stages=1):  # memory for one block only
            is_node = (position >= n_text) & (position < tl.load(seen + query))
            kv_index = tl.load(paths + query * n_path + position - n_text, mask=is_node, other=0).to(tl.int64)
            own_keys, own_values = load_keys(memory, kv_index, is_node, keys, values, H_KV, D)
            is_seen = (position[None] < n_seen[:, None]) & (is_shared | (query_of_row == query))[:, None]
            top, total, side = extend_softmax(queries, own_keys, own_values, is_seen, top, total, side, scale)
    return top, total, side


@triton.jit
def kv_index_of(pages, position, n_keys, PAGE_SIZE: tl.constexpr):
    """KV indices of these positions of a text; not valid from n_keys on."""
    page = tl.load(pages + position // PAGE_SIZE, mask=position < n_keys, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def load_keys(memory, kv_index, is_key, keys, values, H_KV: tl.constexpr, D: tl.constexpr):
    """Keys and values [BLOCK_N, D_PAD] at these KV indices, of the head that `memory` points to.

    Where is_key is false, the given keys and values are returned.
    """
    D_PAD: tl.constexpr = keys.shape[1]
    dims = tl.arange(0, D_PAD)[None]
    at = memory + (kv_index * (2 * H_KV * D))[:, None] + dims
    mask = is_inside(is_key[:, None], dims, D, D_PAD)
    return tl.load(at, mask=mask, other=keys), tl.load(at + H_KV * D, mask=mask, other=values)


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """A softmax over no keys."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, D_PAD], tl.float32)


@triton.jit
def extend_softmax(queries, keys, values, is_seen, top, total, side, scale):
    """Extend a softmax by a block of keys.

    Products and sums that a compiler may fuse are written as fma, so that all kernels round alike.
    """
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: avoids inf - inf
    weights = tl.exp2(tl.fma(scores, scale, -(pivot * scale)[:, None]))
    keep = tl.exp2((top - pivot) * scale)
    total = tl.fma(total, keep, tl.sum(weights, 1))
    weights = weights.to(values.dtype).to(queries.dtype)
    side = tl.dot(weights, values.to(queries.dtype), side * keep[:, None], input_precision="ieee")
    return new_top, total, side


@triton.jit
def merge_weights(top, part_top, scale):
    """The largest score of two softmaxes, and the factor of each in the merged one."""
    new_top = tl.maximum(top, part_top)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2((top - pivot) * scale), tl.exp2((part_top - pivot) * scale)


@triton.jit
def merge(top, total, side, part_top, part_total, part, scale):
    """Merge two softmaxes of a tile."""
    new_top, keep, gain = merge_weights(top, part_top, scale)
    return new_top, tl.fma(total, keep, part_total * gain), tl.fma(side, keep[:, None], part * gain[:, None])


@triton.jit
def divide(side, total):
    """Weighted values divided by the sum of weights; zeros where no key was seen."""
    return side / tl.where(total == 0.0, 1.0, total)


@triton.jit
def store_result(out, cell, mask, total, side, D: tl.constexpr):
    """Store the outputs of a tile from its complete softmax."""
    dims = tl.arange(0, side.shape[1])[None]
    result = divide(side, total[:, None]).to(out.dtype.element_ty)
    tl.store(out + cell[:, None] * D + dims, result, mask=is_inside(mask[:, None], dims, D, side.shape[1]))


@triton.jit
def store_part(tops, sums, sides, cell, mask, top, total, side):
    """Store a part's softmax [BLOCK_M] in the workspace."""
    D_PAD: tl.constexpr = side.shape[1]
    tl.store(tops + cell, top, mask=mask)
    tl.store(sums + cell, total, mask=mask)
    tl.store(sides + cell[:, None] * D_PAD + tl.arange(0, D_PAD)[None], side, mask=mask[:, None])


@triton.jit
def is_last(counter, n_mine, n_parts):
    """Count this program's n_mine stored parts. Whether all parts of the tile are stored; if so, reset the counter."""
    tl.debug_barrier()  # all threads have written before one of them counts; the last to count sees all parts
    is_complete = tl.atomic_add(counter, n_mine, sem="acq_rel") + n_mine == n_parts
    if is_complete:
        tl.store(counter, 0)
    return is_complete


@triton.jit
def merge_tile(
    tops, sums, sides, out, first, head, n_lanes, room, n_parts, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge a tile's n_parts parts and store its first n_lanes lanes; room: parts per cell in the workspace."""
    for start in range(0, n_lanes, ROWS):
        lanes = start + tl.arange(0, ROWS)
        cell = cells(first, head, lanes, H, G)
        total, side = merge_parts(tops, sums, sides, cell * room, lanes < n_lanes, n_parts, scale, D_PAD, UNROLL)
        store_result(out, cell, lanes < n_lanes, total, side, D)


@triton.jit
def merge_parts(tops, sums, sides, cell, mask, n_parts, scale, D_PAD: tl.constexpr, UNROLL: tl.constexpr):
    """Merge the n_parts softmaxes of each cell in order, starting from an empty one: sum and weighted values.

    UNROLL parts at a time, so that their loads are in flight together; parts beyond n_parts are empty. Loads bypass L1,
    which does not have other programs' writes.
    """
    top, total, side = empty_softmax(cell.shape[0], D_PAD)
    for start in range(0, n_parts, UNROLL):
        for i in tl.static_range(UNROLL):
            at = cell + start + i
            is_part = mask & (start + i < n_parts)
            part_top = tl.load(tops + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(sums + at, mask=is_part, other=0.0, cache_modifier=".cg")
            places = sides + at[:, None] * D_PAD + tl.arange(0, D_PAD)[None]
            part = tl.load(places, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
            top, total, side = merge(top, total, side, part_top, part_total, part, scale)
    return total, side
