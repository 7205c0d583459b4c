"""Matrix products of few rows, bound by reading the weight once: rms_norm, gate and residual are fused into them.

A weight is [in, out] as everywhere, but lies in memory as [out, in] (`weight.stride() == (1, in)`).

The one invariant: row i of a result is a function of row i of the input, to the bit, whatever the other rows and
however many. So everything that orders a sum (`config`) is a function of the weight's shape and dtype alone:

* the weight is the left operand of the dot, [BLOCK_N, BLOCK_K] @ [BLOCK_K, BLOCK_T]: the number of rows only widens
  the right one, which changes neither the instruction nor the order in which it adds up over k;
* sums of squares are folded in pairs, and a + b = b + a: no layout the compiler may choose for more rows shows;
* floating-point contraction is off: whether a product and a sum become one instruction may depend on the layout too.
"""

# Kernels are compiled from their source: Triton has its own annotations, and no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64  # above it the plain twins take over: many rows are bound by arithmetic
LEAST_ROWS = 16  # the narrowest right operand
ROW_TILE = 64  # the widest
N_COUNTERS = 4096  # tiles one add_product may have
N_PROGRAMS = 264  # two for each of 132 multiprocessors: what a product is cut into, at least


class Config(NamedTuple):
    """How a product is cut: a function of the weight's shape and dtype, never of the number of rows."""

    block_n: int  # rows of [out, in] memory per program; gate and up rows together
    block_k: int
    split: int  # programs that share a tile's k; add_product only
    warps: int
    stages: int


def config(n_in: int, n_out: int, dtype: torch.dtype, may_split: bool = False) -> Config:
    """The configuration of a weight.

    >>> config(5120, 51200, torch.bfloat16), config(25600, 5120, torch.bfloat16, may_split=True).split
    (Config(block_n=64, block_k=128, split=1, warps=4, stages=4), 4)
    """
    if dtype == torch.float32:  # no tensor cores: operands live in registers
        cut = Config(block_n=32, block_k=32, split=1, warps=4, stages=2)
    elif n_out >= 64 * N_PROGRAMS or (may_split and n_out >= 64 * 64):
        cut = Config(block_n=64, block_k=128, split=1, warps=4, stages=4)
    elif n_out >= 32 * N_PROGRAMS or may_split:
        cut = Config(block_n=32, block_k=128, split=1, warps=4, stages=4)
    else:
        cut = Config(block_n=16, block_k=256, split=1, warps=4, stages=4)
    if may_split:
        n_tiles, n_chunks = _ceil(n_out, cut.block_n), _ceil(n_in, cut.block_k)
        cut = cut._replace(split=min(_ceil(N_PROGRAMS, n_tiles), 8, max(1, n_chunks // 2)))
    return cut


def counters(device: torch.device) -> Tensor:
    """What lets the last program of an add_product's tile know that it is the last: zero before and after each call.

    One for each stream: products that run at the same time must not share it.
    """
    return torch.zeros(N_COUNTERS, dtype=torch.int32, device=device)


def normed_product(
    x: Tensor,  # [T, in]
    norm: Tensor,  # [in]
    eps: float,
    weight: Tensor,  # [in, out]
    bias: Tensor | None,  # [out]
    out_dtype: torch.dtype | None = None,
    *,
    _config: Config | None = None,
) -> Tensor:  # [T, out]
    """rms_norm(x) @ W, plus the bias if there is one, as out_dtype (default: x's).

    x times the norm's weight is rounded to the weight's dtype; 1 / rms is applied to the sums, in float32.
    """
    if len(x) > MAX_ROWS:
        return normed_product_plain(x, norm, eps, weight, bias, out_dtype)
    out = torch.empty(len(x), weight.shape[1], dtype=out_dtype or x.dtype, device=x.device)
    _launch_normed(x, norm, eps, weight, bias, out, False, _config)
    return out


def normed_product_plain(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """normed_product in plain torch."""
    return _product(F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias).to(out_dtype or x.dtype)


def gated_product(
    x: Tensor,  # [T, in]
    norm: Tensor,  # [in]
    eps: float,
    weight: Tensor,  # [in, 2 n]: gate, then up
    bias: Tensor | None,  # [2 n]
    *,
    _config: Config | None = None,
) -> Tensor:  # [T, n]
    """silu(gate) * up with gate, up = the halves of rms_norm(x) @ W (plus the bias); float32 until the end."""
    if len(x) > MAX_ROWS:
        return gated_product_plain(x, norm, eps, weight, bias)
    out = torch.empty(len(x), weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch_normed(x, norm, eps, weight, bias, out, True, _config)
    return out


def gated_product_plain(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gated_product in plain torch."""
    gate, up = _product(F.rms_norm(x, x.shape[-1:], norm, eps), weight, bias).chunk(2, -1)
    return F.silu(gate).mul_(up)


def add_product(
    x: Tensor,  # [T, out]
    y: Tensor,  # [T, in]
    weight: Tensor,  # [in, out]
    bias: Tensor | None,  # [out]
    arrived: Tensor | None = None,  # [N_COUNTERS] int32, see `counters`
    *,
    _config: Config | None = None,
) -> Tensor:  # [T, out]
    """x + y @ W, plus the bias if there is one, rounded once.

    Programs that share a tile's k leave partial sums in float32. With `arrived` the last of them adds them up, without
    it a second kernel does; both in the same order.
    """
    if len(x) > MAX_ROWS:
        return add_product_plain(x, y, weight, bias)
    n_rows, (n_in, n_out) = len(x), weight.shape
    _check(y, weight)
    assert x.shape == (n_rows, n_out), (x.shape, n_rows, n_out)
    assert x.stride(1) == 1, x.stride()
    cut = _config or config(n_in, n_out, weight.dtype, may_split=True)
    per_split = _ceil(_ceil(n_in, cut.block_k), cut.split) * cut.block_k
    n_split = _ceil(n_in, per_split)
    block_t = _block_t(n_rows)
    tiles, row_tiles = _ceil(n_out, cut.block_n), _ceil(n_rows, block_t)
    assert arrived is None or tiles * row_tiles <= len(arrived), (tiles, row_tiles)
    out = torch.empty(n_rows, n_out, dtype=x.dtype, device=x.device)
    partial = torch.empty(n_split, n_rows, n_out, dtype=torch.float32, device=x.device) if n_split > 1 else out
    given = (x, bias if bias is not None else x, out, partial)
    flags = {"BLOCK_T": block_t, "BLOCK_N": cut.block_n, "SPLIT": n_split, "HAS_BIAS": bias is not None}
    _add_kernel[(tiles, n_split, row_tiles)](
        *given, y, weight, arrived if arrived is not None else out,
        n_rows, n_in, n_out, per_split, x.stride(0), y.stride(0), weight.stride(1),
        BLOCK_K=cut.block_k, EVEN_K=n_in % cut.block_k == 0, WIDEN=x.is_cpu, BY_LAST=arrived is not None, **flags,
        num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if n_split > 1 and arrived is None:
        _sum_kernel[(tiles, row_tiles)](*given, n_rows, n_out, x.stride(0), **flags, enable_fp_fusion=False)
    return out


def add_product_plain(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, arrived: Tensor | None = None
) -> Tensor:
    """add_product in plain torch."""
    return torch.addmm(x if bias is None else x + bias, y, weight)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _block_t(n_rows: int) -> int:
    """The narrowest right operand that holds the rows."""
    return min(ROW_TILE, max(LEAST_ROWS, 1 << (n_rows - 1).bit_length()))


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.shape[1] == weight.shape[0], (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    assert weight.stride(0) == 1, f"a weight must lie in memory as [out, in], its strides are {weight.stride()}"
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)


def _launch_normed(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    is_gated: bool,
    cut: Config | None,
) -> None:
    n_rows, (n_in, n_out) = len(x), weight.shape
    _check(x, weight)
    assert norm.shape == (n_in,), (norm.shape, n_in)
    assert norm.is_contiguous()
    cut = cut or config(n_in, n_out, weight.dtype)
    block_t = _block_t(n_rows)
    _normed_kernel[(_ceil(n_out, cut.block_n), _ceil(n_rows, block_t))](
        x, norm, weight, bias if bias is not None else x, out,
        n_rows, n_in, n_out, x.stride(0), weight.stride(1), eps,
        BLOCK_T=block_t, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, IS_GATED=is_gated, HAS_BIAS=bias is not None,
        EVEN_K=n_in % cut.block_k == 0, WIDEN=x.is_cpu, FOLDS=cut.block_k.bit_length() - 4,  # 2^(3 + FOLDS) = BLOCK_K
        num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _load_weights(places, k, n_in, EVEN_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight, zero beyond k: read once, so not to be kept."""
    if EVEN_K:
        tile = tl.load(places, eviction_policy="evict_first")
    else:
        tile = tl.load(places, mask=(k < n_in)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_rows(places, k, n_in, is_row, EVEN_K: tl.constexpr):
    """A tile [BLOCK_T, BLOCK_K] of the input, zero beyond rows and k: every program reads it."""
    if EVEN_K:
        tile = tl.load(places, mask=is_row, other=0.0, eviction_policy="evict_last")
    else:
        tile = tl.load(places, mask=is_row & (k < n_in)[None, :], other=0.0, eviction_policy="evict_last")
    return tile


@triton.jit
def _dot(w, a, acc, WIDEN: tl.constexpr):  # [BLOCK_N, BLOCK_K], [BLOCK_T, BLOCK_K], [BLOCK_N, BLOCK_T]
    """acc + w @ a'; WIDEN: through float32, since Triton's interpreter has no bfloat16 products."""
    if WIDEN:
        w, a = w.to(tl.float32), a.to(tl.float32)
    return tl.dot(w, tl.trans(a), acc, input_precision="ieee")


@triton.jit
def _fold(a, BLOCK_T: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr):
    """[BLOCK_T, WIDTH] -> [BLOCK_T, WIDTH >> TIMES]: sums of neighbours, the same whatever the layout."""
    for i in tl.static_range(TIMES):
        a = tl.sum(tl.reshape(a, (BLOCK_T, WIDTH >> (i + 1), 2)), axis=2)
    return a


@triton.jit(do_not_specialize=["n_rows"])
def _normed_kernel(
    x, norm, weight, bias, out, n_rows, n_in, n_out, x_stride, weight_stride, eps,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory times BLOCK_T rows of x."""
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_N)
    # Beyond the edge the last row is read again and its result not stored: a full tile needs no mask.
    if IS_GATED:  # rows 2j and 2j + 1 of the tile are the gate and the up of one output
        n_out = n_out // 2
        rows = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + i // 2, n_out - 1) + (i % 2) * n_out
    else:
        rows = tl.minimum(tl.program_id(0) * BLOCK_N + i, n_out - 1)
    k = tl.arange(0, BLOCK_K)
    weights = weight + rows.to(tl.int64)[:, None] * weight_stride + k[None, :]
    xs = x + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    is_row = (t < n_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K >> 3), tl.float32)  # eight neighbours, one thread's load, as one
    scale = tl.load(norm + k, mask=k < n_in, other=0.0, eviction_policy="evict_last")
    for start in range(0, n_in, BLOCK_K):
        w = _load_weights(weights + start, start + k, n_in, EVEN_K)  # [BLOCK_N, BLOCK_K]
        a = _load_rows(xs + start, start + k, n_in, is_row, EVEN_K).to(tl.float32)  # [BLOCK_T, BLOCK_K]
        scaled = (a * scale.to(tl.float32)[None, :]).to(weight.dtype.element_ty)
        acc = _dot(w, scaled, acc, WIDEN)
        squares += _fold(a * a, BLOCK_T, BLOCK_K, 3)
        after = start + BLOCK_K + k  # too narrow for the compiler to fetch it ahead as it does the tiles
        scale = tl.load(norm + after, mask=after < n_in, other=0.0, eviction_policy="evict_last")
    total = _fold(squares, BLOCK_T, BLOCK_K >> 3, FOLDS)  # [BLOCK_T, 1]
    rms = tl.reshape(tl.sqrt_rn(total / n_in + eps), (1, BLOCK_T))
    acc = tl.div_rn(acc, tl.broadcast_to(rms, (BLOCK_N, BLOCK_T)))
    if HAS_BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[:, None]
    if IS_GATED:
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_T)), (0, 2, 1))
        gate, up = tl.split(pairs)  # [BLOCK_N / 2, BLOCK_T] each
        acc = gate * tl.sigmoid(gate) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        n = tl.program_id(0) * BLOCK_N + i
    places = out + t.to(tl.int64)[None, :] * n_out + n[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(n < n_out)[:, None] & (t < n_rows)[None, :])


@triton.jit
def _finish(x, bias, out, total, t, n, inside, n_out, x_stride, HAS_BIAS: tl.constexpr):
    """out = x + total (+ bias); total and inside are [BLOCK_N, BLOCK_T]."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[:, None]
    rows = t.to(tl.int64)[None, :]
    total += tl.load(x + rows * x_stride + n[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows * n_out + n[:, None], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_parts(partial, t, n, inside, n_rows, n_out, SPLIT: tl.constexpr):
    """The partial sums of a tile, first to last; past the first-level cache, where other programs' writes are not."""
    places = partial + t[None, :] * n_out + n[:, None]
    total = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
    for s in tl.static_range(1, SPLIT):
        total += tl.load(places + s * n_rows * n_out, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["n_rows"])
def _add_kernel(
    x, bias, out, partial, y, weight, arrived, n_rows, n_in, n_out, per_split, x_stride, y_stride,
    weight_stride,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, BY_LAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory times BLOCK_T rows of y, over its share of k."""
    part = tl.program_id(1)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.minimum(n, n_out - 1)  # beyond the edge the last row is read again and its result not stored
    weights = weight + rows.to(tl.int64)[:, None] * weight_stride + k[None, :]
    ys = y + t.to(tl.int64)[:, None] * y_stride + k[None, :]
    is_row = (t < n_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(part * per_split, tl.minimum((part + 1) * per_split, n_in), BLOCK_K):
        w = _load_weights(weights + start, start + k, n_in, EVEN_K)
        a = _load_rows(ys + start, start + k, n_in, is_row, EVEN_K)
        acc = _dot(w, a, acc, WIDEN)
    inside = (n < n_out)[:, None] & (t < n_rows)[None, :]
    if SPLIT == 1:
        _finish(x, bias, out, acc, t, n, inside, n_out, x_stride, HAS_BIAS)
    else:
        tl.store(partial + (part * n_rows + t)[None, :] * n_out + n[:, None], acc, mask=inside)
        if BY_LAST:
            # Every thread's part is written before one of them counts it; who counts last sees them all.
            tl.debug_barrier()
            counter = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
                tl.store(counter, 0)
                total = _sum_parts(partial, t, n, inside, n_rows, n_out, SPLIT)
                _finish(x, bias, out, total, t, n, inside, n_out, x_stride, HAS_BIAS)


@triton.jit(do_not_specialize=["n_rows"])
def _sum_kernel(
    x, bias, out, partial, n_rows, n_out, x_stride,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: adds up the partial sums of one tile."""
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < n_out)[:, None] & (t < n_rows)[None, :]
    total = _sum_parts(partial, t, n, inside, n_rows, n_out, SPLIT)
    _finish(x, bias, out, total, t, n, inside, n_out, x_stride, HAS_BIAS)
