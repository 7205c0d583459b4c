"""The joint planner as two kernels: plan the likeliest outcomes of every row, and learn from the actual ones.

The twin is Joint in draft/planner.py, in plain torch, which owns and documents the tables. Leads, bins and rates equal
the twin's bit for bit. Probabilities may differ in their last bits; outcomes whose probabilities agree to 2^-40 are
ordered by place.

A probability and its place are packed into one int64 that sorts like the pair, ties to the smaller place:

    bits    63 ........ n   n-1 ........ 0
            chance          ~place              chances are not negative, so their bits sort like their values

So the best is a maximum, and the next one is the maximum of all smaller keys.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.algo.planning import Ahead, Planned
from saguaro.kernels import launch
from saguaro.kernels.launch import follow
from saguaro.types import Outcome

NEVER = tl.constexpr(float("-inf"))
ALWAYS = tl.constexpr(float("inf"))
NOTHING = tl.constexpr(-1)  # less than any key
TILE = 2048  # elements that a program processes at a time in `learn`


class TritonJoint:
    """Joint's kernels. They are stateless: tables and held rows belong to the planner and are changed in place."""

    def plan(
        self,
        ahead: Ahead,
        held: Ahead,  # R >= B rows of the same shape, contiguous
        tables: tuple[Tensor, Tensor],  # accept, bonus: [3, n_bins] float64 contiguous: hits, trials, curve
        edges: tuple[Tensor, Tensor, Tensor],  # bin edges of leads, trusts (float64) and ranks (int64), ascending
        strength: float,
        M: int,
    ) -> Planned:
        """The M likeliest outcomes of each row; rows of length -1 have none. The rows are stored in `held`."""
        n_rows, n_steps, width = ahead.candidates.shape
        n_held, device = len(held.slots), ahead.slots.device
        assert held.candidates.shape == (n_held, n_steps, width), (held.candidates.shape, ahead.candidates.shape)
        assert n_rows <= n_held, (n_rows, n_held)
        found = torch.empty(2, n_rows, M, dtype=torch.int64, device=device)
        tokens, candidates, scores = (x.contiguous() for x in (ahead.tokens, ahead.candidates, ahead.scores))
        tile = triton.next_power_of_2(n_steps), triton.next_power_of_2(width)
        if n_held > 0:
            _plan_kernel[(n_held,)](
                ahead.slots, tokens, ahead.length, candidates, scores,
                held.slots, held.tokens, held.length, held.candidates, held.scores,
                *tables, *edges, found, n_rows, ahead.slots.stride(0), ahead.length.stride(0),
                K=n_steps - 1, C=width, M=M, BLOCK_K=tile[0], BLOCK_C=tile[1], BLOCK_M=triton.next_power_of_2(M or 1),
                STRENGTH=strength, **_sizes(tables, edges),
                num_warps=min(8, max(1, tile[0] * tile[1] // 256)), enable_fp_fusion=False, **launch.early(device),
            )  # fmt: skip
        return Planned(ahead.slots, found[0], found[1])

    def learn(
        self,
        outcome: Outcome,
        held: Ahead,
        tables: tuple[Tensor, Tensor],
        edges: tuple[Tensor, Tensor, Tensor],
        decay: float,  # factor of the tables for each row learnt from
    ) -> None:
        """Update the tables with the outcomes of held rows, and release these rows."""
        n_held, n_steps, width = held.candidates.shape
        n = len(outcome.slots)
        if n_held == 0 or n == 0:
            return
        block_c = triton.next_power_of_2(width)
        block_r = min(triton.next_power_of_2(n_held), 64, max(1, TILE // block_c))
        block_n = triton.next_power_of_2(max(n, n_held))  # the same for all usual n: one compiled kernel
        decided = outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus
        _learn_kernel[(1,)](
            *decided, held.slots, held.tokens, held.length, held.candidates, held.scores,
            *tables, *edges, n, *(x.stride(0) for x in decided),
            R=n_held, K=n_steps - 1, C=width, BLOCK_R=block_r, BLOCK_N=block_n, BLOCK_C=block_c,
            LOG_DECAY=math.log(decay), **_sizes(tables, edges),
            num_warps=4, enable_fp_fusion=False, **launch.early(held.slots.device),
        )  # fmt: skip


def _sizes(tables: tuple[Tensor, Tensor], edges: tuple[Tensor, Tensor, Tensor]) -> dict[str, int]:
    assert all(table.is_contiguous() and table.dtype == torch.float64 for table in tables)
    n_accept, n_bonus = (table.shape[1] for table in tables)
    n_leads, n_trusts, n_ranks = (len(each) for each in edges)
    assert max(n_leads, n_trusts, n_ranks) < 32, (n_leads, n_trusts, n_ranks)
    assert n_accept == n_leads + 1, (n_accept, n_leads)
    assert n_bonus == (n_trusts + 2) * (n_ranks + 1) * (n_leads + 1), (n_bonus, n_trusts, n_ranks, n_leads)
    return {"N_LEADS": n_leads, "N_TRUSTS": n_trusts, "N_RANKS": n_ranks, "N_ACCEPT": n_accept, "N_BONUS": n_bonus}


@triton.jit
def _bin(x, edges, N: tl.constexpr):
    """How many of the N < 32 ascending edges are at most x: torch.bucketize(x, edges, right=True)."""
    found = tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(5):
        if (16 >> i) <= N:
            more = found + (16 >> i)
            edge = tl.load(edges + tl.minimum(more, N) - 1)
            found = tl.where((more <= N) & (x >= edge), more, found)
    return found


@triton.jit
def _standing(scores):
    """[R, C] -> rank and lead of each finite score, as planning's `ranks` and `leads`; undefined for the others."""
    is_left = scores > NEVER
    rank = tl.cumsum(is_left.to(tl.int32), axis=1) - 1
    is_best = is_left & (rank == 0)
    best = tl.max(scores, axis=1)[:, None]
    second = tl.max(tl.where(is_best, NEVER, scores), axis=1)[:, None]
    best_left = tl.where(best > NEVER, best, 0.0)  # avoids -inf - -inf if no score is finite
    return rank, tl.where(is_best, best_left - second, scores - best_left).to(tl.float64)


@triton.jit
def _trust(scores, candidates, token):
    """[R, C], [R, C], [R] -> [R] float64: planning's `trust` of a token in flight."""
    _, lead = _standing(scores)
    is_it = (candidates == token[:, None]) & (scores > NEVER)
    span = tl.max(scores, axis=1) - tl.min(tl.where(scores > NEVER, scores, ALWAYS), axis=1)
    unknown = -1.0 - tl.where(span >= 0, span, 0.0)
    is_known = tl.max(is_it.to(tl.int32), axis=1) > 0
    return tl.where(is_known, tl.max(tl.where(is_it, lead, NEVER), axis=1), unknown.to(tl.float64))


@triton.jit
def _bonus_bin(
    left, trust, is_last, leads, trusts, ranks,
    N_LEADS: tl.constexpr, N_TRUSTS: tl.constexpr, N_RANKS: tl.constexpr,
):  # fmt: skip
    """[R, C], [R], [R] -> [R, C] int32: the bin of each alternative that is left."""
    rank, lead = _standing(left)
    group = tl.where(is_last, N_TRUSTS + 1, _bin(trust, trusts, N_TRUSTS))
    return (group[:, None] * (N_RANKS + 1) + _bin(rank, ranks, N_RANKS)) * (N_LEADS + 1) + _bin(lead, leads, N_LEADS)


@triton.jit
def _rate(table, bins, mask, STRENGTH: tl.constexpr, N: tl.constexpr):
    """The rate of each bin; 1 where the mask is false."""
    hits = tl.load(table + bins, mask=mask, other=0.0)
    trials = tl.load(table + N + bins, mask=mask, other=0.0)
    curve = tl.load(table + 2 * N + bins, mask=mask, other=1.0)
    return (hits + curve * STRENGTH) / (trials + STRENGTH)


@triton.jit(do_not_specialize=["n", "slots_row", "length_row"])
def _plan_kernel(
    slots, tokens, length, candidates, scores,
    held_slots, held_tokens, held_length, held_candidates, held_scores,
    accept, bonus, leads, trusts, ranks, found, n, slots_row, length_row,
    K: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, STRENGTH: tl.constexpr,
    N_LEADS: tl.constexpr, N_TRUSTS: tl.constexpr, N_RANKS: tl.constexpr,
    N_ACCEPT: tl.constexpr, N_BONUS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one held row, its outcomes as a tile [BLOCK_K, BLOCK_C]. Held rows from n on are released."""
    follow(EARLY)
    row = tl.program_id(0)
    if row >= n:
        tl.store(held_slots + row, -1)
    else:
        end = tl.load(length + row * length_row)
        step, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
        at = step[:, None] * C + column[None, :]
        is_there = (step <= K)[:, None] & (column < C)[None, :]
        token = tl.load(tokens + row * K + step, mask=step < K, other=-1)
        candidate = tl.load(candidates + row * (K + 1) * C + at, mask=is_there, other=-1)
        score = tl.load(scores + row * (K + 1) * C + at, mask=is_there, other=NEVER)

        tl.store(held_slots + row, tl.load(slots + row * slots_row))
        tl.store(held_length + row, end)
        tl.store(held_tokens + row * K + step, token, mask=step < K)
        tl.store(held_candidates + row * (K + 1) * C + at, candidate, mask=is_there)
        tl.store(held_scores + row * (K + 1) * C + at, score, mask=is_there)

        is_tested = step < end
        trust = tl.where(is_tested, _trust(score, candidate, token), 0.0)
        chance = _rate(accept, _bin(trust, leads, N_LEADS), is_tested, STRENGTH, N_ACCEPT)
        before = tl.where(step > 0, tl.gather(chance, tl.maximum(step - 1, 0), axis=0), 1.0)
        reached = tl.cumprod(before, axis=0) * tl.where(is_tested, 1.0 - chance, 1.0)

        is_taken = (candidate == token[:, None]) & is_tested[:, None]
        left = tl.where(is_taken | (step > end)[:, None], NEVER, score)
        is_left = left > NEVER
        bins = _bonus_bin(left, trust, step == end, leads, trusts, ranks, N_LEADS, N_TRUSTS, N_RANKS)
        worth = reached[:, None] * _rate(bonus, bins, is_left, STRENGTH, N_BONUS)

        LAST: tl.constexpr = BLOCK_K * BLOCK_C - 1  # a power of two minus one
        place = step[:, None] * BLOCK_C + column[None, :]
        keys = (worth.to(tl.int64, bitcast=True) & ~LAST) | (LAST - place)
        keys = tl.ravel(tl.where(is_left & (worth > 0), keys, NOTHING), can_reorder=True)
        nth = tl.arange(0, BLOCK_M)
        best = tl.full((BLOCK_M,), NOTHING, tl.int64)
        last = tl.max(keys, axis=0)
        for i in range(M):
            best = tl.where(nth == i, last, best)
            last = tl.max(tl.where(keys < last, keys, NOTHING), axis=0)
        is_planned = best > NOTHING
        place = LAST - (best & LAST)
        k, c = place // BLOCK_C, place % BLOCK_C
        chosen = tl.load(candidates + row * (K + 1) * C + k * C + c, mask=is_planned, other=0)
        tl.store(found + row * M + nth, tl.where(is_planned, k, -1), mask=nth < M)
        tl.store(found + (n + row) * M + nth, chosen, mask=nth < M)


@triton.jit
def _match(
    held_slots, held_length, slots, length, row, n, slots_row, length_row, R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Index of the first outcome of each held row, [BLOCK_R]; BLOCK_N if it has none."""
    i = tl.arange(0, BLOCK_N)
    slot = tl.load(held_slots + row, mask=row < R, other=-1)
    end = tl.load(held_length + row, mask=row < R, other=-1)
    decided = tl.load(slots + i * slots_row, mask=i < n, other=-1)
    verified = tl.load(length + i * length_row, mask=i < n, other=0)
    is_same = (slot[:, None] == decided[None, :]) & (verified[None, :] <= end[:, None])
    is_same &= (slot >= 0)[:, None]
    return tl.min(tl.where(is_same, i[None, :], BLOCK_N), axis=1)


@triton.jit
def _fade(table, kept, N: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the first N entries by `kept`."""
    for first in range(0, N, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(table + at, tl.load(table + at, mask=at < N) * kept, mask=at < N)


@triton.jit
def _count(table, bins, is_hit, is_trial, N: tl.constexpr):
    """Add 1 to trials and hits; all addends are 1, so their order does not matter."""
    one = tl.zeros_like(bins).to(tl.float64) + 1.0
    tl.atomic_add(table + N + bins, one, mask=is_trial, sem="relaxed")
    tl.atomic_add(table + bins, one, mask=is_trial & is_hit, sem="relaxed")


@triton.jit(do_not_specialize=["n", "slots_row", "length_row", "accepted_row", "bonus_row"])
def _learn_kernel(
    slots, length, n_accepted, bonuses,
    held_slots, held_tokens, held_length, held_candidates, held_scores,
    accept, bonus, leads, trusts, ranks, n, slots_row, length_row, accepted_row, bonus_row,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, LOG_DECAY: tl.constexpr,
    N_LEADS: tl.constexpr, N_TRUSTS: tl.constexpr, N_RANKS: tl.constexpr,
    N_ACCEPT: tl.constexpr, N_BONUS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A single program: decay the tables once per matched row, then count these rows."""
    follow(EARLY)
    rows, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    n_known = tl.sum(tl.zeros((BLOCK_R,), tl.int32), axis=0)
    for first in range(0, R, BLOCK_R):
        which = _match(
            held_slots, held_length, slots, length, first + rows, n, slots_row, length_row, R, BLOCK_N
        )  # fmt: skip
        n_known += tl.sum((which < BLOCK_N).to(tl.int32), axis=0)
    if n_known > 0:
        kept = tl.exp(n_known.to(tl.float64) * LOG_DECAY)
        _fade(accept, kept, 2 * N_ACCEPT, 64)
        _fade(bonus, kept, 2 * N_BONUS, 1024)
        tl.debug_barrier()  # one thread decays an entry, another counts into it
        for first in range(0, R, BLOCK_R):
            row = first + rows
            which = _match(held_slots, held_length, slots, length, row, n, slots_row, length_row, R, BLOCK_N)
            is_known = which < BLOCK_N
            end = tl.load(length + which * length_row, mask=is_known, other=0)
            k = tl.load(n_accepted + which * accepted_row, mask=is_known, other=0)
            came = tl.load(bonuses + which * bonus_row, mask=is_known, other=0)

            is_there = is_known[:, None] & (column < C)[None, :]
            for step in range(K):
                is_tested = is_known & (step <= k) & (step < end)
                at = (row * (K + 1) + step)[:, None] * C + column[None, :]
                token = tl.load(held_tokens + row * K + step, mask=is_known, other=-1)
                candidate = tl.load(held_candidates + at, mask=is_there, other=-1)
                score = tl.load(held_scores + at, mask=is_there, other=NEVER)
                bins = _bin(_trust(score, candidate, token), leads, N_LEADS)
                _count(accept, bins, step < k, is_tested, N_ACCEPT)

            is_rejected = k < end
            at = (row * (K + 1) + k)[:, None] * C + column[None, :]
            token = tl.load(held_tokens + row * K + k, mask=is_known & is_rejected, other=-1)
            candidate = tl.load(held_candidates + at, mask=is_there, other=-1)
            score = tl.load(held_scores + at, mask=is_there, other=NEVER)
            left = tl.where((candidate == token[:, None]) & is_rejected[:, None], NEVER, score)
            trust = _trust(score, candidate, token)
            bins = _bonus_bin(left, trust, k == end, leads, trusts, ranks, N_LEADS, N_TRUSTS, N_RANKS)
            _count(bonus, bins, candidate == came[:, None], left > NEVER, N_BONUS)
            tl.debug_barrier()  # all threads have read the held rows
            tl.store(held_slots + row, -1, mask=is_known)
