"""turn_and_store against its twin and against float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.kernels.rotary import turn_and_store, turn_and_store_plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest coordinate: one rounding, which in the interpreter is a truncation.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7}
SHAPES = [(16, 4, 2), (128, 16, 8), (24, 9, 3)]  # d, H, H_kv


def angles(n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, d] of random positions, as the model makes them."""
    angle = 6 * torch.rand(n, d // 2)
    cos, sin = angle.cos(), angle.sin()
    wide = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    return wide[0].to(DEVICE, dtype), wide[1].to(DEVICE, dtype)


def inputs(
    d: int, n_q: int, n_kv: int, dtype: torch.dtype, has_norm: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Heads of five tokens, and the norms' weights."""
    torch.manual_seed(d)
    heads = torch.randn(5, n_q + 2 * n_kv, d).to(DEVICE, dtype)
    if not has_norm:
        return heads, None, None
    return heads, (0.5 + torch.rand(d)).to(DEVICE, dtype), (0.5 + torch.rand(d)).to(DEVICE, dtype)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "n_q", "n_kv"), SHAPES)
def test_as_float64_and_as_the_twin(d: int, n_q: int, n_kv: int, dtype: torch.dtype, has_norm: bool) -> None:
    heads, q_norm, k_norm = inputs(d, n_q, n_kv, dtype, has_norm)
    cos, sin = angles(5, d, dtype)
    slots = torch.tensor([3, -1, 19, 0, 7], device=DEVICE)
    memory = torch.randn(20, 2 * n_kv, d).to(DEVICE, dtype)
    plain, exact = memory.clone(), memory.double()
    wide_q, wide_k = (None if norm is None else norm.double() for norm in (q_norm, k_norm))
    q_exact = turn_and_store_plain(heads.double(), wide_q, wide_k, 1e-6, cos.double(), sin.double(), exact, slots)
    q_plain = turn_and_store_plain(heads, q_norm, k_norm, 1e-6, cos, sin, plain, slots)
    q = turn_and_store(heads, q_norm, k_norm, 1e-6, cos, sin, memory, slots)
    bound = TOLERANCE[dtype] * float(q_exact.abs().max())
    assert q.shape == (5, n_q, d)
    assert float((q - q_exact).abs().max()) < bound
    assert float((memory - exact).abs().max()) < bound
    assert float((q_plain - q_exact).abs().max()) < 4 * bound
    assert torch.equal(memory[:, n_kv:], plain[:, n_kv:])  # values are copied, and a token without a slot is nowhere


def test_angles_may_be_wider_and_flatter() -> None:
    """float32 angles [T, d] beside bfloat16 heads."""
    heads, q_norm, k_norm = inputs(16, 4, 2, torch.bfloat16, True)
    cos, sin = angles(5, 16, torch.float32)
    slots = torch.arange(5, device=DEVICE)
    memory = torch.zeros(5, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    plain = memory.clone()
    q = turn_and_store(heads, q_norm, k_norm, 1e-6, cos[:, 0], sin[:, 0], memory, slots)
    expected = turn_and_store_plain(heads, q_norm, k_norm, 1e-6, cos[:, 0], sin[:, 0], plain, slots)
    assert torch.allclose(q.float(), expected.float(), rtol=2.0**-6, atol=2.0**-6)
    assert torch.allclose(memory.float(), plain.float(), rtol=2.0**-6, atol=2.0**-6)


def test_a_token_does_not_depend_on_the_others() -> None:
    heads, q_norm, k_norm = inputs(16, 4, 2, torch.bfloat16, True)
    cos, sin = angles(5, 16, torch.bfloat16)
    slots = torch.arange(5, device=DEVICE)
    memory = torch.zeros(5, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    alone = torch.zeros_like(memory)
    q = turn_and_store(heads, q_norm, k_norm, 1e-6, cos, sin, memory, slots)
    for i in range(5):
        one = slice(i, i + 1)
        turned = turn_and_store(heads[one], q_norm, k_norm, 1e-6, cos[one], sin[one], alone, slots[one])
        assert torch.equal(turned[0], q[i])
    assert torch.equal(alone, memory)
