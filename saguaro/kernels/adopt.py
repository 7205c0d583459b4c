"""Adoption of a branch: copy its keys and values of all layers to the trunk's pages.

Invariant: other KV entries are unchanged; copies are exact.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # elements that a program copies at a time


def adopt(
    own: Tensor,  # [L, n_branches, n_own, 2 * H_kv, d], a view whose last two dimensions are contiguous
    branch: Tensor,  # [R] int64: the branch each row adopts; -1 for none
    memory: Tensor,  # [L, tokens, 2 * H_kv, d] contiguous
    kv_index: Tensor,  # [R, n] int64, n <= n_own: destination of each token; -1: not copied
) -> None:
    """memory[:, kv_index[r, t]] = own[:, branch[r], t]. Indices must be distinct."""
    branch = branch.contiguous()
    n_rows, n = kv_index.shape
    n_layers, width = len(own), own.shape[3] * own.shape[4]
    assert own[0, 0, 0].is_contiguous()
    assert memory.is_contiguous()
    assert n <= own.shape[2]
    if n_rows * n == 0:
        return
    _adopt_kernel[(n_layers, n_rows * n)](
        own, branch, memory, kv_index, own.stride(0), own.stride(1), own.stride(2), memory.stride(0),
        kv_index.stride(0), kv_index.stride(1), n,
        WIDTH=width, CHUNK=min(CHUNK, 1 << (width - 1).bit_length()), num_warps=4,
    )  # fmt: skip


def adopt_plain(own: Tensor, branch: Tensor, memory: Tensor, kv_index: Tensor) -> None:
    """The twin of `adopt`."""
    row, token = ((branch >= 0)[:, None] & (kv_index >= 0)).nonzero(as_tuple=True)
    memory[:, kv_index[row, token]] = own[:, branch[row], token]


@triton.jit(do_not_specialize=["n", "kv_index_row", "kv_index_token"])
def _adopt_kernel(
    own, branch, memory, kv_index, own_layer, own_branch, own_token, memory_layer, kv_index_row, kv_index_token, n,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One token of one row, in one layer."""
    layer = tl.program_id(0).to(tl.int64)
    row, token = tl.program_id(1) // n, tl.program_id(1) % n
    adopted = tl.load(branch + row).to(tl.int64)
    goes_to = tl.load(kv_index + row * kv_index_row + token * kv_index_token).to(tl.int64)
    if (adopted >= 0) & (goes_to >= 0):
        own += layer * own_layer + adopted * own_branch + token * own_token
        memory += layer * memory_layer + goes_to * WIDTH
        for first in range(0, WIDTH, CHUNK):
            at = first + tl.arange(0, CHUNK)
            is_inside = at < WIDTH
            tl.store(memory + at, tl.load(own + at, mask=is_inside), mask=is_inside)
