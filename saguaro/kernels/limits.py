"""Top-k, top-p and min-p as one limit per row: the least score that stays. No row is sorted.

A score is (logit - best) / temperature, at most 0. The limit of top-k is the largest score that k tokens reach. That of
top-p is the largest one that tokens with a share p of the mass that top-k leaves reach. That of min-p is log(min_p).
Each pass over the tokens leaves a quarter of the float32 numbers among which a limit may be: the bits of floats that
are not negative sort like the floats. Ties at a limit stay, as in saguaro.algo.sampling.

A row without these rules is given the best logit 0 and the limit -inf, so that (logit - best) / temperature is
logit / temperature to the bit.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.algo.sampling import NEVER, keep_top_k, keep_top_p
from saguaro.kernels.launch import early, follow

BLOCK = 4096  # tokens that a program loads at a time
N_WARPS = 16
N_PASSES = tl.constexpr(17)  # of which each leaves a quarter of 2^31 numbers
ALL = tl.constexpr(0x7F800000)  # the bits of +inf

Limits = tuple[Tensor, Tensor]  # best [L] float32, least [L] float32


def limits(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [R] float32, 0: greedy, which has no limits; each is of L / R rows of logits in a row
    top_k: Tensor,  # [R] int64, <= 0: off
    top_p: Tensor,  # [R] float32, 1: off
    log_min_p: Tensor,  # [R] float32, -inf: off
    n_known: int,  # columns that are tokens; other columns are ignored
) -> Limits:
    """The logit that scores are relative to, and the least score that stays."""
    assert logits.dtype == temperature.dtype == top_p.dtype == log_min_p.dtype == torch.float32
    assert logits.stride(1) == 1, logits.stride()
    assert n_known <= logits.shape[1], (n_known, logits.shape)
    given = (temperature, top_k, top_p, log_min_p)
    by_row = (value for each in given for value in (each, each.stride(0)))
    best, least = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    _kernel[(len(logits),)](
        logits, *by_row, width_of(logits, *given), best, least, n_known, logits.stride(0),
        BLOCK=BLOCK, enable_fp_fusion=False, num_warps=N_WARPS, **early(logits.device),
    )  # fmt: skip
    return best, least


def limits_plain(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, n_known: int
) -> Limits:
    """The twin of `limits`."""
    width, logits = width_of(logits, temperature, top_k, top_p, log_min_p), logits[:, :n_known]
    given = (temperature, top_k, top_p, log_min_p)
    temperature, top_k, top_p, log_min_p = (each.repeat_interleave(width) for each in given)
    is_ruled = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (log_min_p > NEVER))
    best = logits.amax(-1)
    scores = (logits - best[:, None]) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    kept = keep_top_p(keep_top_k(scores, top_k), top_p)
    least = torch.where(kept > NEVER, kept, 0.0).amin(-1).maximum(log_min_p)
    return torch.where(is_ruled, best, 0.0), torch.where(is_ruled, least, NEVER)


def width_of(logits: Tensor, *by_row: Tensor) -> int:
    """How many rows of logits share a value of such tensors.

    >>> width_of(torch.zeros(6, 9), torch.zeros(2))
    3
    """
    (n_rows,) = {len(each) for each in by_row}
    width = len(logits) // n_rows
    assert width * n_rows == len(logits), (len(logits), n_rows)
    return width


@triton.jit
def _reached(logits, best, temperature, n_known, limit, low, middle, high, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens at most `limit` below the best: how many, or which mass, is at most low, middle and high below."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, n_known, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        given = tl.load(logits + at, mask=at < n_known, other=float("nan"))
        below = tl.div_rn(best - given, tl.zeros_like(given) + temperature)  # NaN behind the last token: never reached
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if not COUNTS:
            weight = tl.exp(-below)
        first += tl.where((below <= limit) & (below <= low), weight, 0.0)
        second += tl.where((below <= limit) & (below <= middle), weight, 0.0)
        third += tl.where((below <= limit) & (below <= high), weight, 0.0)
    return tl.sum(first), tl.sum(second), tl.sum(third)


@triton.jit
def _search(logits, best, temperature, n_known, limit, needed, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The least distance below the best at which so many tokens are reached, or so much mass: as few as possible."""
    low, high = tl.full([], -1, tl.int32), tl.full([], ALL, tl.int32)  # not enough is reached at low, enough at high
    for _ in range(N_PASSES):
        step = (high - low + 3) // 4
        a, b, c = (
            tl.minimum(low + step, high - 1),
            tl.minimum(low + 2 * step, high - 1),
            tl.minimum(low + 3 * step, high - 1),
        )
        at_a, at_b, at_c = _reached(
            logits, best, temperature, n_known, limit, a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), COUNTS, BLOCK,
        )  # fmt: skip
        low = tl.where(at_c < needed, c, tl.where(at_b < needed, b, tl.where(at_a < needed, a, low)))
        high = tl.where(at_a >= needed, a, tl.where(at_b >= needed, b, tl.where(at_c >= needed, c, high)))
    return high.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["width"])
def _kernel(
    logits, temperatures, heat_stride, top_k, k_stride, top_p, p_stride, log_min_p, lowest_stride, width,
    bests, leasts, n_known, stride,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the limits of one row."""
    row = tl.program_id(0).to(tl.int64)
    own = row // width
    follow(EARLY)
    temperature, k, p, lowest = (
        tl.load(temperatures + own * heat_stride), tl.load(top_k + own * k_stride),
        tl.load(top_p + own * p_stride), tl.load(log_min_p + own * lowest_stride),
    )  # fmt: skip
    best, least = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((k > 0) | (p < 1) | (lowest > float("-inf"))):
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, n_known, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            most = tl.maximum(most, tl.load(logits + row * stride + at, mask=at < n_known, other=float("-inf")))
        best, limit = tl.max(most), tl.full([], float("inf"), tl.float32)
        if k > 0:
            needed = tl.minimum(k, n_known).to(tl.float32)
            limit = _search(logits + row * stride, best, temperature, n_known, limit, needed, True, BLOCK)
        if p < 1:
            _, _, mass = _reached(
                logits + row * stride, best, temperature, n_known, limit, limit, limit, limit, False, BLOCK
            )
            limit = _search(logits + row * stride, best, temperature, n_known, limit, p * mass, False, BLOCK)
        least = tl.maximum(-limit, lowest)
    tl.store(bests + row, best)
    tl.store(leasts + row, least)
