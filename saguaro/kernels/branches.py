"""Attention of branches that fork from one text, as one kernel.

A branch sees its trunk up to the fork and its own tokens; one softmax runs over both parts. Invariant: the trunk's
pages are read once per key head and tile of branches. Masks are comparisons with the fork, not tensors.

    positions   0 --------- SPLIT -------- fork ------------ end
    trunk       |---- 0 ----|-- 1: seen before the fork -----|
    own                                    t c c c    the branch's own tokens, from its fork on

The own tokens of all branches of a tile form one more split, in which a query sees only those of its branch.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.kernels.attention import (
    EXACT_TILE,
    MERGED_ROWS,
    N_PROGRAMS,
    N_STAGES,
    SPLIT,
    UNROLL,
    Tile,
    attend_split,
    attend_text,
    ceil_div,
    cells,
    dot_dtype,
    empty_softmax,
    extend_softmax,
    extend_split,
    is_last,
    keys_of,
    kv_index_of,
    load_keys,
    load_queries,
    merge,
    merge_tile,
    padded,
    power_of_two,
    shares,
    softmax_scale,
    stages,
    store_part,
    store_result,
    text_of,
    weigh,
    workspace,
)
from saguaro.kernels.launch import early, follow

MOST_ROWS = 128  # of a tile: more branches of a row take several tiles
OWN_BLOCK = 64  # most own tokens of a tile's branches at a time: there are few
TILES = {  # by number of rows (bench/attention.py)
    16: Tile(16, 128, 8, 1),
    32: Tile(32, 128, 4, 1),
    64: Tile(64, 128, 4, 1),
    128: Tile(128, 64, 8, N_STAGES),
}


def tile_of(n_branches: int, group: int, d: int, dtype: torch.dtype, split: int = SPLIT) -> Tile:
    """The tile for all branches of a row, or for as many as fit."""
    least = power_of_two(group)
    if dtype == torch.float32:  # exact products do not use tensor cores: every thread holds whole rows
        return EXACT_TILE._replace(block_m=max(16, least))
    block_m = min(max(16, power_of_two(n_branches * group)), max(MOST_ROWS, least))
    tile = TILES[min(block_m, MOST_ROWS)]
    return tile._replace(block_m=block_m, block_n=keys_of(tile.block_n, d, split))


def attend_branches(
    q: Tensor,  # [R * M, H, d], a row's M branches consecutive; a view whose last dimension is contiguous
    memory: Tensor,  # [tokens, 2 * H_kv, d] contiguous: a token's keys, then its values
    pages: Tensor,  # [R, P] int32: of the trunks
    forks: Tensor,  # [R * M] int32: a branch sees the trunk before its fork
    own: Tensor,  # [R * M, n_own, 2 * H_kv, d] contiguous
    n_seen: int,  # own tokens that a branch sees: the first n_seen, up to the newest; at least 1
    page_size: int,
    longest: int,
    *,
    split: int = SPLIT,
    arrived: Tensor | None = None,  # [N_COUNTERS] int32, see attention.counters; None: allocated for this call
    _tile: Tile | None = None,
    _n_programs: int = N_PROGRAMS,
) -> Tensor:  # [R * M, H * d]
    """Attention of every branch's newest token to its trunk and its own tokens.

    longest is an upper bound of `forks`: it sets the grid size.
    """
    n_rows, n_kv = len(pages), memory.shape[1] // 2
    n, n_heads, d = q.shape
    group, n_branches = n_heads // n_kv, n // n_rows
    tile = _tile or tile_of(n_branches, group, d, q.dtype, split)
    assert q.stride(2) == pages.stride(1) == 1
    assert all(x.is_contiguous() for x in (memory, own, forks))
    assert 1 <= n_seen <= own.shape[1]
    assert split % tile.block_n == 0
    n_parts = ceil_div(longest, split) + 1  # one for own tokens
    n_tiles = ceil_div(n_branches, tile.block_m // group)
    n_shares = 1 if longest <= split else shares(n_tiles * n_rows * n_kv, n_parts, _n_programs)
    out = q.new_empty(n, n_heads * d)
    room = workspace(q, n_parts, arrived, n_tiles * n_rows * n_kv) if n_shares > 1 else (out, out, out, out)
    _branches_kernel[(n_tiles, n_rows * n_kv, n_shares)](
        q, memory, pages, forks, own, out, *room,
        q.stride(0), q.stride(1), pages.stride(0), own.shape[1], n_branches, n_seen, n_parts, softmax_scale(d),
        H=n_heads, H_KV=n_kv, D=d, D_PAD=padded(d), PAGE_SIZE=page_size, SPLIT=split, IS_WHOLE=n_shares == 1,
        DOT=dot_dtype(q), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_OWN=min(OWN_BLOCK, tile.block_n),
        ROWS=MERGED_ROWS, UNROLL=UNROLL,
        num_warps=tile.n_warps, num_stages=stages(tile, n_shares == 1, q.dtype), **early(q.device),
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
    arrived: Tensor | None = None,
) -> Tensor:  # [R * M, H * d]
    """The twin of `attend_branches`, row by row: a row's keys are its trunk's, then those of all its branches."""
    m = len(q) // len(pages)
    is_own = torch.eye(m, dtype=torch.bool, device=q.device).repeat_interleave(n_seen, 1)  # [M, M * n_seen]
    outs = []
    for row, its_forks in enumerate(forks.view(-1, m)):
        length, here = int(its_forks.max()), slice(row * m, (row + 1) * m)
        is_trunk = torch.arange(length, device=q.device)[None] < its_forks[:, None]
        kv = torch.cat((text_of(memory, pages[row], length, page_size), own[here, :n_seen].flatten(0, 1)))
        outs.append(weigh(q[here], kv, torch.cat((is_trunk, is_own), 1)))
    return torch.cat(outs)


@triton.jit(do_not_specialize=["n_pages", "n_own", "n_branches", "n_own_seen", "room"])
def _branches_kernel(
    q, memory, pages, forks, own, out, tops, sums, sides, arrived,
    stride_token, stride_head, n_pages, n_own, n_branches, n_own_seen, room, scale,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, IS_WHOLE: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_OWN: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of branches of one row, for the query heads of one key head: all parts, or a share of them.

    Parts are the splits before the tile's last fork, then the own tokens.
    """
    G: tl.constexpr = H // H_KV
    PER_TILE: tl.constexpr = BLOCK_M // G  # branches
    row, head = tl.program_id(1) // H_KV, tl.program_id(1) % H_KV
    share, n_shares = tl.program_id(2), tl.num_programs(2)
    n_here = tl.minimum(n_branches - tl.program_id(0) * PER_TILE, PER_TILE)
    first = row * n_branches + tl.program_id(0) * PER_TILE
    lanes, n_lanes = tl.arange(0, BLOCK_M), n_here * G
    cell = cells(first, head, lanes, H, G)
    text = pages + row.to(tl.int64) * n_pages
    memory_of_head = memory + head * D
    own_of_tile = own + first.to(tl.int64) * n_own * (2 * H_KV * D) + head * D
    n_seen = tl.load(forks + first + lanes // G, mask=lanes < n_lanes, other=0)
    n_keys = tl.maximum(tl.max(n_seen, 0), 0)
    n_splits = tl.cdiv(n_keys, SPLIT)
    if not IS_WHOLE:  # the trunk is from before this step: it can be loaded before the wait
        position = share * SPLIT + tl.arange(0, BLOCK_N)
        none = tl.zeros([BLOCK_N, D_PAD], memory.dtype.element_ty)
        kv_index = kv_index_of(text, position, n_keys, PAGE_SIZE)
        keys, values = load_keys(memory_of_head, kv_index, position < n_keys, none, none, H_KV, D)
    follow(EARLY)
    if share > n_splits:
        return
    queries = load_queries(q, first, head, lanes, n_lanes, stride_token, stride_head, G, D, D_PAD).to(DOT)
    if IS_WHOLE:
        top, total, side = attend_text(
            queries, n_seen, memory_of_head, text, n_keys, scale, H_KV, D, PAGE_SIZE, SPLIT, BLOCK_N
        )
        own_top, own_total, own_side = _attend_own(
            queries, lanes // G, own_of_tile, n_here, n_own, n_own_seen, scale, H_KV, D, BLOCK_OWN
        )
        top, total, side = merge(top, total, side, own_top, own_total, own_side, scale)
        store_result(out, cell, lanes < n_lanes, total, side, D)
    else:
        if share < n_splits:
            top, total, side = empty_softmax(BLOCK_M, D_PAD)
            top, total, side = extend_softmax(
                queries, keys, values, position[None] < n_seen[:, None], top, total, side, scale
            )
            top, total, side = extend_split(
                queries, n_seen, memory_of_head, text, share * SPLIT + BLOCK_N, (share + 1) * SPLIT, n_keys,
                top, total, side, scale, H_KV, D, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
            store_part(tops, sums, sides, cell * room + share, lanes < n_lanes, top, total, side)
        for split in range(share + n_shares, n_splits, n_shares):
            top, total, side = attend_split(
                queries, n_seen, memory_of_head, text, split * SPLIT, n_keys, scale, H_KV, D, PAGE_SIZE, SPLIT, BLOCK_N
            )
            store_part(tops, sums, sides, cell * room + split, lanes < n_lanes, top, total, side)
        if n_splits % n_shares == share:
            top, total, side = _attend_own(
                queries, lanes // G, own_of_tile, n_here, n_own, n_own_seen, scale, H_KV, D, BLOCK_OWN
            )
            store_part(tops, sums, sides, cell * room + n_splits, lanes < n_lanes, top, total, side)
        counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if is_last(counter, tl.cdiv(n_splits + 1 - share, n_shares), n_splits + 1):
            merge_tile(
                tops, sums, sides, out, first, head, n_lanes, room, n_splits + 1, scale, H, G, D, D_PAD, ROWS, UNROLL
            )


@triton.jit
def _attend_own(
    queries, branch, own, n_here, n_own, n_seen, scale, H_KV: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The softmax of each query over the first n_seen own tokens of its branch.

    Keys of the tile's n_here branches are consecutive: 0 0 0 1 1 1 2 2 2 ... for n_seen = 3.
    """
    top, total, side = empty_softmax(queries.shape[0], queries.shape[1])
    none = tl.zeros([BLOCK_N, queries.shape[1]], own.dtype.element_ty)
    for first in range(0, n_here * n_seen, BLOCK_N):
        index = first + tl.arange(0, BLOCK_N)
        is_key = index < n_here * n_seen
        kv_index = (index // n_seen).to(tl.int64) * n_own + index % n_seen
        keys, values = load_keys(own, kv_index, is_key, none, none, H_KV, D)
        is_seen = (index // n_seen)[None] == branch[:, None]
        top, total, side = extend_softmax(queries, keys, values, is_seen, top, total, side, scale)
    return top, total, side
