"""The bookkeeping of trees as kernels, one program for each row.

    advance   put the nodes just computed into the trees, then pick the next ones: `expand` and `pick`
    land      find where an outcome leads: `land`
    show      write the likeliest nodes where the host reads them: `reroot`, then `best`

The twins are functions of draft/tree.py, which own and document the trees, with the chances of draft/chance.py. A row's
tree is trees[which[row]].
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
    root: Tensor,  # [trees] int64: its place
    which: Tensor,  # [B] int64
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
    b, (_, n_places, width) = len(which), token.shape
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
        *given, tokens, scores, rate, edges, base, n_bins, root, which, temperature, scratch,
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
    root, which, temperature, scratch, whole, real, best, own_path, seen, paths, free, depth, least, most, sure,
    N_EDGES: tl.constexpr, PLACES: tl.constexpr, P_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, N_BEFORE: tl.constexpr, B_PAD: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, IS_CHAIN: tl.constexpr, FALLS: tl.constexpr, LINEAGES: tl.constexpr,
):  # fmt: skip
    """One row: expand N_BEFORE nodes, then pick N. Only the picking is a loop: its steps wait for one another."""
    row, n_rows = tl.program_id(0), tl.num_programs(0)
    level = tl.arange(0, D_PAD)
    is_level = level < D
    tree = tl.load(which + row)
    first, free = tree * PLACES, free + row * PLACES  # the tree's first place; room for a list of free ones
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
        tl.store(free + tl.cumsum(is_free.to(tl.int32), 0) - 1, spot, mask=is_free)
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
        goes_to = tl.load(free + pick, mask=is_real, other=PLACES - 1).to(tl.int64)
        above = first + tl.where(is_real, index // W, tl.load(root + tree))  # a free place has no depth or path
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


def land(
    trees: Sequence[Tensor],
    root: Tensor,  # [trees] int64: its place
    which: Tensor,  # [B] int64
    node: Tensor,  # [B] int64: the last accepted one, or how it is named
    bonus: Tensor,  # [B] int64
    names: tuple[int, int],  # NO_TREE and AT_PLACE of draft/tree.py
) -> tuple[Tensor, ...]:
    """The fields of draft/tree.py's Landing. Trees are not changed."""
    token, score, _, place, node_of, _, depth, path, _, _ = trees
    b, (_, n_places, width), n_path = len(which), token.shape, path.shape[2]
    flags = torch.empty(2, b, dtype=torch.int8, device=token.device)
    places = torch.empty(2, b, dtype=torch.int64, device=token.device)
    chosen = torch.empty(b, n_path + 1, dtype=torch.int64, device=token.device)
    _land_kernel[(b,)](
        token, score, place, node_of, depth, path, root, which, node.contiguous(), bonus.contiguous(),
        flags, places, chosen, *names, PLACES=n_places, W=width, W_PAD=triton.next_power_of_2(width), D=n_path,
        D_PAD=triton.next_power_of_2(n_path + 1), num_warps=1,
    )  # fmt: skip
    return flags[0].view(torch.bool), flags[1].view(torch.bool), places[0], places[1], chosen


@triton.jit
def _land_kernel(
    token, score, place, node, depth, path, root, which, wanted, bonus, flags, places, chosen, no_tree, at_place,
    PLACES: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    row, n_rows = tl.program_id(0), tl.num_programs(0)
    tree = tl.load(which + row)
    first, top, at = tree * PLACES, tl.load(root + tree), tl.load(wanted + row)
    is_tree = at != no_tree
    named = tl.load(node + first + tl.minimum(tl.maximum(at_place - at, 0), PLACES - 1))
    at = tl.where(at <= at_place, named, at)
    cell = tl.maximum(at, 0)
    own = tl.where(at < 0, top, tl.load(place + first * W + cell))
    last = tl.where(own < 0, cell // W, own)  # the node itself, or the place that lists it
    rank = tl.arange(0, W_PAD)
    child = (first + last) * W + rank
    is_next = (rank < W) & (own >= 0) & (tl.load(token + child, mask=rank < W, other=-1) == tl.load(bonus + row))
    is_next = is_next & (tl.load(score + child, mask=rank < W, other=NEVER) > NEVER)
    found = tl.min(tl.where(is_next, rank, W_PAD), 0)
    is_found = found < W_PAD
    found = tl.where(is_found, found, 0)
    after = tl.where(is_found, tl.load(place + (first + last) * W + found), -1)
    is_hit = is_tree & (after >= 0)
    tl.store(flags + row, is_tree.to(tl.int8))
    tl.store(flags + n_rows + row, is_hit.to(tl.int8))
    tl.store(places + row, tl.where(is_hit, after, 0))
    tl.store(places + n_rows + row, last)
    level = tl.arange(0, D_PAD)
    way = tl.load(path + (first + last) * D + level, mask=level < D, other=-1)
    ranks = tl.load(node + first + tl.maximum(way, 0), mask=level < D, other=0) % W
    final = tl.where(own < 0, cell % W, tl.where(is_found, found, -1))
    ranks = tl.where(level == tl.minimum(tl.load(depth + first + last), D), final, tl.where(way >= 0, ranks, -1))
    tl.store(chosen + row * (D + 1) + level, ranks, mask=level <= D)


def show(
    trees: Sequence[Tensor],
    root: Tensor,  # [B] int64: the place of a root, or of a new one
    which: Tensor,  # [B] int64
    is_shown: Tensor,  # [B] bool: the other rows have no nodes
    n: int,
    depth: int,
    is_chain: bool,
    out: Tensor,  # [B, 4 * n] int64, rows contiguous
) -> None:
    """Write the n likeliest nodes up to `depth` below the root: node, token, parent, bits of the score; node -1: no
    more. Trees are not changed."""
    token, score, _, place, node, _, own_depth, path, is_used, lineage = trees
    (_, n_places, width), n_path = token.shape, path.shape[2]
    n_cells = triton.next_power_of_2(n_places) * triton.next_power_of_2(width)
    _show_kernel[(len(which),)](
        token, score, place, node, own_depth, path, is_used.view(torch.int8), lineage, root.contiguous(), which,
        is_shown.view(torch.int8), out, out.stride(0), depth, PLACES=n_places, P_PAD=triton.next_power_of_2(n_places),
        W=width, W_PAD=triton.next_power_of_2(width), D=n_path, N=n, N_PAD=triton.next_power_of_2(n),
        IS_CHAIN=is_chain, num_warps=4 if n_cells <= 2048 else 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["depth"])
def _show_kernel(
    token, score, place, node, own_depth, path, is_used, lineage, root, which, is_shown, out, stride, depth,
    PLACES: tl.constexpr, P_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    N_PAD: tl.constexpr, IS_CHAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first, top, shown = tl.load(which + row) * PLACES, tl.load(root + row), tl.load(is_shown + row) != 0
    pick = tl.arange(0, N_PAD)
    known, n_above = tl.load(node + first + top), tl.load(own_depth + first + top)
    above = tl.where(known < 0, 0.0, tl.load(score + first * W + tl.maximum(known, 0)))  # of a new root
    picked, own = tl.zeros([N_PAD], tl.int64), tl.full([N_PAD], NEVER, tl.float32)
    if IS_CHAIN:
        at = tl.where(shown, top, -1)
        for r in range(N):
            cell = tl.maximum(at, 0) * W
            value = tl.where((at >= 0) & (r < depth), tl.load(score + first * W + cell) - above, NEVER)
            picked = tl.where(pick == r, cell, picked)
            own = tl.where(pick == r, value, own)
            at = tl.where((at >= 0) & (value > NEVER), tl.load(place + first * W + cell), -1)
    else:
        each = tl.arange(0, P_PAD * W_PAD)
        spot, rank = each // W_PAD, each % W_PAD
        is_cell = shown & (spot < PLACES) & (rank < W)
        cell = spot * W + rank
        is_below = is_cell & (tl.load(is_used + first + spot, mask=is_cell, other=0) != 0)
        way = tl.load(path + (first + spot) * D + tl.maximum(n_above - 1, 0), mask=is_below, other=-1)
        is_below = is_below & ((n_above == 0) | (way == top))
        is_below = is_below & (tl.load(own_depth + first + spot, mask=is_below, other=MANY) - n_above < depth)
        left = tl.where(is_below, tl.load(score + first * W + cell, mask=is_below, other=NEVER) - above, NEVER)
        line = tl.load(lineage + first + spot, mask=is_cell, other=0)
        order = tl.where(is_cell, line * CELLS + cell, LAST)
        for r in range(N):
            most = tl.max(left, 0)
            eldest = tl.min(tl.where(left == most, order, LAST), 0)
            left = tl.where(order == eldest, NEVER, left)
            picked = tl.where(pick == r, eldest % CELLS, picked)
            own = tl.where(pick == r, most, own)
    is_real = (pick < N) & (own > NEVER)
    listed = picked // W  # the place that lists a node
    holder = tl.load(node + first + listed, mask=is_real, other=-1)
    is_parent = (holder[:, None] == picked[None]) & is_real[None] & (listed != top)[:, None]
    parent = tl.max(tl.where(is_parent, pick[None], -1), 1)
    said = tl.load(token + first * W + picked, mask=is_real, other=0)
    to = out + row * stride + 4 * pick
    tl.store(to, tl.where(is_real, picked, -1), mask=pick < N)
    tl.store(to + 1, said, mask=pick < N)
    tl.store(to + 2, parent.to(tl.int64), mask=pick < N)
    tl.store(to + 3, own.to(tl.int32, bitcast=True).to(tl.int64), mask=pick < N)


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
