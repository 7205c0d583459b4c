"""From logits to tokens with shared noise (DESIGN section 5): argmax, or the n best, of logits / temperature + noise.

The noise is rng's, bit for bit up to the last step: Philox4x32-10 keyed by the seed at counter (token // 4, position,
0, DOMAIN), lane token % 4. One counter serves four neighbouring tokens. Its logarithms may differ by an ulp or two
from torch's.

A score and its token travel as one int64 that sorts as they do, ties to the lower token:

    bits    63 ........ 32   31 ........ 0
            ordered score    ~token

so the best of a block is a maximum, and the next one is the maximum of all that are less.
"""

# Kernels are compiled from their source: Triton has its own annotations, and no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro import rng

BLOCK = 2048  # tokens of one program
N_WARPS = 4  # of that program
NOTHING = tl.constexpr(-(2**63))  # less than any key
DOMAIN = tl.constexpr(rng.DOMAIN)


def choose(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [L] float32, 0: greedy
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64, of the token to come
    n_known: int,  # columns that are tokens; what the others hold does not matter
) -> Tensor:  # [L] int64
    """Every row's token: argmax(logits / temperature + noise), plain argmax at temperature 0; of ties the lowest."""
    return rank(logits, temperature, seeds, positions, n_known, 1)[0][:, 0]


def choose_plain(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, n_known: int) -> Tensor:
    """choose in plain torch."""
    return _scores_plain(logits, temperature, seeds, positions, n_known).argmax(-1)


def rank(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [L] float32, 0: greedy
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64, of the token to come
    n_known: int,  # columns that are tokens; what the others hold does not matter
    n: int,
    *,
    _block: int = BLOCK,
) -> tuple[Tensor, Tensor]:  # tokens [L, n] int64, scores [L, n] float32
    """The n best tokens of every row and their scores, best first: the first is `choose`'s."""
    n_rows = len(logits)
    temperature, seeds, positions = (x.contiguous() for x in (temperature, seeds, positions))
    assert logits.dtype == temperature.dtype == torch.float32, (logits.dtype, temperature.dtype)
    assert logits.stride(1) == 1, logits.stride()
    assert 1 <= n <= min(n_known, _block), (n, n_known)
    assert n_known <= logits.shape[1], (n_known, logits.shape)
    n_blocks = triton.cdiv(n_known, _block)
    best = torch.empty(n_rows, n_blocks * n, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(n_rows, n, dtype=torch.int64, device=logits.device)
    scores = torch.empty(n_rows, n, dtype=torch.float32, device=logits.device)
    _block_kernel[(n_blocks, n_rows)](
        logits, temperature, seeds, positions, best, n_known, logits.shape[1], logits.stride(0),
        N=n, BLOCK=_block, num_warps=N_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    width = triton.next_power_of_2(n_blocks * n)
    _row_kernel[(n_rows,)](
        best, tokens, scores, n_blocks * n, N=n, WIDTH=width, num_warps=min(16, max(1, width // 512))
    )
    return tokens, scores


def rank_plain(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, n_known: int, n: int
) -> tuple[Tensor, Tensor]:
    """rank in plain torch."""
    best = _scores_plain(logits, temperature, seeds, positions, n_known).sort(dim=-1, descending=True, stable=True)
    return best.indices[:, :n], best.values[:, :n]


def _scores_plain(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, n_known: int) -> Tensor:
    logits, is_warm = logits[:, :n_known], temperature[:, None] > 0
    warm = logits / torch.where(is_warm, temperature[:, None], 1.0) + rng.gumbel_all(seeds, positions, n_known)
    return torch.where(is_warm, warm, logits)


@triton.jit
def _log1p(y):
    """log(1 + y), y in (-1, 0], to a few ulps from log alone: the rounding of 1 + y cancels in the quotient."""
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
def _noise(seed, position, block, BLOCK: tl.constexpr):
    """Gumbel noise of tokens block * BLOCK + [0, BLOCK)."""
    counter = (block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, position.to(tl.uint32), 0, DOMAIN)  # the lanes, [BLOCK / 4] each
    lanes = tl.join(tl.join(a, c), tl.join(b, d))  # [BLOCK / 4, 2, 2], a, b, c, d when read in order
    return _gumbel(tl.reshape(lanes, (BLOCK,)))


@triton.jit
def _keys(scores, tokens):
    """float32 and int32 -> int64 that sorts by score, then by token downwards."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0, so that the two tie
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _block_kernel(
    logits, temperature, seeds, positions, best, n_known, n_columns, stride,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the N best keys of one block of one row, to best [L, n_blocks, N]."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    # Masked at the row's end, a rounder number than n_known, a thread's four neighbours are one load.
    scores = tl.load(logits + row * stride + token, mask=token < n_columns, other=0.0)
    heat = tl.load(temperature + row)
    if heat > 0:
        noise = _noise(tl.load(seeds + row), tl.load(positions + row), block, BLOCK)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + heat) + noise
    keys = tl.where(token < n_known, _keys(scores, token), NOTHING)
    to = best + (row * tl.num_programs(0) + block) * N
    last = tl.max(keys, axis=0)
    tl.store(to, last)
    for i in range(1, N):
        last = tl.max(tl.where(keys < last, keys, NOTHING), axis=0)
        tl.store(to + i, last)


@triton.jit
def _store_key(key, token, score):
    """_keys, undone."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    tl.store(token, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(score, bits.to(tl.float32, bitcast=True))


@triton.jit
def _row_kernel(best, tokens, scores, n_keys, N: tl.constexpr, WIDTH: tl.constexpr):
    """One program: the N best keys of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    keys = tl.load(best + row * n_keys + at, mask=at < n_keys, other=NOTHING)
    last = tl.max(keys, axis=0)
    _store_key(last, tokens + row * N, scores + row * N)
    for i in range(1, N):
        last = tl.max(tl.where(keys < last, keys, NOTHING), axis=0)
        _store_key(last, tokens + row * N + i, scores + row * N + i)
