"""Products of few rows with an e4m3 weight (saguaro.kernels.fp8): converted to the rows' dtype in registers.

A program multiplies BLOCK_N outputs by BLOCK_T rows over a part of k, group by group: the tensor cores' sum over a
group is multiplied by the scales of its outputs, in float32, and added. A second kernel adds the parts of k in order.

Invariant: as in saguaro.kernels.linear, the parameters that order a sum depend on the weight's shape and the device
alone: the weight is the left operand, and more rows only widen the right one.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.kernels.fp8 import GROUP, MAX_ROWS, n_groups

BLOCK_N = 64  # outputs per program
LEAST_ROWS = 16  # narrowest right operand
PER_MULTIPROCESSOR = 2  # concurrent programs
MOST_SPLIT = 8
FINISH = 512  # outputs per program that adds the parts
WARPS, STAGES = 4, 4


def multiply(x: Tensor, steps: Tensor, scales: Tensor, bias: Tensor | None, n_split: int | None = None) -> Tensor:
    """x @ W + bias: [T, in] -> [T, out]; multiply_plain is the twin. n_split: parts of k; None: as the device needs."""
    (n_rows, n_in), (n_out, _) = x.shape, steps.shape
    assert n_rows <= MAX_ROWS, n_rows
    assert x.stride(1) == 1, x.stride()
    assert steps.is_contiguous(), steps.stride()
    assert scales.is_contiguous(), scales.stride()
    if n_split is None:
        n_split = split_of(n_in, n_out, _n_multiprocessors(x.device))
    per_split = triton.cdiv(n_groups(n_in), n_split) * GROUP
    n_split = triton.cdiv(n_in, per_split)
    parts = torch.empty(n_split, n_rows, n_out, dtype=torch.float32, device=x.device)
    block_t = max(LEAST_ROWS, triton.next_power_of_2(n_rows))
    _product_kernel[(n_split, triton.cdiv(n_out, BLOCK_N))](
        x, steps, scales, parts, n_rows, n_in, n_out, per_split, x.stride(0),
        BLOCK_T=block_t, BLOCK_N=BLOCK_N, GROUP=GROUP, EVEN_K=n_in % GROUP == 0, WIDEN=x.is_cpu,
        num_warps=WARPS, num_stages=STAGES if x.element_size() == 2 else 2, enable_fp_fusion=False,
    )  # fmt: skip
    out = torch.empty(n_rows, n_out, dtype=x.dtype, device=x.device)
    _finish_kernel[(n_rows, triton.cdiv(n_out, FINISH))](
        parts, bias if bias is not None else parts, out, n_rows, n_out,
        SPLIT=n_split, HAS_BIAS=bias is not None, BLOCK=FINISH, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def split_of(n_in: int, n_out: int, n_multiprocessors: int) -> int:
    """Among how many programs the k of a tile is split.

    >>> split_of(5120, 51200, 132), split_of(25600, 5120, 132), split_of(256, 64, 132)
    (1, 4, 1)
    """
    n_tiles = -(-n_out // BLOCK_N)
    wanted = -(-PER_MULTIPROCESSOR * n_multiprocessors // n_tiles)
    return max(1, min(wanted, MOST_SPLIT, n_groups(n_in) // 2))


@cache
def _n_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["n_rows"])
def _product_kernel(
    x, steps, scales, parts, n_rows, n_in, n_out, per_split, x_stride,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of all rows, over its part of k."""
    t = tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(n, n_out - 1)  # beyond the edge the last output is computed again, and not stored
    k = tl.arange(0, GROUP)
    tiles = steps + outputs.to(tl.int64)[:, None] * n_in + k[None, :]
    rows = x + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    is_row = (t < n_rows)[:, None]
    from_k = tl.program_id(0) * per_split
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(from_k, tl.minimum(from_k + per_split, n_in), GROUP):
        if EVEN_K:
            w = tl.load(tiles + start, eviction_policy="evict_first")
            a = tl.load(rows + start, mask=is_row, other=0.0, eviction_policy="evict_last")
        else:
            is_k = (start + k < n_in)[None, :]
            w = tl.load(tiles + start, mask=is_k, other=0.0, eviction_policy="evict_first")
            a = tl.load(rows + start, mask=is_row & is_k, other=0.0, eviction_policy="evict_last")
        scale = tl.load(scales + start // GROUP * n_out + outputs)
        if WIDEN:  # Triton's interpreter has no bfloat16 products
            w, a = w.to(tl.float32), a.to(tl.float32)
        else:
            w = w.to(a.dtype)  # exact
        acc += tl.dot(w, tl.trans(a), input_precision="ieee") * scale[:, None]
    first = parts + (tl.program_id(0).to(tl.int64) * n_rows + t[None, :]) * n_out
    tl.store(first + n[:, None], acc, mask=(n < n_out)[:, None] & (t < n_rows)[None, :])


@triton.jit(do_not_specialize=["n_rows"])
def _finish_kernel(
    parts, bias, out, n_rows, n_out,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the sum of the parts of some outputs of a row, in order, plus the bias."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(parts + row * n_out + n, mask=n < n_out, other=0.0)
    for part in tl.static_range(1, SPLIT):
        total += tl.load(parts + (part * n_rows + row) * n_out + n, mask=n < n_out, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)
    tl.store(out + row * n_out + n, total.to(out.dtype.element_ty), mask=n < n_out)
