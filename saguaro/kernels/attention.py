"""Attention of a step's last tokens to paged keys and values: verification, decoding and prefill in one kernel.

Invariant: a query's output is, bit for bit, a function of the query and of the keys and values it sees. Other queries,
other rows, the bounds of the grid and the pages that hold the text do not change it. Therefore

* tiles have one size for a model and a dtype, whatever the number of queries;
* the context is cut at absolute positions, whatever its length:

      positions   0 ----------- SPLIT ---------- 2 * SPLIT ----- length
      splits      |---- 0 -----|------- 1 -------|------ 2 ------|
      blocks      |--|--|--|--|--|--|--|--|--|--|--|--|--|--|--|-|

* every split is a running softmax of its own, and splits are merged one after the other with the same products and
  fused sums, by whichever program does it;
* a hidden key has weight 0 exactly, and a key or value that belongs to no text is never loaded.
"""

# Kernels are compiled from their source: Triton has its own annotations, and no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256  # keys of a split: part of the arithmetic, so never chosen from the batch
WHOLE_ABOVE = 32  # most queries for which splits run side by side: prefill has programs enough, and no workspace for it
UNROLL = 4  # splits whose loads are in flight together while they are merged
# Steps of the loop over key blocks in flight: page numbers two ahead, keys and values one (two with 5 stages). AMD's
# 64 KiB of shared memory hold no block ahead.
N_STAGES = 2 if torch.version.hip else 3
LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """What one program holds: sizes of a tile, and how the compiler is to run it."""

    block_m: int  # rows: pairs of a query and one of the heads that share a key head
    block_n: int  # keys
    n_warps: int
    n_stages: int  # steps of the loop over key blocks in flight


def tile_of(group: int, dtype: torch.dtype) -> Tile:
    """The tile of a model: it must not depend on the batch."""
    # Exact fp32 products have no tensor cores: every thread holds whole rows, so the tile is small.
    least, block_n, n_stages = (16, 16, 1) if dtype == torch.float32 else (64, 64, N_STAGES)
    return Tile(max(least, power_of_two(group)), block_n, 4, n_stages)


def attend(
    q: Tensor,  # [T, H, d], a view whose last dimension is contiguous
    memory: Tensor,  # [n_slots, 2 * H_kv, d] contiguous: a token's keys, then its values
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: row r's queries are q[starts[r] : starts[r + 1]], the last tokens of its text
    lengths: Tensor,  # [R] int32: keys the last of them sees, itself included
    page_size: int,
    n_queries: int,
    longest: int,
    *,
    split: int = SPLIT,
) -> Tensor:  # [T, H * d]
    """Attention of every query to its text up to itself.

    n_queries and longest are upper bounds of a row's queries and of `lengths`: they size the grid and change no bit of
    the output. A query that sees no key gets zeros; a query of no row is left as the memory was.
    """
    n_tokens, n_heads, d = q.shape
    n_rows, n_kv = len(lengths), memory.shape[1] // 2
    tile = tile_of(n_heads // n_kv, q.dtype)
    assert q.stride(2) == pages.stride(1) == 1
    assert memory.is_contiguous()
    assert split % tile.block_n == 0
    n_splits = max(1, ceil_div(longest, split))
    is_whole = n_splits == 1 or n_queries > WHOLE_ABOVE
    out = q.new_empty(n_tokens, n_heads * d)
    tops, sums, sides = (out, out, out) if is_whole else workspace(q, n_splits)
    n_blocks = ceil_div(n_queries, tile.block_m // (n_heads // n_kv))
    _attend_kernel[(n_blocks, n_rows * n_kv, 1 if is_whole else n_splits)](
        q, memory, pages, starts, lengths, out, tops, sums, sides,
        q.stride(0), q.stride(1), pages.stride(0), n_splits, softmax_scale(d),
        H=n_heads, H_KV=n_kv, D=d, PAGE_SIZE=page_size, SPLIT=split, IS_WHOLE=is_whole, DOT=dot_dtype(q),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.n_warps, num_stages=tile.n_stages,
    )  # fmt: skip
    if not is_whole:
        _combine_kernel[(n_queries, n_rows, n_heads)](
            starts, lengths, tops, sums, sides, out, n_splits, softmax_scale(d),
            H=n_heads, D=d, SPLIT=split, UNROLL=UNROLL, num_warps=1,
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
    *,
    split: int = SPLIT,
) -> Tensor:  # [T, H * d]
    """The twin of `attend`, row by row; queries of no row get zeros."""
    n_tokens, n_heads, d = q.shape
    out = q.new_zeros(n_tokens, n_heads * d)
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        start, stop = bounds[row], bounds[row + 1]
        positions = torch.arange(length, device=q.device)
        last = torch.arange(length - (stop - start), length, device=q.device)  # position of each query
        kv = text_of(memory, pages[row], length, page_size)
        out[start:stop] = weigh(q[start:stop], kv, positions[None] <= last[:, None])
    return out


def text_of(memory: Tensor, pages: Tensor, length: int, page_size: int) -> Tensor:  # [length, 2 * H_kv, d]
    """Keys and values of a text's first `length` tokens."""
    positions = torch.arange(length, device=memory.device)
    return memory[pages[positions // page_size].long() * page_size + positions % page_size]


def weigh(q: Tensor, kv: Tensor, is_seen: Tensor) -> Tensor:
    """q [n, H, d], kv [L, 2 * H_kv, d], is_seen [n, L] -> [n, H * d]: softmax attention in float32.

    >>> weigh(torch.zeros(1, 1, 1), torch.tensor([[[0.0], [2.0]], [[0.0], [4.0]]]), torch.tensor([[True, True]]))
    tensor([[3.]])
    """
    n, n_heads, d = q.shape
    n_kv = kv.shape[1] // 2
    keys, values = kv.float().transpose(0, 1).split(n_kv)  # [H_kv, L, d]
    by_head = q.float().view(n, n_kv, n_heads // n_kv, d).permute(1, 2, 0, 3)  # [H_kv, G, n, d]
    scores = by_head @ keys[:, None].transpose(2, 3) * d**-0.5
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).masked_fill(~is_seen, 0)
    out: Tensor = weights @ values[:, None]  # [H_kv, G, n, d]
    return out.permute(2, 0, 1, 3).reshape(n, n_heads * d).to(q.dtype)


def workspace(q: Tensor, n_splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for every split's largest score, sum of weights [T * H, S] and weighted values [T * H, S, d], in float32."""
    n, d = q.shape[0] * q.shape[1], q.shape[2]
    tops, sums = q.new_empty(2, n, n_splits, dtype=torch.float32)
    return tops, sums, q.new_empty(n, n_splits, d, dtype=torch.float32)


def softmax_scale(d: int) -> float:
    """What turns a product of a query and a key into an exponent of 2."""
    return float(d**-0.5 * LOG2_E)


def dot_dtype(q: Tensor) -> tl.dtype:
    """What products are taken in: q's own type, but on a CPU, where Triton's interpreter has no bf16 products."""
    return tl.bfloat16 if q.dtype == torch.bfloat16 and not q.is_cpu else tl.float32


def ceil_div(a: int, b: int) -> int:
    """The least number of parts of size b that hold a."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n.

    >>> [power_of_two(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (n - 1).bit_length()


@triton.jit(do_not_specialize=["n_pages", "n_splits"])
def _attend_kernel(
    q, memory, pages, starts, lengths, out, tops, sums, sides,
    stride_token, stride_head, n_pages, n_splits, scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one row, for the heads of one key head: all splits in order, or one of them."""
    G: tl.constexpr = H // H_KV
    PER_TILE: tl.constexpr = BLOCK_M // G  # queries
    row, head = tl.program_id(1) // H_KV, tl.program_id(1) % H_KV
    start, length = tl.load(starts + row), tl.load(lengths + row)
    n = tl.load(starts + row + 1) - start
    first = tl.program_id(0) * PER_TILE
    n_keys = length - n + tl.minimum(n, first + PER_TILE)  # that the tile's last query sees: no later key is loaded
    is_idle = first >= n
    if not IS_WHOLE:
        is_idle = is_idle | (tl.program_id(2) * SPLIT >= n_keys)
    if is_idle:
        return
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, D)
    query, its_head = first + lanes // G, head * G + lanes % G
    is_query = (lanes < PER_TILE * G) & (query < n)
    n_seen = tl.where(is_query, length - n + 1 + query, 0)
    token = (start + query).to(tl.int64)
    at = q + (token * stride_token + its_head * stride_head)[:, None] + dims[None]
    queries = tl.load(at, mask=is_query[:, None], other=0.0).to(DOT)
    text = pages + row.to(tl.int64) * n_pages
    memory_of_head = memory + head * D
    cell = token * H + its_head
    if IS_WHOLE:
        top, total, side = attend_text(
            queries, n_seen, memory_of_head, text, n_keys, scale, H_KV, PAGE_SIZE, SPLIT, BLOCK_N
        )
        result = divide(side, total[:, None]).to(out.dtype.element_ty)
        tl.store(out + cell[:, None] * D + dims[None], result, mask=is_query[:, None])
    else:
        top, total, side = attend_split(
            queries, n_seen, memory_of_head, text, tl.program_id(2) * SPLIT, n_keys, scale,
            H_KV, PAGE_SIZE, SPLIT, BLOCK_N,
        )  # fmt: skip
        store_part(tops, sums, sides, cell * n_splits + tl.program_id(2), is_query, top, total, side)


@triton.jit(do_not_specialize=["n_splits"])
def _combine_kernel(
    starts, lengths, tops, sums, sides, out, n_splits, scale,
    H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One head of one query: its splits, in order."""
    query, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    n = tl.load(starts + row + 1) - start
    if query < n:
        n_keys = tl.maximum(tl.load(lengths + row) - n + 1 + query, 0)
        cell = (start + query).to(tl.int64) * H + head
        _, total, side = merge_splits(tops, sums, sides, cell * n_splits, tl.cdiv(n_keys, SPLIT), scale, D, UNROLL)
        result = divide(side, total)
        tl.store(out + cell * D + tl.arange(0, D), result.to(out.dtype.element_ty))


@triton.jit
def attend_text(
    queries, n_seen, memory, pages, n_keys, scale,
    H_KV: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax over the keys before n_keys: as `attend_split`, for all splits in order."""
    BLOCK_M: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    top, total, side = empty_softmax(BLOCK_M, D)
    for base in range(0, n_keys, SPLIT):
        part_top, part_total, part = attend_split(
            queries, n_seen, memory, pages, base, n_keys, scale, H_KV, PAGE_SIZE, SPLIT, BLOCK_N
        )
        top, total, side = merge(top, total, side, part_top, part_total, part, scale)
    return top, total, side


@triton.jit
def attend_split(
    queries, n_seen, memory, pages, base, n_keys, scale,
    H_KV: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax over keys base .. base + SPLIT, those before n_keys: its largest score, sum and weighted values.

    queries [BLOCK_M, D]; row i sees the keys before n_seen[i], none of them at or after n_keys.
    """
    BLOCK_M: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    top, total, side = empty_softmax(BLOCK_M, D)
    for first in range(base, tl.minimum(base + SPLIT, n_keys), BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        is_key = positions < n_keys
        page = tl.load(pages + positions // PAGE_SIZE, mask=is_key, other=0)
        slots = page.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        keys, values = load_keys(memory, slots, is_key, H_KV, D)
        is_seen = positions[None] < n_seen[:, None]
        top, total, side = extend_softmax(queries, keys, values, is_seen, top, total, side, scale)
    return top, total, side


@triton.jit
def load_keys(memory, slots, is_key, H_KV: tl.constexpr, D: tl.constexpr):
    """Keys and values [BLOCK_N, D] of the slots of one head (where `memory` points to); zeros where there is no key."""
    at = memory + (slots * (2 * H_KV * D))[:, None] + tl.arange(0, D)[None]
    keys = tl.load(at, mask=is_key[:, None], other=0.0)
    values = tl.load(at + H_KV * D, mask=is_key[:, None], other=0.0)
    return keys, values


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, D: tl.constexpr):
    """A softmax over no keys."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, D], tl.float32)


@triton.jit
def extend_softmax(queries, keys, values, is_seen, top, total, side, scale):
    """The softmax over the keys so far and a block of new ones.

    Products and sums that a compiler might or might not fuse are written fused: all kernels round alike.
    """
    scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen yet: no difference of infinities
    weights = tl.exp2(tl.fma(scores, scale, -(pivot * scale)[:, None]))
    keep = tl.exp2((top - pivot) * scale)
    total = tl.fma(total, keep, tl.sum(weights, 1))
    weights = weights.to(values.dtype).to(queries.dtype)
    side = tl.dot(weights, values.to(queries.dtype), side * keep[:, None], input_precision="ieee")
    return new_top, total, side


@triton.jit
def merge_weights(top, part_top, scale):
    """The largest score of two softmaxes, and the factor of each of them in their merger."""
    new_top = tl.maximum(top, part_top)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2((top - pivot) * scale), tl.exp2((part_top - pivot) * scale)


@triton.jit
def merge(top, total, side, part_top, part_total, part, scale):
    """The merger of two softmaxes of a tile."""
    new_top, keep, gain = merge_weights(top, part_top, scale)
    return new_top, tl.fma(total, keep, part_total * gain), tl.fma(side, keep[:, None], part * gain[:, None])


@triton.jit
def divide(side, total):
    """Weighted values by the sum of weights; zeros where nothing was seen."""
    return side / tl.where(total == 0.0, 1.0, total)


@triton.jit
def store_part(tops, sums, sides, cell, mask, top, total, side):
    """Keep a split's softmax [BLOCK_M] at its cells of the workspace."""
    D: tl.constexpr = side.shape[1]
    tl.store(tops + cell, top, mask=mask)
    tl.store(sums + cell, total, mask=mask)
    tl.store(sides + cell[:, None] * D + tl.arange(0, D)[None], side, mask=mask[:, None])


@triton.jit
def merge_splits(tops, sums, sides, cell, n, scale, D: tl.constexpr, UNROLL: tl.constexpr):
    """The merger of the n softmaxes from `cell` on, in order, starting from none: scalars, and [D]."""
    dims = tl.arange(0, D)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    side = tl.zeros([D], tl.float32)
    for split in tl.range(0, n, loop_unroll_factor=UNROLL):
        part = tl.load(sides + (cell + split) * D + dims)
        new_top, keep, gain = merge_weights(top, tl.load(tops + cell + split), scale)
        total = tl.fma(total, keep, tl.load(sums + cell + split) * gain)
        side = tl.fma(side, keep, part * gain)
        top = new_top
    return top, total, side
