"""Attention of branches that fork from one text (DESIGN section 7), as one kernel.

A branch sees its trunk up to the fork and its own tokens; one softmax runs over both parts. Invariant: the trunk's
pages are read once per key head for a tile of branches, and a mask is a comparison with the fork, never a tensor.

    positions   0 --------- SPLIT -------- fork ------------ end
    trunk       |---- 0 ----|-- 1: seen before the fork -----|
    own                                    t c c c    the branch's own tokens, from its fork on

The own tokens of a tile's branches lie side by side as one more split, in which a query sees those of its branch.
"""

# Kernels are compiled from their source: Triton has its own annotations, and no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.kernels.attention import (
    N_STAGES,
    Tile,
    attend_split,
    attend_text,
    ceil_div,
    divide,
    dot_dtype,
    empty_softmax,
    extend_softmax,
    load_keys,
    merge,
    merge_splits,
    merge_weights,
    power_of_two,
    softmax_scale,
    store_part,
    text_of,
    weigh,
    workspace,
)

SPLIT = 256  # keys of a split of the trunk
MOST_ROWS = 128  # of a tile: beyond them a row's branches are cut into several tiles
UNROLL = 4  # splits whose loads are in flight together while they are merged


def tile_of(n_branches: int, group: int, dtype: torch.dtype) -> Tile:
    """The tile for all branches of a row, or as many of them as it can hold."""
    if dtype == torch.float32:  # exact products have no tensor cores: every thread holds whole rows
        return Tile(max(16, power_of_two(group)), 16, 4, 1)
    block_m = min(max(16, power_of_two(n_branches * group)), max(MOST_ROWS, power_of_two(group)))
    return Tile(block_m, 64, 4 if block_m <= 64 else 8, N_STAGES)


def attend_branches(
    q: Tensor,  # [R * M, H, d], a row's M branches side by side; a view whose last dimension is contiguous
    memory: Tensor,  # [n_slots, 2 * H_kv, d] contiguous: a token's keys, then its values
    pages: Tensor,  # [R, P] int32: of the trunks
    forks: Tensor,  # [R * M] int32: a branch sees the trunk before its fork
    own: Tensor,  # [R * M, n_own, 2 * H_kv, d] contiguous
    n_seen: int,  # own tokens a branch sees: the first ones, the newest included; at least 1
    page_size: int,
    longest: int,
    *,
    split: int = SPLIT,
) -> Tensor:  # [R * M, H * d]
    """Attention of every branch's newest token to its trunk and its own tokens.

    longest is an upper bound of `forks`: it sizes the grid.
    """
    n_rows, n_kv = len(pages), memory.shape[1] // 2
    n, n_heads, d = q.shape
    group, n_branches = n_heads // n_kv, n // n_rows
    tile = tile_of(n_branches, group, q.dtype)
    assert q.stride(2) == pages.stride(1) == 1
    assert memory.is_contiguous()
    assert own.is_contiguous()
    assert 1 <= n_seen <= own.shape[1]
    assert split % tile.block_n == 0
    n_splits = ceil_div(longest, split)
    is_whole = n_splits <= 1
    out = q.new_empty(n, n_heads * d)
    tops, sums, sides = (out, out, out) if is_whole else workspace(q, n_splits + 1)  # the last is for own tokens
    n_tiles = ceil_div(n_branches, tile.block_m // group)
    _branches_kernel[(n_tiles, n_rows * n_kv, 1 if is_whole else n_splits + 1)](
        q, memory, pages, forks, own, out, tops, sums, sides,
        q.stride(0), q.stride(1), pages.stride(0), own.shape[1], n_branches, n_seen, n_splits, softmax_scale(d),
        H=n_heads, H_KV=n_kv, D=d, PAGE_SIZE=page_size, SPLIT=split, IS_WHOLE=is_whole, DOT=dot_dtype(q),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.n_warps, num_stages=tile.n_stages,
    )  # fmt: skip
    if not is_whole:
        _combine_kernel[(n, n_heads)](
            forks, tops, sums, sides, out, n_splits, softmax_scale(d),
            H=n_heads, D=d, SPLIT=split, UNROLL=UNROLL, num_warps=1,
        )  # fmt: skip
    return out


def attend_branches_plain(
    q: Tensor,
    memory: Tensor,
    pages: Tensor,
    forks: Tensor,
    own: Tensor,
    n_seen: int,
    page_size: int,
    longest: int,
    *,
    split: int = SPLIT,
) -> Tensor:  # [R * M, H * d]
    """The twin of `attend_branches`, row by row: a row's keys are its trunk's, then those of all of its branches."""
    m = len(q) // len(pages)
    is_own = torch.eye(m, dtype=torch.bool, device=q.device).repeat_interleave(n_seen, 1)  # [M, M * n_seen]
    outs = []
    for row, its_forks in enumerate(forks.view(-1, m)):
        length, here = int(its_forks.max()), slice(row * m, (row + 1) * m)
        is_trunk = torch.arange(length, device=q.device)[None] < its_forks[:, None]
        kv = torch.cat((text_of(memory, pages[row], length, page_size), own[here, :n_seen].flatten(0, 1)))
        outs.append(weigh(q[here], kv, torch.cat((is_trunk, is_own), 1)))
    return torch.cat(outs)


@triton.jit(do_not_specialize=["n_pages", "n_own", "n_branches", "n_own_seen", "n_splits"])
def _branches_kernel(
    q, memory, pages, forks, own, out, tops, sums, sides,
    stride_token, stride_head, n_pages, n_own, n_branches, n_own_seen, n_splits, scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of branches of one row, for the heads of one key head: everything, or one split, or the own tokens."""
    G: tl.constexpr = H // H_KV
    PER_TILE: tl.constexpr = BLOCK_M // G  # branches
    row, head, split = tl.program_id(1) // H_KV, tl.program_id(1) % H_KV, tl.program_id(2)
    first = tl.program_id(0) * PER_TILE
    n_here = tl.minimum(n_branches - first, PER_TILE)
    first += row * n_branches
    lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, D)
    branch, its_head = lanes // G, head * G + lanes % G
    is_branch = branch < n_here
    token = (first + branch).to(tl.int64)
    n_seen = tl.load(forks + token, mask=is_branch, other=0)
    n_keys = tl.max(n_seen, 0)
    if not IS_WHOLE and (split < n_splits) & (split * SPLIT >= n_keys):
        return
    at = q + (token * stride_token + its_head * stride_head)[:, None] + dims[None]
    queries = tl.load(at, mask=is_branch[:, None], other=0.0).to(DOT)
    text = pages + row.to(tl.int64) * n_pages
    memory_of_head = memory + head * D
    own_of_tile = own + first.to(tl.int64) * n_own * (2 * H_KV * D) + head * D
    cell = token * H + its_head
    if IS_WHOLE:
        top, total, side = attend_text(
            queries, n_seen, memory_of_head, text, n_keys, scale, H_KV, PAGE_SIZE, SPLIT, BLOCK_N
        )
        own_top, own_total, own_side = _attend_own(
            queries, branch, own_of_tile, n_here, n_own, n_own_seen, scale, H_KV, BLOCK_N
        )
        top, total, side = merge(top, total, side, own_top, own_total, own_side, scale)
        result = divide(side, total[:, None]).to(out.dtype.element_ty)
        tl.store(out + cell[:, None] * D + dims[None], result, mask=is_branch[:, None])
    else:
        cell = cell * (n_splits + 1) + split
        if split < n_splits:
            top, total, side = attend_split(
                queries, n_seen, memory_of_head, text, split * SPLIT, n_keys, scale, H_KV, PAGE_SIZE, SPLIT, BLOCK_N
            )
            store_part(tops, sums, sides, cell, is_branch, top, total, side)
        else:
            top, total, side = _attend_own(
                queries, branch, own_of_tile, n_here, n_own, n_own_seen, scale, H_KV, BLOCK_N
            )
            store_part(tops, sums, sides, cell, is_branch, top, total, side)


@triton.jit
def _attend_own(
    queries, branch, own, n_here, n_own, n_seen, scale, H_KV: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The softmax of each query over the first n_seen own tokens of its branch.

    Keys of the tile's n_here branches side by side: 0 0 0 1 1 1 2 2 2 ... for n_seen = 3.
    """
    BLOCK_M: tl.constexpr = queries.shape[0]
    D: tl.constexpr = queries.shape[1]
    top, total, side = empty_softmax(BLOCK_M, D)
    for first in range(0, n_here * n_seen, BLOCK_N):
        index = first + tl.arange(0, BLOCK_N)
        is_key = index < n_here * n_seen
        slots = (index // n_seen).to(tl.int64) * n_own + index % n_seen
        keys, values = load_keys(own, slots, is_key, H_KV, D)
        is_seen = (index // n_seen)[None] == branch[:, None]
        top, total, side = extend_softmax(queries, keys, values, is_seen, top, total, side, scale)
    return top, total, side


@triton.jit(do_not_specialize=["n_splits"])
def _combine_kernel(
    forks, tops, sums, sides, out, n_splits, scale,
    H: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One head of one branch: the splits before its fork, in order, then its own tokens."""
    token, head = tl.program_id(0), tl.program_id(1)
    cell = token.to(tl.int64) * H + head
    at = cell * (n_splits + 1)
    n = tl.cdiv(tl.load(forks + token), SPLIT)
    top, total, side = merge_splits(tops, sums, sides, at, n, scale, D, UNROLL)
    at += n_splits
    dims = tl.arange(0, D)
    top, keep, gain = merge_weights(top, tl.load(tops + at), scale)
    total = tl.fma(total, keep, tl.load(sums + at) * gain)
    side = tl.fma(side, keep, tl.load(sides + at * D + dims) * gain)
    tl.store(out + cell * D + dims, divide(side, total).to(out.dtype.element_ty))
