"""The bookkeeping of a growth step as one kernel: put the nodes just computed into the trees, then pick the next ones.

The twin is `expand` and `pick` of draft/tree.py, which own and document the trees, with the chances of draft/chance.py.
One program serves one row. Nodes of equal score are picked in the order of their places.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(float("-inf"))
ALWAYS = tl.constexpr(float("inf"))
MANY = tl.constexpr(2**30)  # more than any place, node or depth


def advance(
    trees: Sequence[Tensor],  # token, score, bin, place, node, position, depth, path, is_used of draft/tree.py's Trees
    before: Sequence[Tensor] | None,  # index, is_real, place, position, depth, path, score of the nodes just computed
    ranked: tuple[Tensor, Tensor] | None,  # [B * R, W] each: tokens and scores of their children, best first
    table: tuple[Tensor, Tensor, Tensor, int],  # rates, edges, first bins of a rank; bins of rows with noise
    root: Tensor,  # [B] int64: its place
    temperature: Tensor,  # [B] float32
    scratch: Tensor,  # [B] int64: KV index of place 0
    limits: tuple[float, float, float],  # of a child's probability: least and most; and largest log-probability
    n: int,
    depth: int,
    is_chain: bool,
) -> tuple[Tensor, ...] | None:
    """Change the trees in place, and pick n nodes whose parent is less than `depth` deep; None if n is 0.

    Returns the fields of draft/tree.py's Picked, then for the attention KV indices [B, n], the number of keys seen
    [B, n] int32, and the KV indices of the paths [B, n, D] int32.
    """
    token, score, bins, place, node, position, own_depth, path, is_used = trees
    b, n_places, width = token.shape
    n_path, device = path.shape[2], token.device
    assert all(x.is_contiguous() for x in trees)
    n_before = 0
    given: Sequence[Tensor] = (node, node, node, node, node, node, score)
    tokens, scores = ranked or (node, score)
    if before is not None:
        n_before = before[0].shape[1]
        given = [x.contiguous() for x in before]
        given[1] = given[1].view(torch.int8)
    whole = torch.empty(6, b, max(n, 1), dtype=torch.int64, device=device)
    real = torch.empty(b, max(n, 1), dtype=torch.int8, device=device)
    best = torch.empty(b, max(n, 1), dtype=torch.float32, device=device)
    own_path = torch.empty(b, max(n, 1), n_path, dtype=torch.int64, device=device)
    seen = torch.empty(b, max(n, 1), dtype=torch.int32, device=device)
    paths = torch.empty(b, max(n, 1), n_path, dtype=torch.int32, device=device)
    rate, edges, base, n_bins = table
    _advance_kernel[(b,)](
        token, score, bins, place, node, position, own_depth, path, is_used.view(torch.int8),
        *given, tokens, scores, rate, edges, base, n_bins, root, temperature, scratch,
        whole, real, best, own_path, seen, paths, depth, *limits,
        N_EDGES=len(edges), E_PAD=triton.next_power_of_2(len(edges)), PLACES=n_places,
        P_PAD=triton.next_power_of_2(n_places), W=width, W_PAD=triton.next_power_of_2(width),
        D=n_path, D_PAD=triton.next_power_of_2(n_path), N_BEFORE=n_before, N=n, IS_CHAIN=is_chain, num_warps=4,
    )  # fmt: skip
    if n == 0:
        return None
    index, placed, chosen, at, deep, kv_index = whole
    return index, real.view(torch.bool), placed, chosen, at, deep, own_path, best, kv_index, seen, paths


@triton.jit(do_not_specialize=["depth"])
def _advance_kernel(
    token, score, bins, place, node, position, own_depth, path, is_used,
    b_index, b_real, b_place, b_position, b_depth, b_path, b_score, tokens, scores, rate, edges, base, n_bins,
    root, temperature, scratch, whole, real, best, own_path, seen, paths, depth, least, most, sure,
    N_EDGES: tl.constexpr, E_PAD: tl.constexpr, PLACES: tl.constexpr, P_PAD: tl.constexpr, W: tl.constexpr,
    W_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, N_BEFORE: tl.constexpr, N: tl.constexpr,
    IS_CHAIN: tl.constexpr,
):  # fmt: skip
    """One row: expand N_BEFORE nodes, then pick N."""
    row, n_rows = tl.program_id(0), tl.num_programs(0)
    level = tl.arange(0, D_PAD)
    first = row * PLACES  # the row's first place
    if N_BEFORE > 0:
        noise = tl.load(temperature + row)
        table = tl.where(noise == 0.0, n_bins, 0)
        for r in range(N_BEFORE):
            at = row * N_BEFORE + r
            goes_to, index = first + tl.load(b_place + at), tl.load(b_index + at)
            _store_children(
                token, score, bins, place, goes_to, tokens + at * W, scores + at * W, tl.load(b_score + at),
                rate + table, edges, base, table, least, most, sure, N_EDGES, E_PAD, W, W_PAD,
            )  # fmt: skip
            tl.store(node + goes_to, index)
            tl.store(position + goes_to, tl.load(b_position + at))
            tl.store(own_depth + goes_to, tl.load(b_depth + at))
            tl.store(is_used + goes_to, tl.full([], 1, tl.int8))
            way = tl.load(b_path + at * D + level, mask=level < D, other=-1)
            tl.store(path + goes_to * D + level, way, mask=level < D)
            tl.store(place + first * W + index, goes_to - first, mask=(tl.load(b_real + at) != 0) & (index >= 0))
        tl.debug_barrier()  # what some threads wrote is read by others
    if N > 0:
        rank, spot = tl.arange(0, W_PAD), tl.arange(0, P_PAD)
        is_spot = spot < PLACES
        used = tl.load(is_used + first + spot, mask=is_spot, other=1).to(tl.int32)
        cells = spot[:, None] * W + rank[None]
        is_cell = is_spot[:, None] & (rank < W)[None]
        left = _open_scores(score, place, own_depth, first, cells, is_cell, spot, is_spot, depth, W, IS_CHAIN)
        own_scratch = tl.load(scratch + row)
        for r in range(N):
            at, step = row * N + r, n_rows * N
            top = tl.max(tl.max(left, 1), 0)
            index = tl.min(tl.min(tl.where((left == top) & is_cell, cells, MANY), 1), 0)
            free = tl.min(tl.where(used == 0, spot, MANY), 0)
            is_real = (top > NEVER) & (free < PLACES - 1)
            goes_to = tl.where(is_real, free, PLACES - 1).to(tl.int64)
            above = first + tl.where(is_real, index // W, tl.load(root + row))  # a free place has no depth or path
            above_depth, above_position = tl.load(own_depth + above), tl.load(position + above)
            way = tl.load(path + above * D + level, mask=level < D, other=-1)
            way = tl.where(level == tl.minimum(above_depth, D - 1), goes_to, way)
            tl.store(whole + at, index.to(tl.int64))
            tl.store(whole + step + at, goes_to)
            tl.store(whole + 2 * step + at, tl.where(is_real, tl.load(token + first * W + index), 0))
            tl.store(whole + 3 * step + at, above_position + 1)
            tl.store(whole + 4 * step + at, above_depth + 1)
            tl.store(whole + 5 * step + at, own_scratch + goes_to)
            tl.store(real + at, is_real.to(tl.int8))
            tl.store(best + at, tl.where(is_real, top, NEVER))
            tl.store(own_path + at * D + level, way, mask=level < D)
            tl.store(seen + at, (above_position + 2).to(tl.int32))
            tl.store(paths + at * D + level, (own_scratch + tl.maximum(way, 0)).to(tl.int32), mask=level < D)
            left = tl.where(cells == index, NEVER, left)
            used = tl.where(spot == goes_to, 1, used)


@triton.jit
def _store_children(
    token, score, bins, place, goes_to, tokens, scores, above, rate, edges, base, table, least, most, sure,
    N_EDGES: tl.constexpr, E_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """The children of the node at a place, whose own score is `above`. `rate` begins at the row's table."""
    rank, edge = tl.arange(0, W_PAD), tl.arange(0, E_PAD)
    is_rank = rank < W
    found = tl.load(scores + rank, mask=is_rank, other=NEVER)
    is_there = is_rank & (found > NEVER) & (found < ALWAYS)
    share = tl.exp(found - tl.max(found, 0))
    share = share / tl.sum(share, 0)
    share = tl.minimum(tl.maximum(share, 1e-6), 1.0 - 1e-6)
    odds = tl.log(share) - tl.log(1.0 - share)
    steps = tl.load(edges + edge, mask=edge < N_EDGES, other=ALWAYS)
    n_below = tl.sum(((odds[:, None] >= steps[None]) & (edge < N_EDGES)[None]).to(tl.int64), 1)
    own = tl.load(base + rank, mask=is_rank, other=0) + n_below
    chance = tl.load(rate + own, mask=is_rank, other=0.5)
    chance = tl.minimum(tl.log(tl.minimum(tl.maximum(chance, least), most)), sure)
    cell = goes_to * W + rank
    tl.store(token + cell, tl.load(tokens + rank, mask=is_rank, other=0), mask=is_rank)
    tl.store(score + cell, tl.where(is_there, above + chance, NEVER), mask=is_rank)
    tl.store(bins + cell, own + table, mask=is_rank)
    tl.store(place + cell, tl.full([W_PAD], -1, tl.int64), mask=is_rank)


@triton.jit
def _open_scores(
    score, place, own_depth, first, cells, is_cell, spot, is_spot, depth, W: tl.constexpr, IS_CHAIN: tl.constexpr
):  # fmt: skip
    """The scores [P, W] of nodes that may be picked; -inf for the others."""
    deep = tl.load(own_depth + first + spot, mask=is_spot, other=MANY)
    is_open = is_cell & (tl.load(place + first * W + cells, mask=is_cell, other=0) < 0) & (deep < depth)[:, None]
    if IS_CHAIN:
        is_open = is_open & (cells % W == 0)
    return tl.where(is_open, tl.load(score + first * W + cells, mask=is_cell, other=NEVER), NEVER)
