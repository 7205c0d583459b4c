"""The bookkeeping of a growth step as one kernel: put the nodes just computed into the trees, then pick the next ones.

The twin is `expand` and `pick` of draft/tree.py, which own and document the trees, with the chances of draft/chance.py.
One program serves one row.
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
MANY = tl.constexpr(2**30)  # more than any depth
CELLS = tl.constexpr(2**20)  # more than any cell
LAST = tl.constexpr(2**62)  # after any cell of any lineage


def advance(
    trees: Sequence[Tensor],  # all tensors of draft/tree.py's Trees, without the root
    before: Sequence[Tensor] | None,  # index, is_real, place, position, depth, path, score of the nodes just computed
    ranked: tuple[Tensor, Tensor] | None,  # [B * R, W] each: tokens and scores of their children, best first
    table: tuple[Tensor, Tensor, Tensor, int],  # rates, edges, first bins of a rank; bins of rows with noise
    root: Tensor,  # [B] int64: its place
    temperature: Tensor,  # [B] float32
    scratch: Tensor,  # [B] int64: KV index of place 0
    limits: tuple[float, float, float],  # of a child's probability: least and most; and largest log-probability
    lineages: int,  # numbers of paths
    n: int,
    depth: int,
    is_chain: bool,
    falls: bool,  # whether a child is at most as likely as the sibling before it
) -> tuple[Tensor, ...] | None:
    """Change the trees in place, and pick n nodes whose parent is less than `depth` deep; None if n is 0.

    Returns the fields of draft/tree.py's Picked, then for the attention KV indices [B, n], the number of keys seen
    [B, n] int32, and the KV indices of the paths [B, n, D] int32.
    """
    token, score, bins, place, node, position, own_depth, path, is_used, lineage = trees
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
    free = torch.empty(b, n_places, dtype=torch.int32, device=device)
    n_cells = triton.next_power_of_2(n_places) * triton.next_power_of_2(width)
    rate, edges, base, n_bins = table
    _advance_kernel[(b,)](
        token, score, bins, place, node, position, own_depth, path, is_used.view(torch.int8), lineage,
        *given, tokens, scores, rate, edges, base, n_bins, root, temperature, scratch,
        whole, real, best, own_path, seen, paths, free, depth, *limits,
        N_EDGES=len(edges), PLACES=n_places, P_PAD=triton.next_power_of_2(n_places), W=width,
        W_PAD=triton.next_power_of_2(width), D=n_path, D_PAD=triton.next_power_of_2(n_path),
        N_BEFORE=n_before, B_PAD=triton.next_power_of_2(max(n_before, 1)), N=n, N_PAD=triton.next_power_of_2(max(n, 1)),
        IS_CHAIN=is_chain, FALLS=falls, LINEAGES=lineages, num_warps=4 if n_cells <= 2048 else 8,
    )  # fmt: skip
    if n == 0:
        return None
    index, placed, chosen, at, deep, kv_index = whole
    return index, real.view(torch.bool), placed, chosen, at, deep, own_path, best, kv_index, seen, paths


@triton.jit(do_not_specialize=["depth"])
def _advance_kernel(
    token, score, bins, place, node, position, own_depth, path, is_used, lineage,
    b_index, b_real, b_place, b_position, b_depth, b_path, b_score, tokens, scores, rate, edges, base, n_bins,
    root, temperature, scratch, whole, real, best, own_path, seen, paths, free, depth, least, most, sure,
    N_EDGES: tl.constexpr, PLACES: tl.constexpr, P_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, N_BEFORE: tl.constexpr, B_PAD: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, IS_CHAIN: tl.constexpr, FALLS: tl.constexpr, LINEAGES: tl.constexpr,
):  # fmt: skip
    """One row: expand N_BEFORE nodes, then pick N. Only the picking is a loop: its steps wait for one another."""
    row, n_rows = tl.program_id(0), tl.num_programs(0)
    level = tl.arange(0, D_PAD)
    is_level = level < D
    first = row * PLACES  # the row's first place
    if N_BEFORE > 0:
        _expand(
            token, score, bins, place, node, position, own_depth, path, is_used, lineage,
            b_index, b_real, b_place, b_position, b_depth, b_path, b_score, tokens, scores, rate, edges, base, n_bins,
            temperature, first, least, most, sure, N_EDGES, W, W_PAD, D, D_PAD, N_BEFORE, B_PAD, FALLS, LINEAGES,
        )  # fmt: skip
    if N > 0:
        spot = tl.arange(0, P_PAD)
        tl.debug_barrier()  # what some threads wrote is read by others
        is_free = tl.load(is_used + first + spot, mask=spot < PLACES, other=1) == 0
        tl.store(free + first + tl.cumsum(is_free.to(tl.int32), 0) - 1, spot, mask=is_free)
        left, order = _open(score, place, own_depth, lineage, first, depth, PLACES, P_PAD, W, W_PAD, IS_CHAIN)
        pick = tl.arange(0, N_PAD)
        picked, own = tl.zeros([N_PAD], tl.int64), tl.full([N_PAD], NEVER, tl.float32)
        for r in range(N):
            top = tl.max(left, 0)
            eldest = tl.min(tl.where(left == top, order, LAST), 0)
            left = tl.where(order == eldest, NEVER, left)
            picked = tl.where(pick == r, eldest, picked)
            own = tl.where(pick == r, top, own)
        tl.debug_barrier()  # the list of free places
        is_one = pick < N
        index = tl.where(is_one, picked % CELLS, 0)
        is_real = is_one & (own > NEVER) & (pick < tl.sum(is_free.to(tl.int32), 0))
        goes_to = tl.load(free + first + pick, mask=is_real, other=PLACES - 1).to(tl.int64)
        above = first + tl.where(is_real, index // W, tl.load(root + row))  # a free place has no depth or path
        above_depth, above_position = tl.load(own_depth + above), tl.load(position + above)
        is_way = is_one[:, None] & is_level[None]
        way = tl.load(path + above[:, None] * D + level[None], mask=is_way, other=-1)
        way = tl.where(level[None] == tl.minimum(above_depth, D - 1)[:, None], goes_to[:, None], way)
        at, step, own_scratch = row * N + pick, n_rows * N, tl.load(scratch + row)
        tl.store(whole + at, index, mask=is_one)
        tl.store(whole + step + at, goes_to, mask=is_one)
        tl.store(whole + 2 * step + at, tl.load(token + first * W + index, mask=is_real, other=0), mask=is_one)
        tl.store(whole + 3 * step + at, above_position + 1, mask=is_one)
        tl.store(whole + 4 * step + at, above_depth + 1, mask=is_one)
        tl.store(whole + 5 * step + at, own_scratch + goes_to, mask=is_one)
        tl.store(real + at, is_real.to(tl.int8), mask=is_one)
        tl.store(best + at, tl.where(is_real, own, NEVER), mask=is_one)
        tl.store(own_path + at[:, None] * D + level[None], way, mask=is_way)
        tl.store(seen + at, (above_position + 2).to(tl.int32), mask=is_one)
        kv = (own_scratch + tl.maximum(way, 0)).to(tl.int32)
        tl.store(paths + at[:, None] * D + level[None], kv, mask=is_way)


@triton.jit
def _expand(
    token, score, bins, place, node, position, own_depth, path, is_used, lineage,
    b_index, b_real, b_place, b_position, b_depth, b_path, b_score, tokens, scores, rate, edges, base, n_bins,
    temperature, first, least, most, sure, N_EDGES: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, N_BEFORE: tl.constexpr, B_PAD: tl.constexpr, FALLS: tl.constexpr,
    LINEAGES: tl.constexpr,
):  # fmt: skip
    """Put N_BEFORE nodes of one row into its tree; its first place is `first`."""
    row, level = tl.program_id(0), tl.arange(0, D_PAD)
    each = tl.arange(0, B_PAD)
    is_one = each < N_BEFORE
    at = row * N_BEFORE + each
    goes_to = first + tl.load(b_place + at, mask=is_one, other=0)
    index = tl.load(b_index + at, mask=is_one, other=-1)
    table = tl.where(tl.load(temperature + row) == 0.0, n_bins, 0)
    _store_children(
        token, score, bins, place, goes_to, is_one, tokens, scores, at, tl.load(b_score + at, mask=is_one, other=0),
        rate + table, edges, base, table, least, most, sure, N_EDGES, W, W_PAD, FALLS,
    )  # fmt: skip
    tl.store(node + goes_to, index, mask=is_one)
    tl.store(position + goes_to, tl.load(b_position + at, mask=is_one, other=0), mask=is_one)
    tl.store(own_depth + goes_to, tl.load(b_depth + at, mask=is_one, other=0), mask=is_one)
    tl.store(is_used + goes_to, tl.full([B_PAD], 1, tl.int8), mask=is_one)
    is_way = is_one[:, None] & (level < D)[None]
    way = tl.load(b_path + at[:, None] * D + level[None], mask=is_way, other=-1)
    tl.store(path + goes_to[:, None] * D + level[None], way, mask=is_way)
    known = tl.maximum(index, 0)
    line = tl.load(lineage + first + known // W, mask=is_one, other=0)
    line = tl.where(index < 0, 0, (line * (W + 1) + known % W + 1) % LINEAGES)
    tl.store(lineage + goes_to, line, mask=is_one)
    is_child = is_one & (tl.load(b_real + at, mask=is_one, other=0) != 0) & (index >= 0)
    tl.store(place + first * W + index, goes_to - first, mask=is_child)


@triton.jit
def _store_children(
    token, score, bins, place, goes_to, is_one, tokens, scores, at, above, rate, edges, base, table, least, most, sure,
    N_EDGES: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, FALLS: tl.constexpr,
):  # fmt: skip
    """The children of the nodes at these places [B], whose own scores are `above`. `rate` begins at the row's table."""
    rank = tl.arange(0, W_PAD)
    is_child = is_one[:, None] & (rank < W)[None]  # [B, W]
    child = at[:, None] * W + rank[None]
    found = tl.where(is_one[:, None], tl.load(scores + child, mask=is_child, other=NEVER), 0.0)
    is_there = is_child & (found > NEVER) & (found < ALWAYS)
    share = tl.exp(found - tl.max(found, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    share = tl.minimum(tl.maximum(share, 1e-6), 1.0 - 1e-6)
    odds = tl.log(share) - tl.log(1.0 - share)
    own = tl.load(base + rank, mask=rank < W, other=0)[None] + tl.zeros_like(child)
    for e in range(N_EDGES):
        own += (odds >= tl.load(edges + e)).to(tl.int64)
    chance = tl.load(rate + own, mask=is_child, other=0.5)
    chance = tl.minimum(tl.log(tl.minimum(tl.maximum(chance, least), most)), sure)
    if FALLS:
        is_before = (rank[None] <= rank[:, None])[None]  # [1, W, W]
        chance = tl.min(tl.where(is_before, chance[:, None, :], 0.0), 2)
    cell = goes_to[:, None] * W + rank[None]
    tl.store(token + cell, tl.load(tokens + child, mask=is_child, other=0), mask=is_child)
    tl.store(score + cell, tl.where(is_there, above[:, None] + chance, NEVER), mask=is_child)
    tl.store(bins + cell, own + table, mask=is_child)
    tl.store(place + cell, tl.full(cell.shape, -1, tl.int64), mask=is_child)


@triton.jit
def _open(
    score, place, own_depth, lineage, first, depth, PLACES: tl.constexpr, P_PAD: tl.constexpr, W: tl.constexpr,
    W_PAD: tl.constexpr, IS_CHAIN: tl.constexpr,
):  # fmt: skip
    """Of each cell [P * W]: its score, -inf if it may not be picked, and its order among equal scores."""
    each = tl.arange(0, P_PAD * W_PAD)
    spot, rank = each // W_PAD, each % W_PAD
    is_cell = (spot < PLACES) & (rank < W)
    cell = spot * W + rank
    deep = tl.load(own_depth + first + spot, mask=is_cell, other=MANY)
    is_open = is_cell & (tl.load(place + first * W + cell, mask=is_cell, other=0) < 0) & (deep < depth)
    if IS_CHAIN:
        is_open = is_open & (rank == 0)
    own = tl.where(is_open, tl.load(score + first * W + cell, mask=is_cell, other=NEVER), NEVER)
    line = tl.load(lineage + first + spot, mask=is_cell, other=0)
    return own, tl.where(is_cell, line * CELLS + cell, LAST)
