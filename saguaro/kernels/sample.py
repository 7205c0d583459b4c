"""Sampling with shared noise: argmax, or the n best, of logits / temperature + noise.

The noise is rng's, bit for bit except for the last step: Philox4x32-10 keyed by the seed at counter (token // 4,
position, 0, DOMAIN), lane token % 4. One counter serves four consecutive tokens. Logarithms may differ from torch's by
an ulp or two.

A score and its token are packed into one int64 that sorts like the pair, ties to the lower token:

    bits    63 ........ 32   31 ........ 0
            ordered score    ~token

So the best is a maximum, and the next one is the maximum of all smaller keys. Keys are distinct, so the n best tokens
are in the n groups of tokens with the best maxima. The first kernel stores the maximum of each group; the second, one
program per row, finds those n groups, and computes and sorts their keys.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro import rng
from saguaro.algo.verification import BROKEN
from saguaro.kernels.launch import early, follow
from saguaro.kernels.limits import Limits, width_of

BLOCK = 1024  # tokens per program of the first kernel
N_WARPS = 4  # of the first kernel
WINDOW = 2048  # tokens that the second kernel sorts, about
PER_COUNTER = tl.constexpr(4)  # tokens per Philox counter
NOTHING = tl.constexpr(-(2**63))  # less than any key
DOMAIN = tl.constexpr(rng.DOMAIN)
ODD = tl.constexpr(0x7FFFFFFF)  # greater than any ordered score; the bits of a NaN
NO_TOKEN = tl.constexpr(BROKEN)


def choose(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [R] float32, 0: greedy; each is of L / R rows of logits, one after the other
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [L] int64: of the next token, less `ahead`
    n_known: int,  # columns that are tokens; other columns are ignored
    limits: Limits | None = None,  # of top-k, top-p and min-p (saguaro.kernels.limits); None: no row has any
    ahead: int = 0,
) -> Tensor:  # [L] int64
    """Every row's token: argmax(logits / temperature + noise), plain argmax at temperature 0; ties to the lowest.

    BROKEN for a row with a NaN or +inf logit.
    """
    return rank(logits, temperature, seeds, positions, n_known, 1, limits, ahead, _marks=True)[0][:, 0]


def choose_plain(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    n_known: int,
    limits: Limits | None = None,
    ahead: int = 0,
) -> Tensor:
    """The twin of `choose`."""
    scores = _scores_plain(logits, temperature, seeds, positions + ahead, n_known, limits)
    return scores.argmax(-1).masked_fill(scores.isnan().any(-1), BROKEN)


def rank(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [R] float32, 0: greedy; see choose
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [L] int64: of the next token, less `ahead`
    n_known: int,  # columns that are tokens; other columns are ignored
    n: int,
    limits: Limits | None = None,  # see choose; only with n = 1
    ahead: int = 0,
    *,
    _block: int = BLOCK,
    _marks: bool = False,  # the token of a NaN score is BROKEN
) -> tuple[Tensor, Tensor]:  # tokens [L, n] int64, scores [L, n] float32
    """The n best tokens of every row and their scores, best first: the first is `choose`'s.

    A NaN or +inf logit has the score NaN and is ranked first.
    """
    n_rows, width, positions = len(logits), width_of(logits, temperature, seeds), positions.contiguous()
    assert logits.dtype == temperature.dtype == torch.float32, (logits.dtype, temperature.dtype)
    assert logits.stride(1) == 1, logits.stride()
    assert 1 <= n <= min(n_known, _block), (n, n_known)
    assert limits is None or n == 1, n
    assert n_known <= logits.shape[1], (n_known, logits.shape)
    n_blocks, group = triton.cdiv(n_known, _block), group_of(n, _block)
    n_groups = n_blocks * (_block // group)
    best = torch.empty(n_rows, n_groups, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(n_rows, n, dtype=torch.int64, device=logits.device)
    scores = torch.empty(n_rows, n, dtype=torch.float32, device=logits.device)
    by_row = (temperature, temperature.stride(0), seeds, seeds.stride(0), width)
    given = (logits, *by_row, positions, ahead, best)
    launch = {"enable_fp_fusion": False, **early(logits.device)}
    limited = (scores, scores) if limits is None else limits  # not read without limits
    _block_kernel[(n_blocks, n_rows)](
        *given, *limited, n_known, logits.shape[1], logits.stride(0),
        BLOCK=_block, GROUP=group, LIMITED=limits is not None, num_warps=N_WARPS, **launch,
    )  # fmt: skip
    width, n_pad = triton.next_power_of_2(n_groups), triton.next_power_of_2(n)
    n_keys = width if n == 1 else max(width, n_pad * group)  # per program
    _row_kernel[(n_rows,)](
        *given, tokens, scores, n_known, n_groups, logits.stride(0),
        N=n, N_PAD=n_pad, GROUP=group, WIDTH=width, MARKS=_marks, num_warps=min(16, max(1, n_keys // 256)), **launch,
    )  # fmt: skip
    return tokens, scores


def group_of(n: int, block: int = BLOCK) -> int:
    """Tokens per group: n groups, rounded up, fill the window; for n = 1 a whole block.

    >>> group_of(1), group_of(9), group_of(65), group_of(2000)
    (1024, 128, 16, 4)
    """
    return block if n == 1 else min(block, max(4, WINDOW // triton.next_power_of_2(n)))


def rank_plain(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    n_known: int,
    n: int,
    limits: Limits | None = None,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """The twin of `rank`."""
    scores = _scores_plain(logits, temperature, seeds, positions + ahead, n_known, limits)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.indices[:, :n], best.values[:, :n]


def _scores_plain(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    n_known: int,
    limits: Limits | None = None,
) -> Tensor:
    width = width_of(logits, temperature, seeds)
    temperature, seeds = temperature.repeat_interleave(width), seeds.repeat_interleave(width)
    logits, is_warm = logits[:, :n_known], temperature[:, None] > 0
    best, least = (each[:, None] for each in limits) if limits is not None else (0.0, float("-inf"))
    soft = (logits - best) / torch.where(is_warm, temperature[:, None], 1.0)
    warm = torch.where(soft < least, float("-inf"), soft + rng.gumbel_all(seeds, positions, n_known))
    return torch.where(is_warm, warm, logits).masked_fill(~(logits < float("inf")), float("nan"))


@triton.jit
def _log1p(y):
    """log(1 + y), y in (-1, 0], to a few ulps, using only log: the rounding error of 1 + y cancels in the quotient."""
    one_and = 1.0 + y
    above = one_and - 1.0
    is_tiny = above == 0.0
    return tl.where(is_tiny, y, tl.log(one_and) * tl.div_rn(y, tl.where(is_tiny, 1.0, above)))


@triton.jit
def _gumbel(bits):
    """rng._to_gumbel: -log(-log(1 - u)), u in [2^-33, 1 - 2^-24]."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    return -tl.log(-_log1p(-u))


@triton.jit
def _noise(seed, position, counters):
    """Gumbel noise of the tokens of counters [n, m]: [n, 4 * m]."""
    n: tl.constexpr = counters.shape[0]
    m: tl.constexpr = counters.shape[1]
    a, b, c, d = tl.philox(seed, counters.to(tl.uint32), position.to(tl.uint32), 0, DOMAIN)  # the lanes, [n, m] each
    lanes = tl.join(tl.join(a, c), tl.join(b, d))  # [n, m, 2, 2], a, b, c, d when read in order
    return _gumbel(tl.reshape(lanes, (n, m * PER_COUNTER)))


@triton.jit
def _warm(scores, heat, seed, position, groups):
    """The scores [n, GROUP] of groups of tokens at a temperature above 0."""
    PER_GROUP: tl.constexpr = scores.shape[1] // PER_COUNTER
    counters = (groups * PER_GROUP)[:, None] + tl.arange(0, PER_GROUP)[None]
    return tl.div_rn(scores, tl.zeros_like(scores) + heat) + _noise(seed, position, counters)


@triton.jit
def _keys(logits, scores, tokens):
    """float32, float32, int32 -> int64 keys, ordered by score, then by lower token; NaN and +inf logits are largest."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0, so that the two tie
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(logits < float("inf"), ordered, ODD)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit(do_not_specialize=["width"])
def _block_kernel(
    logits, temperature, heat_stride, seeds, seed_stride, width, positions, ahead, best, bests, leasts,
    n_known, n_columns, stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, LIMITED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the best key of each group of one block of one row, to best [L, n_groups]."""
    N: tl.constexpr = BLOCK // GROUP
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = block * N + tl.arange(0, N)
    token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None]
    follow(EARLY)
    # The mask uses the row's width, a rounder number than n_known, so that four tokens of a thread are one load.
    given = tl.load(logits + row * stride + token, mask=token < n_columns, other=0.0)
    scores = given
    heat = tl.load(temperature + row // width * heat_stride)
    if heat > 0:
        seed, position = tl.load(seeds + row // width * seed_stride), tl.load(positions + row) + ahead
        relative = given
        if LIMITED:
            relative = given - tl.load(bests + row)
        scores = _warm(relative, heat, seed, position, groups)
        if LIMITED:
            soft = tl.div_rn(relative, tl.zeros_like(relative) + heat)
            scores = tl.where(soft < tl.load(leasts + row), float("-inf"), scores)
    keys = tl.where(token < n_known, _keys(given, scores, token), NOTHING)
    tl.store(best + row * tl.num_programs(0) * N + groups, tl.max(keys, axis=1))


@triton.jit
def _store_key(key, token, score, MARKS: tl.constexpr):
    """Unpack a key (see _keys) and store its token and score."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    chosen = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    if MARKS:
        chosen = tl.where(ordered == ODD, NO_TOKEN, chosen)
    tl.store(token, chosen)
    tl.store(score, bits.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["width"])
def _row_kernel(
    logits, temperature, heat_stride, seeds, seed_stride, width, positions, ahead, best, tokens, scores,
    n_known, n_groups, stride,
    N: tl.constexpr, N_PAD: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, MARKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the N best keys of one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    follow(EARLY)
    keys = tl.load(best + row * n_groups + at, mask=at < n_groups, other=NOTHING)
    last = tl.max(keys, axis=0)
    if N > 1:
        groups = tl.full([N_PAD], -1, tl.int32)  # there may be fewer
        for i in range(N):
            group = (0x7FFFFFFF - (last & 0x7FFFFFFF)).to(tl.int32) // GROUP
            groups = tl.where((tl.arange(0, N_PAD) == i) & (last != NOTHING), group, groups)
            if i + 1 < N:
                last = tl.max(tl.where(keys < last, keys, NOTHING), axis=0)
        token = groups[:, None] * GROUP + tl.arange(0, GROUP)[None]
        is_known = (groups >= 0)[:, None] & (token < n_known)
        given = tl.load(logits + row * stride + token, mask=is_known, other=0.0)
        found = given
        heat = tl.load(temperature + row // width * heat_stride)
        if heat > 0:
            seed, position = tl.load(seeds + row // width * seed_stride), tl.load(positions + row) + ahead
            found = _warm(given, heat, seed, position, groups)
        keys = tl.reshape(tl.where(is_known, _keys(given, found, token), NOTHING), (N_PAD * GROUP,))
        last = tl.max(keys, axis=0)
    _store_key(last, tokens + row * N, scores + row * N, MARKS)
    for i in range(1, N):
        last = tl.max(tl.where(keys < last, keys, NOTHING), axis=0)
        _store_key(last, tokens + row * N + i, scores + row * N + i, MARKS)
