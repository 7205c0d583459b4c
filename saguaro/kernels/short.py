"""Products of few rows with a small weight, which is loaded before the rows are available.

A small model's step is bound by latency: each of its dependent products adds the end and start of a kernel, the first
loads and a merge. Here every program takes 16 rows of the [out, in] memory over all of k, loads them into registers
before it waits for the previous kernel, and needs no merge with other programs. Its warps split k:

    k        0 ---- 32 * STEPS ---- 64 * STEPS ---- ... ---- WARPS * 32 * STEPS ---- ...
    warp     |------- 0 -------|------- 1 -------| ... |---- WARPS - 1 ----|----- 0 -----| ...

Both operands are loaded directly into the registers of the tensor cores' layout. An instruction takes 16 columns:
columns 2q, 2q + 1, 2q + 8, 2q + 9 from thread q of four. Since a sum over k may have any order, thread q loads 8
consecutive columns at once and passes them as its columns of two instructions.

Invariant: row i of a result is a function of row i of the input, bit for bit, regardless of the other rows: rows are
computed ROW_TILE at a time, all tiles by the same instructions. The loop over tiles is unrolled: from Triton 3.7 on,
compilers keep values that live across a loop in shared memory, of which small GPUs have too little.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.kernels import launch
from saguaro.kernels.launch import let_next_start, wait_for_previous
from saguaro.model.products import KVWrite, QKNormRope

BLOCK_N = 16  # rows of [out, in] memory per program, gate and up rows together: the narrowest left operand
ROW_TILE = 8  # rows at a time: the narrowest right operand
STEP = 32  # columns per warp and step: four threads of VECTOR
VECTOR = 8  # columns per load of a thread
MOST_BYTES = 40e6  # of a weight: a larger one is bound by memory bandwidth, and read by a loop
MOST_OF_FOUR = 2048  # columns that fit the registers of four warps; more warps start and synchronise more slowly
MOST_HELD = 96 * 1024  # bytes of a weight that one program holds: less than half of a multiprocessor's registers


class Short(NamedTuple):
    """The tiling of a small weight: a function of its shape and dtype, never of the number of rows."""

    block_n: int  # rows of [out, in] memory per program; gate and up rows together
    warps: int
    steps: int  # per warp and chunk
    chunks: int

    @classmethod
    def of(cls, block_n: int, warps: int, n_in: int) -> "Short":
        """The tiling of all of k with the least padding."""
        cuts = [cls(block_n, warps, steps, -(-n_in // (warps * STEP * steps))) for steps in (4, 2, 1)]
        return min(cuts, key=lambda cut: cut.width)

    @property
    def width(self) -> int:
        """Columns, including the padding of the last chunk."""
        return self.chunks * self.warps * STEP * self.steps

    def n_tiles(self, n_out: int) -> int:
        """Programs."""
        return -(-n_out // self.block_n)


@cache
def short(n_in: int, n_out: int, dtype: torch.dtype) -> Short | None:
    """The tiling of a weight; None if it needs another kernel.

    >>> short(1024, 4096, torch.bfloat16), short(5120, 51200, torch.bfloat16)
    (Short(block_n=16, warps=4, steps=4, chunks=2), None)
    """
    if torch.version.hip or dtype.itemsize != 2 or n_in * n_out * dtype.itemsize > MOST_BYTES or n_in % VECTOR != 0:
        return None  # AMD's matrix cores have another layout: a conversion would go through shared memory
    cut = Short.of(BLOCK_N, 4 if n_in <= MOST_OF_FOUR else 8, n_in)
    return cut if cut.width * cut.block_n * dtype.itemsize <= MOST_HELD else None


def read(
    a: Tensor,  # [T, in]: x * norm
    squares: Tensor,  # [T, n_parts] float32: partial sums of x^2
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    cut: Short,
    out_dtype: torch.dtype,
    is_gated: bool,
) -> Tensor:
    """See saguaro.model.products.Products: read, and read_gated."""
    n_out, n_parts = weight.shape[1], squares.shape[1]
    out = torch.empty(len(a), n_out // 2 if is_gated else n_out, dtype=out_dtype, device=a.device)
    _read_kernel[(cut.n_tiles(n_out),)](
        a, weight, bias if bias is not None else a, squares, out, *a.shape, n_out, a.stride(0), weight.stride(1),
        n_parts, eps, PARTS=triton.next_power_of_2(n_parts), IS_GATED=is_gated, HAS_BIAS=bias is not None,
        **_keywords(a, cut),
    )  # fmt: skip
    return out


def read_heads(
    a: Tensor,  # [T, in]: x * norm
    squares: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    cut: Short,
    turn: QKNormRope,
    place: KVWrite,
) -> Tensor:  # [T, H, d]
    """See saguaro.model.products.Products. Heads are rounded before rope, as if they were stored in between."""
    (n_stored, d), n_parts = place.memory.shape[1:], squares.shape[1]
    n_out = weight.shape[1]
    n_queries = n_out // d - n_stored
    assert all(x.is_contiguous() for x in (place.memory, place.kv_index, turn.cos, turn.sin))
    assert turn.cos.numel() == turn.sin.numel() == len(a) * d, (turn.cos.shape, turn.sin.shape)
    q = torch.empty(len(a), n_queries, d, dtype=a.dtype, device=a.device)
    _heads_kernel[(cut.n_tiles(n_out),)](
        a, weight, bias if bias is not None else a, squares, turn.cos, turn.sin, place.memory, place.kv_index, q,
        *a.shape, a.stride(0), weight.stride(1), n_parts, eps, PARTS=triton.next_power_of_2(n_parts),
        N_QUERIES=n_queries, N_STORED=n_stored, HALF=d // 2, HAS_BIAS=bias is not None, **_keywords(a, cut),
    )  # fmt: skip
    return q


def write(
    x: Tensor,  # [T, out]: the residual stream
    y: Tensor,  # [T, in]
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor,  # [out]
    cut: Short,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new residual stream x; x * norm; and partial sums of x^2, [T, n_parts] float32."""
    n_out = weight.shape[1]
    out, scaled = (torch.empty(len(x), n_out, dtype=x.dtype, device=x.device) for _ in range(2))
    squares = torch.empty(len(x), cut.n_tiles(n_out), dtype=torch.float32, device=x.device)
    _write_kernel[(cut.n_tiles(n_out),)](
        y, weight, bias if bias is not None else norm, x, norm, out, scaled, squares, *y.shape, n_out,
        y.stride(0), weight.stride(1), x.stride(0), HAS_BIAS=bias is not None, **_keywords(y, cut),
    )  # fmt: skip
    return out, scaled, squares


def _keywords(a: Tensor, cut: Short) -> dict[str, Any]:
    """Keyword arguments of all kernels."""
    return {
        "BLOCK_T": ROW_TILE,
        "BLOCK_N": cut.block_n,
        "W": cut.warps,
        "STEPS": cut.steps,
        "CHUNKS": cut.chunks,
        "TILES": triton.next_power_of_2(triton.cdiv(len(a), ROW_TILE)),
        "EVEN_K": a.shape[1] == cut.width,
        "WIDEN": a.is_cpu,
        "num_warps": cut.warps,
        "num_stages": 1,
        "enable_fp_fusion": False,
        **launch.early(a.device),
    }


@triton.jit
def _hold(
    a, rows, is_row, stride, n_in,
    W: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr, EVEN_K: tl.constexpr, IS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Load rows [8, groups] of a, chunk by chunk: [4, 8, W, groups, STEPS, 8] each, zero beyond k and for missing rows.

    The shape follows threads, warps and registers: see _ordered.
    """
    quarter = tl.arange(0, 4)[:, None, None, None, None, None]
    warp = tl.arange(0, W)[None, None, :, None, None, None]
    step = tl.arange(0, STEPS)[None, None, None, None, :, None]
    first = (warp * STEPS + step) * 32 + quarter * 8
    places = a + rows.to(tl.int64)[None, :, None, :, None, None] * stride + first
    places = places + tl.arange(0, 8)[None, None, None, None, None, :]
    inside = is_row[None, :, None, :, None, None]
    held = ()
    for chunk in tl.static_range(CHUNKS):
        from_k = chunk * (W * STEPS * 32)
        is_column = first + from_k < n_in  # true for all 8 columns of a thread, or for none
        if not IS_WEIGHT:
            mask = inside if EVEN_K else inside & is_column
            tile = tl.load(places + from_k, mask=mask, other=0.0)
        elif EVEN_K:
            tile = tl.load(places + from_k, eviction_policy="evict_first")
        else:
            tile = tl.load(places + from_k, mask=is_column, other=0.0, eviction_policy="evict_first")
        held = held + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def _ordered(tile, GROUPS: tl.constexpr, STEPS: tl.constexpr, W: tl.constexpr):
    """A chunk as matrices [W, 8 * GROUPS, 32 * STEPS], one per warp, with permuted columns."""
    tile = tl.reshape(tile, (4, 8, W, GROUPS, STEPS, 2, 2, 2))
    tile = tl.permute(tile, (2, 3, 1, 4, 5, 6, 0, 7))
    return tl.reshape(tile, (W, 8 * GROUPS, 32 * STEPS))


@triton.jit
def _product(
    weights, rows,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The held weights times the held rows: [BLOCK_N, BLOCK_T]."""
    acc = tl.zeros((W, BLOCK_N, BLOCK_T), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        w = _ordered(weights[chunk], BLOCK_N // 8, STEPS, W)
        a = tl.permute(_ordered(rows[chunk], BLOCK_T // 8, STEPS, W), (0, 2, 1))
        if WIDEN:  # Triton's interpreter has no bfloat16 products
            w, a = w.to(tl.float32), a.to(tl.float32)
        acc = tl.dot(w, a, acc, input_precision="ieee")
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=["n_rows"])
def _read_kernel(
    a, weight, bias, squares, out, n_rows, n_in, n_out, a_stride, weight_stride, n_parts, eps,
    PARTS: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
    TILES: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory, times all rows of a."""
    let_next_start(EARLY)
    HALF: tl.constexpr = BLOCK_N // 2
    i = tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK_N // 8)[None, :] * 8
    # Beyond the edge the last row is read again; its result is not stored.
    if IS_GATED:  # the first half of the tile's rows is gate, the second half is up
        rows = tl.minimum(tl.program_id(0) * HALF + i % HALF, n_out // 2 - 1) + i // HALF * (n_out // 2)
    else:
        rows = tl.minimum(tl.program_id(0) * BLOCK_N + i, n_out - 1)
    weights = _hold(weight, rows, rows >= 0, weight_stride, n_in, W, STEPS, CHUNKS, EVEN_K, True)
    wait_for_previous(EARLY)
    part = tl.arange(0, PARTS)[:, None]
    for tile in tl.static_range(TILES):
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        is_row = (t < n_rows)[None, :]
        held = _hold(a, t[:, None], (t < n_rows)[:, None], a_stride, n_in, W, STEPS, CHUNKS, EVEN_K, False)
        sums = tl.load(squares + t[None, :] * n_parts + part, mask=is_row & (part < n_parts), other=0.0)
        acc = _product(weights, held, BLOCK_T, BLOCK_N, W, STEPS, CHUNKS, WIDEN)
        rms = tl.sqrt_rn(tl.sum(sums, axis=0) / n_in + eps)
        acc = tl.div_rn(acc, tl.broadcast_to(rms[None, :], (BLOCK_N, BLOCK_T)))
        if HAS_BIAS:
            added = tl.load(bias + tl.reshape(tl.trans(rows), (BLOCK_N,)))
            acc += added.to(tl.float32)[:, None]
        if IS_GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_T)), (1, 2, 0)))  # [HALF, BLOCK_T] each
            result = gate * tl.sigmoid(gate) * up
            width = n_out // 2
            n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        else:
            result = acc
            width = n_out
            n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        places = out + t.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(places, result.to(out.dtype.element_ty), mask=is_row & (n < width)[:, None])


@triton.jit(do_not_specialize=["n_rows"])
def _heads_kernel(
    a, weight, bias, squares, cos, sin, memory, kv_index, q, n_rows, n_in, a_stride, weight_stride, n_parts, eps,
    PARTS: tl.constexpr, N_QUERIES: tl.constexpr, N_STORED: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
    TILES: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N / 2 pairs of coordinates of one head that rope rotates together, for all rows of a."""
    let_next_start(EARLY)
    PAIRS: tl.constexpr = BLOCK_N // 2
    head = tl.program_id(0) * PAIRS // HALF
    first_dim = tl.program_id(0) * PAIRS % HALF
    i = tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK_N // 8)[None, :] * 8
    rows = head * (2 * HALF) + first_dim + i % PAIRS + i // PAIRS * HALF
    weights = _hold(weight, rows, rows >= 0, weight_stride, n_in, W, STEPS, CHUNKS, EVEN_K, True)
    wait_for_previous(EARLY)
    part = tl.arange(0, PARTS)[:, None]
    dims = first_dim + tl.arange(0, PAIRS)[:, None]
    is_turned = head < N_QUERIES + N_STORED // 2
    for tile in tl.static_range(TILES):
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        is_row = (t < n_rows)[None, :]
        at = t.to(tl.int64)[None, :]
        held = _hold(a, t[:, None], (t < n_rows)[:, None], a_stride, n_in, W, STEPS, CHUNKS, EVEN_K, False)
        sums = tl.load(squares + t[None, :] * n_parts + part, mask=is_row & (part < n_parts), other=0.0)
        angle = at * (2 * HALF) + dims
        turns = is_row & is_turned
        cos_a = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        cos_b = tl.load(cos + angle + HALF, mask=turns, other=1.0).to(tl.float32)
        sin_a = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + angle + HALF, mask=turns, other=0.0).to(tl.float32)
        goes_to = tl.load(kv_index + at, mask=is_row, other=-1)
        acc = _product(weights, held, BLOCK_T, BLOCK_N, W, STEPS, CHUNKS, WIDEN)
        rms = tl.sqrt_rn(tl.sum(sums, axis=0) / n_in + eps)
        acc = tl.div_rn(acc, tl.broadcast_to(rms[None, :], (BLOCK_N, BLOCK_T)))
        if HAS_BIAS:
            added = tl.load(bias + tl.reshape(tl.trans(rows), (BLOCK_N,)))
            acc += added.to(tl.float32)[:, None]
        acc = acc.to(q.dtype.element_ty).to(tl.float32)
        x, y = tl.split(tl.permute(tl.reshape(acc, (2, PAIRS, BLOCK_T)), (1, 2, 0)))  # [PAIRS, BLOCK_T] each
        turned_x, turned_y = x * cos_a + y * sin_a, y * cos_b + x * sin_b
        to_q = q + (at * N_QUERIES + head) * (2 * HALF) + dims
        is_query = is_row & (head < N_QUERIES)
        tl.store(to_q, turned_x.to(q.dtype.element_ty), mask=is_query)
        tl.store(to_q + HALF, turned_y.to(q.dtype.element_ty), mask=is_query)
        to_memory = memory + (goes_to * N_STORED + head - N_QUERIES) * (2 * HALF) + dims
        is_stored = is_row & (head >= N_QUERIES) & (goes_to >= 0)
        tl.store(to_memory, turned_x.to(memory.dtype.element_ty), mask=is_stored)
        tl.store(to_memory + HALF, turned_y.to(memory.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["n_rows"])
def _write_kernel(
    y, weight, bias, x, norm, out, scaled, squares, n_rows, n_in, n_out, y_stride, weight_stride, x_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr, CHUNKS: tl.constexpr,
    TILES: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N rows of [out, in] memory, times all rows of y.

    The sum is rounded once; x * norm and the squares are computed from the rounded sum.
    """
    let_next_start(EARLY)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK_N // 8)[None, :] * 8
    # Beyond the edge the last row is read again; its result is not stored.
    rows = tl.minimum(tl.program_id(0) * BLOCK_N + i, n_out - 1)
    weights = _hold(weight, rows, rows >= 0, weight_stride, n_in, W, STEPS, CHUNKS, EVEN_K, True)
    by = tl.load(norm + n, mask=n < n_out, other=0.0).to(tl.float32)[:, None]
    wait_for_previous(EARLY)
    for tile in tl.static_range(TILES):
        t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        is_row = (t < n_rows)[None, :]
        inside = is_row & (n < n_out)[:, None]
        at = t.to(tl.int64)[None, :]
        held = _hold(y, t[:, None], (t < n_rows)[:, None], y_stride, n_in, W, STEPS, CHUNKS, EVEN_K, False)
        old = tl.load(x + at * x_stride + n[:, None], mask=inside, other=0.0).to(tl.float32)
        acc = _product(weights, held, BLOCK_T, BLOCK_N, W, STEPS, CHUNKS, WIDEN)
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[:, None]
        new = (old + acc).to(out.dtype.element_ty)
        tl.store(out + at * n_out + n[:, None], new, mask=inside)
        wide = tl.where(inside, new.to(tl.float32), 0.0)
        tl.store(scaled + at * n_out + n[:, None], (wide * by).to(scaled.dtype.element_ty), mask=inside)
        total = tl.sum(wide * wide, axis=0)
        tl.store(squares + t * tl.num_programs(0) + tl.program_id(0), total, mask=t < n_rows)
