"""Matrix products of few rows, bound by reading the weight once: norm, gate and residual are fused into them.

A weight has shape [in, out], and memory order [out, in] (`weight.stride() == (1, in)`).

RMSNorm is split between two products. The product that writes the residual stream x also stores x * norm, and the sums
of x^2 of its tile. The product that reads it multiplies x * norm by the weight and divides the result by the rms.

Invariant: row i of a result is a function of row i of the input, bit for bit, regardless of the other rows and of
their number up to MAX_ROWS. So all parameters that order a sum (`config`) depend only on the weight's shape and dtype,
and on the device:

* the weight is the left operand of the dot, [BLOCK_N, BLOCK_K] @ [BLOCK_K, BLOCK_T]: more rows only widen the right
  operand, which changes neither the instruction nor the order of the sum over k;
* programs that split a tile's k store partial sums, and the last program to finish adds them in order;
* sums of squares are added in pairs, and a + b = b + a, so the compiler's layout for more rows does not matter;
* floating-point contraction is off: whether a product and a sum are fused may also depend on the layout.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from saguaro.kernels import launch, rotary, short
from saguaro.kernels.launch import follow, let_next_start, wait_for_previous
from saguaro.kernels.short import Short
from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, KVWrite, QKNormRope, Residual, added

MAX_ROWS = 64  # above it torch is used: many rows are bound by arithmetic
LEAST_ROWS = 16  # narrowest right operand
ROW_TILE = 64  # widest right operand: more rows are more programs, which find the weight in the cache
N_COUNTERS = 4096  # most tiles of a product with split k
PER_MULTIPROCESSOR = 2  # concurrent programs
BLOCKS = 24  # k blocks per program, about: fewer merge too often, more finish too far apart
MOST_SPLIT = 8
# Most shared memory of a program: half of a Hopper's, so that a second program (maybe of the next kernel) fits.
SHARED_BYTES = 112 * 1024
BEGIN_WARPS = 8


class Config(NamedTuple):
    """The tiling of a product: a function of weight shape, dtype and device, never of the number of rows."""

    block_n: int  # rows of [out, in] memory per program; gate and up rows together
    block_k: int
    split: int  # programs among which a tile's k is split
    warps: int
    stages: int  # pipeline stages of the loop over k, if shared memory suffices


@cache
def config(n_in: int, n_out: int, dtype: torch.dtype, n_multiprocessors: int) -> Config:
    """The configuration of a weight.

    >>> config(5120, 51200, torch.bfloat16, 132), config(25600, 5120, torch.bfloat16, 132).split
    (Config(block_n=128, block_k=128, split=1, warps=8, stages=3), 8)
    """
    n_programs = PER_MULTIPROCESSOR * n_multiprocessors
    if dtype == torch.float32:  # no tensor cores: operands are in registers
        cut = Config(block_n=32, block_k=32, split=1, warps=4, stages=2)
    elif 128 * n_programs <= n_out < 512 * n_programs:
        return Config(block_n=128, block_k=128, split=1, warps=8, stages=3)
    elif 32 * n_programs <= n_out < 512 * n_programs:
        return Config(block_n=64, block_k=64, split=1, warps=4, stages=6)
    else:
        cut = Config(block_n=64, block_k=128, split=1, warps=4, stages=3 if n_in >= 4096 else 4)
    n_tiles, n_blocks = _ceil(n_out, cut.block_n), _ceil(n_in, cut.block_k)
    n_parts = 1 if n_tiles >= n_programs else max(_ceil(n_multiprocessors, n_tiles), round(n_blocks / BLOCKS))
    return cut._replace(split=max(1, min(n_parts, MOST_SPLIT, n_blocks // 2)))


def choose(n_in: int, n_out: int, dtype: torch.dtype, n_multiprocessors: int) -> Config | Short:
    """The tiling for a weight: small weights are held in registers, larger ones read by a loop."""
    return short.short(n_in, n_out, dtype) or config(n_in, n_out, dtype, n_multiprocessors)


def choose_on(device: torch.device) -> Callable[[int, int, torch.dtype], Config | Short]:
    """`choose` for a CUDA device."""
    return partial(choose, n_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)


class Scaled(NamedTuple):
    """The residual stream x for its reader: norm(x) = x_scaled / sqrt(sum of squares / D + eps)."""

    x_scaled: Tensor  # [T, D]: x * norm
    squares: Tensor  # [T, n_parts] float32: partial sums of x^2
    eps: float


class TritonProducts:
    """See saguaro.model.products.Products; COMPOSED is the twin, and is used above MAX_ROWS.

    Use one per stream: concurrent products must not share the counters.
    """

    def __init__(self, device: torch.device, choose: Callable[[int, int, torch.dtype], Config | Short]) -> None:
        """choose: the tiling of a weight, such as choose_on(device)."""
        self._arrived = torch.zeros(N_COUNTERS, dtype=torch.int32, device=device)  # zero before and after each call
        self._choose = choose

    def begin(self, x: Tensor, norm: nn.Module) -> Residual:
        """See Products."""
        if len(x) > MAX_ROWS or type(norm) is not Norm:
            return Residual(x, norm)
        n_rows, n = x.shape
        weight = norm.weight
        assert x.stride(1) == weight.stride(0) == 1, (x.stride(), weight.stride())
        assert weight.shape == (n,), (weight.shape, n)
        scaled = torch.empty(n_rows, n, dtype=x.dtype, device=x.device)
        squares = torch.empty(n_rows, 1, dtype=torch.float32, device=x.device)
        _begin_kernel[(n_rows,)](
            x, weight, scaled, squares, n, x.stride(0), BLOCK=triton.next_power_of_2(n),
            num_warps=BEGIN_WARPS, enable_fp_fusion=False, **launch.early(x.device),
        )  # fmt: skip
        return Residual(x, norm, Scaled(scaled, squares, norm.eps))

    def read(self, stream: Residual, linear: nn.Module, out_dtype: torch.dtype) -> Tensor:
        """See Products: sums are in float32."""
        if stream.fused is None or not _is_plain(linear):
            return COMPOSED.read(stream, linear, out_dtype)
        return self._read(stream.fused, linear.weight, linear.bias, out_dtype, is_gated=False)

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """See Products: one kernel for a small weight without per-head norms, else two; both give the same bits."""
        n_rows, d = len(stream.x), place.memory.shape[2]
        if stream.fused is not None and turn.q_norm is None and d % short.BLOCK_N == 0 and _is_plain(linear):
            (a, squares, eps), weight = stream.fused, linear.weight
            chosen = self._choose(weight.shape[0], weight.shape[1], weight.dtype)
            if isinstance(chosen, Short):
                self._check(a, weight)
                return short.read_heads(a, squares, eps, weight, linear.bias, chosen, turn, place)
        heads = self.read(stream, linear, stream.x.dtype).view(n_rows, -1, d)
        return rotary.turn_and_store(heads, *turn.norms, turn.cos, turn.sin, place.memory, place.kv_index)

    def read_gated(self, stream: Residual, linear: nn.Module) -> Tensor:
        """See Products: gate and up are in float32."""
        if stream.fused is None or not _is_plain(linear):
            return COMPOSED.read_gated(stream, linear)
        return self._read(stream.fused, linear.weight, linear.bias, stream.x.dtype, is_gated=True)

    def write(self, stream: Residual, y: Tensor, linear: nn.Module, norm: nn.Module) -> Residual:
        """See Products: the sum is rounded once; x * norm and the squares are computed from the rounded sum."""
        x = stream.x
        if len(x) > MAX_ROWS or type(norm) is not Norm or not _is_plain(linear):
            return self.begin(added(x, y, linear), norm)
        weight, bias, by, eps = linear.weight, linear.bias, norm.weight, norm.eps
        self._check(y, weight)
        n_in, n_out = weight.shape
        chosen = self._choose(n_in, n_out, weight.dtype)
        assert x.shape == (len(y), n_out), (x.shape, y.shape, weight.shape)
        assert x.stride(1) == by.stride(0) == 1, (x.stride(), by.stride())
        assert by.shape == (n_out,), (by.shape, n_out)
        if isinstance(chosen, Short):
            new, scaled, squares = short.write(x, y, weight, bias, by, chosen)
            return Residual(new, norm, Scaled(scaled, squares, eps))
        cut = _Cut.of(chosen, len(y), n_in, n_out)
        out, scaled = (torch.empty(len(x), n_out, dtype=x.dtype, device=x.device) for _ in range(2))
        squares = torch.empty(len(x), cut.n_tiles, dtype=torch.float32, device=x.device)
        _write_kernel[cut.grid](
            y, weight, bias if bias is not None else by, x, by, out, scaled, squares, cut.workspace(x.device),
            self._arrived, *y.shape, n_out, cut.per_split, y.stride(0), weight.stride(1), x.stride(0),
            FOLDS=_log2(cut.config.block_n), HAS_BIAS=bias is not None, **cut.keywords(y),
        )  # fmt: skip
        return Residual(out, norm, Scaled(scaled, squares, eps))

    def _read(
        self, read: Scaled, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, is_gated: bool
    ) -> Tensor:
        a, squares, eps = read
        self._check(a, weight)
        (n_in, n_out), n_parts = weight.shape, squares.shape[1]
        chosen = self._choose(n_in, n_out, weight.dtype)
        if isinstance(chosen, Short):
            return short.read(a, squares, eps, weight, bias, chosen, out_dtype, is_gated)
        cut = _Cut.of(chosen, len(a), n_in, n_out)
        padded = triton.next_power_of_2(n_parts)
        out = torch.empty(len(a), n_out // 2 if is_gated else n_out, dtype=out_dtype, device=a.device)
        _read_kernel[cut.grid](
            a, weight, bias if bias is not None else a, squares, out, cut.workspace(a.device),
            self._arrived, *a.shape, n_out, cut.per_split, a.stride(0), weight.stride(1), n_parts, eps,
            PARTS=padded, FOLDS=_log2(padded), IS_GATED=is_gated, HAS_BIAS=bias is not None, **cut.keywords(a),
        )  # fmt: skip
        return out

    def _check(self, a: Tensor, weight: Tensor) -> None:
        assert a.shape[1] == weight.shape[0], (a.shape, weight.shape)
        assert a.stride(1) == 1, a.stride()
        assert weight.stride(0) == 1, f"a weight must lie in memory as [out, in], its strides are {weight.stride()}"
        assert a.dtype == weight.dtype, (a.dtype, weight.dtype)


class _Plain(Protocol):
    weight: Tensor
    bias: Tensor | None


def _is_plain(linear: nn.Module) -> TypeGuard[_Plain]:
    """Whether this is a plain Linear with a plain weight."""
    return type(linear) is Linear and isinstance(linear.weight, Tensor)


class _Cut(NamedTuple):
    """A configuration for a number of rows."""

    config: Config
    block_t: int
    n_tiles: int
    n_row_tiles: int
    n_split: int  # parts of k that are not empty
    per_split: int  # of k

    @classmethod
    def of(cls, chosen: Config, n_rows: int, n_in: int, n_out: int) -> "_Cut":
        """per_split does not depend on the number of rows."""
        block_t = min(ROW_TILE, max(LEAST_ROWS, triton.next_power_of_2(n_rows)))
        per_split = _ceil(_ceil(n_in, chosen.block_k), chosen.split) * chosen.block_k
        n_tiles, n_row_tiles = _ceil(n_out, chosen.block_n), _ceil(n_rows, block_t)
        n_split = _ceil(n_in, per_split)
        assert n_split == 1 or n_tiles * n_row_tiles <= N_COUNTERS, (n_tiles, n_row_tiles)
        return cls(chosen, block_t, n_tiles, n_row_tiles, n_split, per_split)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs that read the same weights are adjacent; so are those that split one tile."""
        return self.n_row_tiles, self.n_split, self.n_tiles

    def workspace(self, device: torch.device) -> Tensor:
        """Memory for partial sums, tile by tile."""
        parts = self.n_tiles * self.n_row_tiles * self.n_split if self.n_split > 1 else 0
        return torch.empty(parts * self.config.block_n * self.block_t, dtype=torch.float32, device=device)

    def keywords(self, a: Tensor) -> dict[str, Any]:
        """Keyword arguments of both kernels."""
        chosen, size = self.config, a.element_size()
        stage_bytes = (chosen.block_n + self.block_t) * chosen.block_k * size
        return {
            "BLOCK_T": self.block_t,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "SPLIT": self.n_split,
            "EVEN_K": a.shape[1] % chosen.block_k == 0,
            "WIDEN": a.is_cpu,
            "num_warps": chosen.warps,
            "num_stages": max(2, min(chosen.stages, _shared_bytes(a.device) // stage_bytes)),
            "enable_fp_fusion": False,
            **launch.early(a.device),
        }


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a program. It bounds the stages, which do not affect the order of sums."""
    if device.type != "cuda":
        return SHARED_BYTES
    most = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 * 1024)  # AMD: 64 KiB
    return min(SHARED_BYTES, int(most))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _log2(n: int) -> int:
    return n.bit_length() - 1


@triton.jit
def _load_weights(places, k, n_in, EVEN_K: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_K] of the weight, zero beyond k: read once, so evicted first."""
    if EVEN_K:
        tile = tl.load(places, eviction_policy="evict_first")
    else:
        tile = tl.load(places, mask=(k < n_in)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_rows(places, k, n_in, is_row, EVEN_K: tl.constexpr):
    """A tile [BLOCK_T, BLOCK_K] of the input, zero beyond rows and k: read by every program, so evicted last."""
    if EVEN_K:
        tile = tl.load(places, mask=is_row, other=0.0, eviction_policy="evict_last")
    else:
        tile = tl.load(places, mask=is_row & (k < n_in)[None, :], other=0.0, eviction_policy="evict_last")
    return tile


@triton.jit
def _dot(w, a, acc, WIDEN: tl.constexpr):  # [BLOCK_N, BLOCK_K], [BLOCK_T, BLOCK_K], [BLOCK_N, BLOCK_T]
    """acc + w @ a'; WIDEN: in float32, since Triton's interpreter has no bfloat16 products."""
    if WIDEN:
        w, a = w.to(tl.float32), a.to(tl.float32)
    return tl.dot(w, tl.trans(a), acc, input_precision="ieee")


@triton.jit
def _product(
    a, weights, t, from_k, to_k, n_rows, n_in, a_stride,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Rows of [out, in] memory times the rows t of a, over [from_k, to_k): [BLOCK_N, BLOCK_T]."""
    k = tl.arange(0, BLOCK_K)
    tiles = weights[:, None] + k[None, :]
    rows = a + t.to(tl.int64)[:, None] * a_stride + k[None, :]
    is_row = (t < n_rows)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(from_k, to_k, BLOCK_K):
        w = _load_weights(tiles + start, start + k, n_in, EVEN_K)
        acc = _dot(w, _load_rows(rows + start, start + k, n_in, is_row, EVEN_K), acc, WIDEN)
    return acc


@triton.jit
def _load_bias(bias, rows, HAS_BIAS: tl.constexpr):
    """[BLOCK_N]; without a bias, an unused value that costs nothing."""
    return tl.load(bias + rows) if HAS_BIAS else rows


@triton.jit
def _places(partial, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Addresses of the first part of this program's tile, n contiguous as in results; and the tile's number."""
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    first = partial + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_T)
    return first + tl.arange(0, BLOCK_N)[:, None] + tl.arange(0, BLOCK_T)[None, :] * BLOCK_N, tile


@triton.jit
def _is_last(acc, partial, arrived, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Store this program's partial sum; whether it is the last part of its tile."""
    places, tile = _places(partial, BLOCK_T, BLOCK_N, SPLIT)
    tl.store(places + tl.program_id(1) * (BLOCK_N * BLOCK_T), acc)
    tl.debug_barrier()  # all threads have written before one of them counts; the last to count sees all parts
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
    if is_last:
        tl.store(arrived + tile, 0)
    return is_last


@triton.jit
def _sum_parts(partial, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Sum a tile's parts in order. Loads bypass L1, which does not have other programs' writes."""
    places, _ = _places(partial, BLOCK_T, BLOCK_N, SPLIT)
    total = tl.load(places, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(places + part * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
    return total


@triton.jit
def _sum_columns(a, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FOLDS: tl.constexpr):
    """[HEIGHT, WIDTH] -> [1, WIDTH], 2^FOLDS = HEIGHT: pairwise sums, independent of the layout."""
    for i in tl.static_range(FOLDS):
        a = tl.sum(tl.reshape(a, (HEIGHT >> (i + 1), 2, WIDTH)), axis=1)
    return a


@triton.jit
def _begin_kernel(
    x, norm, scaled, squares, n, x_stride,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    follow(EARLY)
    by = tl.load(norm + i, mask=i < n, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(scaled + row * n + i, (value * by).to(scaled.dtype.element_ty), mask=i < n)
    tl.store(squares + row, tl.sum(value * value, axis=0))


@triton.jit(do_not_specialize=["n_rows"])
def _read_kernel(
    a, weight, bias, squares, out, partial, arrived,
    n_rows, n_in, n_out, per_split, a_stride, weight_stride, n_parts, eps,
    PARTS: tl.constexpr, FOLDS: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory times BLOCK_T rows of a, over its part of k."""
    let_next_start(EARLY)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_N)
    # Beyond the edge the last row is read again and its result is not stored: loads need no mask.
    if IS_GATED:  # rows 2j and 2j + 1 of the tile are the gate and the up of one output
        half = n_out // 2
        rows = tl.minimum(tl.program_id(2) * (BLOCK_N // 2) + i // 2, half - 1) + (i % 2) * half
    else:
        rows = tl.minimum(tl.program_id(2) * BLOCK_N + i, n_out - 1)
    weights = weight + rows.to(tl.int64) * weight_stride
    from_k = tl.program_id(1) * per_split
    wait_for_previous(EARLY)
    added = _load_bias(bias, rows, HAS_BIAS)  # operands of the epilogue load while the product runs
    part = tl.arange(0, PARTS)
    is_part = (part < n_parts)[:, None] & (t < n_rows)[None, :]
    parts = tl.load(squares + t[None, :] * n_parts + part[:, None], mask=is_part, other=0.0)
    acc = _product(
        a, weights, t, from_k, tl.minimum(from_k + per_split, n_in), n_rows, n_in, a_stride,
        BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, WIDEN,
    )  # fmt: skip
    if SPLIT == 1:
        _finish_read(
            acc, parts, added, t, out, n_rows, n_in, n_out, eps, PARTS, FOLDS, IS_GATED, HAS_BIAS, BLOCK_T, BLOCK_N
        )
    elif _is_last(acc, partial, arrived, BLOCK_T, BLOCK_N, SPLIT):
        acc = _sum_parts(partial, BLOCK_T, BLOCK_N, SPLIT)
        _finish_read(
            acc, parts, added, t, out, n_rows, n_in, n_out, eps, PARTS, FOLDS, IS_GATED, HAS_BIAS, BLOCK_T, BLOCK_N
        )


@triton.jit
def _finish_read(
    acc, parts, added, t, out, n_rows, n_in, n_out, eps,
    PARTS: tl.constexpr, FOLDS: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = acc / rms (+ bias), or silu(gate) * up of it."""
    total = _sum_columns(parts, PARTS, BLOCK_T, FOLDS)  # [1, BLOCK_T]
    rms = tl.sqrt_rn(total / n_in + eps)
    acc = tl.div_rn(acc, tl.broadcast_to(rms, (BLOCK_N, BLOCK_T)))
    if HAS_BIAS:
        acc += added.to(tl.float32)[:, None]
    if IS_GATED:
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_T)), (0, 2, 1))
        gate, up = tl.split(pairs)  # [BLOCK_N / 2, BLOCK_T] each
        acc = gate * tl.sigmoid(gate) * up
        n_out = n_out // 2
        n = tl.program_id(2) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = out + t.to(tl.int64)[None, :] * n_out + n[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(n < n_out)[:, None] & (t < n_rows)[None, :])


@triton.jit(do_not_specialize=["n_rows"])
def _write_kernel(
    y, weight, bias, x, norm, out, scaled, squares, partial, arrived,
    n_rows, n_in, n_out, per_split, y_stride, weight_stride, x_stride,
    FOLDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory times BLOCK_T rows of y, over its part of k."""
    let_next_start(EARLY)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, n_out - 1)  # beyond the edge the last row is read again; its result is not stored
    weights = weight + rows.to(tl.int64) * weight_stride
    from_k = tl.program_id(1) * per_split
    wait_for_previous(EARLY)
    added = _load_bias(bias, rows, HAS_BIAS)  # operands of the epilogue load while the product runs
    by = tl.load(norm + n, mask=n < n_out, other=0.0)
    inside = (n < n_out)[:, None] & (t < n_rows)[None, :]
    old = tl.load(x + t.to(tl.int64)[None, :] * x_stride + n[:, None], mask=inside, other=0.0)
    acc = _product(
        y, weights, t, from_k, tl.minimum(from_k + per_split, n_in), n_rows, n_in, y_stride,
        BLOCK_T, BLOCK_N, BLOCK_K, EVEN_K, WIDEN,
    )  # fmt: skip
    if SPLIT == 1:
        _finish_write(acc, old, added, by, n, t, out, scaled, squares, n_rows, n_out, FOLDS, HAS_BIAS, BLOCK_T, BLOCK_N)
    elif _is_last(acc, partial, arrived, BLOCK_T, BLOCK_N, SPLIT):
        acc = _sum_parts(partial, BLOCK_T, BLOCK_N, SPLIT)
        _finish_write(acc, old, added, by, n, t, out, scaled, squares, n_rows, n_out, FOLDS, HAS_BIAS, BLOCK_T, BLOCK_N)


@triton.jit
def _finish_write(
    acc, old, added, by, n, t, out, scaled, squares, n_rows, n_out,
    FOLDS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = old + acc (+ bias), rounded; from the rounded value: out * norm, and this tile's sums of squares."""
    if HAS_BIAS:
        acc += added.to(tl.float32)[:, None]
    new = (old.to(tl.float32) + acc).to(out.dtype.element_ty)
    is_row = (t < n_rows)[None, :]
    inside = (n < n_out)[:, None] & is_row
    rows = t.to(tl.int64)[None, :]
    tl.store(out + rows * n_out + n[:, None], new, mask=inside)
    wide = tl.where(inside, new.to(tl.float32), 0.0)
    scaled_new = (wide * by.to(tl.float32)[:, None]).to(scaled.dtype.element_ty)
    tl.store(scaled + rows * n_out + n[:, None], scaled_new, mask=inside)
    total = _sum_columns(wide * wide, BLOCK_N, BLOCK_T, FOLDS)  # [1, BLOCK_T]
    tl.store(squares + rows * tl.num_programs(2) + tl.program_id(2), total, mask=is_row)
