"""Between projection and attention, one kernel: per-head norm, rope, and writing of keys and values.

Invariant: a token's result depends only on that token, bit for bit. All values are float32 until stored. The twin
rounds after the norm and after each step of the rotation, so results differ by a few units in the last place of the
dtype (2^-8 for bfloat16), relative to the two coordinates of a rotation.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from saguaro.kernels import launch
from saguaro.kernels.launch import follow
from saguaro.model.products import Composed, KVWrite, QKNormRope, Residual

GROUP = 8  # heads per program
N_WARPS = 4


def turn_and_store(
    heads: Tensor,  # [T, H + 2 * H_kv, d] contiguous: queries, keys, values as projected
    q_norm: Tensor | None,  # [d]
    k_norm: Tensor | None,  # [d]
    eps: float,
    cos: Tensor,  # [T, 1, d] or [T, d]
    sin: Tensor,  # [T, 1, d] or [T, d], negative on the first half
    memory: Tensor,  # [tokens, 2 * H_kv, d] contiguous, changed in place: keys, then values
    kv_index: Tensor,  # [T] int64: where each token's keys and values are written; -1: not written
) -> Tensor:  # [T, H, d]
    """Return the queries with rope; write the keys with rope, and the values, to memory."""
    n_tokens, n_heads, d = heads.shape
    n_stored = memory.shape[1]
    assert all(tensor.is_contiguous() for tensor in (heads, memory, cos, sin, kv_index))
    assert memory.shape[2] == d, (memory.shape, d)
    assert cos.numel() == sin.numel() == n_tokens * d, (cos.shape, sin.shape, heads.shape)
    assert (q_norm is None) == (k_norm is None)
    q = torch.empty(n_tokens, n_heads - n_stored, d, dtype=heads.dtype, device=heads.device)
    _turn_kernel[(n_tokens, triton.cdiv(n_heads, GROUP))](
        heads, q_norm if q_norm is not None else heads, k_norm if k_norm is not None else heads,
        cos, sin, memory, kv_index, q, eps,
        N_QUERIES=n_heads - n_stored, N_STORED=n_stored, HALF=d // 2, BLOCK=triton.next_power_of_2(d // 2),
        GROUP=GROUP, HAS_NORM=q_norm is not None, num_warps=N_WARPS, enable_fp_fusion=False,
        **launch.early(heads.device),
    )  # fmt: skip
    return q


def turn_and_store_plain(
    heads: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    memory: Tensor,
    kv_index: Tensor,
) -> Tensor:
    """The twin of `turn_and_store`."""
    n_tokens, n_heads, d = heads.shape
    n_stored = memory.shape[1]
    n_q, n_turned = n_heads - n_stored, n_heads - n_stored // 2
    turned, values = heads[:, :n_turned], heads[:, n_turned:]
    if q_norm is not None and k_norm is not None:
        q, k = turned[:, :n_q], turned[:, n_q:]
        turned = torch.cat((F.rms_norm(q, (d,), q_norm, eps), F.rms_norm(k, (d,), k_norm, eps)), 1)
    cos, sin = (angle.view(n_tokens, 1, d) for angle in (cos, sin))
    turned = (turned * cos).addcmul(turned.roll(d // 2, -1), sin).to(heads.dtype)
    kept = kv_index >= 0
    memory[kv_index[kept]] = torch.cat((turned[:, n_q:], values), 1)[kept].to(memory.dtype)
    return turned[:, :n_q].contiguous()


class PlainProducts(Composed):
    """Products in plain torch that allow a kv_index of -1: the twin of TritonProducts."""

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """See Products."""
        heads = self.read(stream, linear, stream.x.dtype).view(len(stream.x), -1, place.memory.shape[2])
        return turn_and_store_plain(heads, *turn.norms, turn.cos, turn.sin, place.memory, place.kv_index)


@triton.jit
def _load_row(row, dims, is_dim):
    """[BLOCK] -> [1, BLOCK] float32."""
    return tl.load(row + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _turn_kernel(
    heads, q_norm, k_norm, cos, sin, memory, kv_index, q, eps,
    N_QUERIES: tl.constexpr, N_STORED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: GROUP heads of one token, as two halves [GROUP, HALF]: the two coordinates of each rotation."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < HALF
    is_query = (head < N_QUERIES)[:, None]
    is_value = (head >= N_QUERIES + N_STORED // 2)[:, None]
    here = heads + (token * (N_QUERIES + N_STORED) + head)[:, None] * (2 * HALF) + dims[None, :]
    inside = (head < N_QUERIES + N_STORED)[:, None] & is_dim[None, :]
    follow(EARLY)
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + HALF, mask=inside, other=0.0).to(tl.float32)
    a, b = first, second
    if HAS_NORM:
        mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        for_q, for_k = _load_row(q_norm, dims, is_dim), _load_row(k_norm, dims, is_dim)
        a = first * scale * tl.where(is_query, for_q, for_k)
        for_q, for_k = _load_row(q_norm + HALF, dims, is_dim), _load_row(k_norm + HALF, dims, is_dim)
        b = second * scale * tl.where(is_query, for_q, for_k)
    angle = token * (2 * HALF) + dims
    cos_a, cos_b = _load_row(cos, angle, is_dim), _load_row(cos + HALF, angle, is_dim)
    sin_a, sin_b = _load_row(sin, angle, is_dim), _load_row(sin + HALF, angle, is_dim)
    turned_a = tl.where(is_value, first, a * cos_a + b * sin_a)
    turned_b = tl.where(is_value, second, b * cos_b + a * sin_b)
    to_q = q + (token * N_QUERIES + head)[:, None] * (2 * HALF) + dims[None, :]
    tl.store(to_q, turned_a.to(q.dtype.element_ty), mask=inside & is_query)
    tl.store(to_q + HALF, turned_b.to(q.dtype.element_ty), mask=inside & is_query)
    goes_to = tl.load(kv_index + token)
    is_stored = inside & (head >= N_QUERIES)[:, None] & (goes_to >= 0)
    to_memory = memory + (goes_to * N_STORED + head - N_QUERIES)[:, None] * (2 * HALF) + dims[None, :]
    tl.store(to_memory, turned_a.to(memory.dtype.element_ty), mask=is_stored)
    tl.store(to_memory + HALF, turned_b.to(memory.dtype.element_ty), mask=is_stored)
