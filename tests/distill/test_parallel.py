"""Whole texts with gradients: what the engine computes step by step, and slopes that are those of the loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from saguaro.attention.native import cpu_attention
from saguaro.attention.step import Segment, make_step
from saguaro.distill.parallel import Parallel, hidden_states
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.model.load import load
from saguaro.model.tiny import FAMILIES, write_tiny
from saguaro.model.transformer import Transformer

CPU = torch.device("cpu")
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}}
N_TEXTS, LENGTH = 3, 21
TOKENS = torch.randint(288, (N_TEXTS, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder, request.param, num_hidden_layers=3, **BIASES.get(request.param, {}))
    return load("tiny", folder, CPU, torch.float32).model


def by_the_engine(model: Transformer, tokens: Tensor) -> Tensor:  # [B, L] -> [B * L, D]
    """The engine's own path, in one step over paged memory."""
    n_pages = -(-LENGTH // 4)
    plan = KVPlan(n_pages * len(tokens), 4, model.spec.kv_bytes_per_token(torch.float32), 64)
    attention = cpu_attention(KVCache(plan, model.spec, CPU, torch.float32), model.spec)
    pages = [list(range(row * n_pages, (row + 1) * n_pages)) for row in range(len(tokens))]
    texts = zip(tokens.tolist(), pages, strict=True)
    layout = make_step([Segment(text, 0, own, n_wanted=LENGTH) for text, own in texts], 4, CPU)
    attention.plan(layout)
    found: Tensor = model(layout.tokens, layout.positions, attention)
    return found


def test_hidden_states_are_the_engines(model: Transformer) -> None:
    ours, theirs = hidden_states(model, TOKENS), by_the_engine(model, TOKENS)
    assert ours.std() > 0.5
    assert float((ours - theirs).abs().max() / ours.std()) < 1e-5


def test_what_pads_a_text_is_not_seen(model: Transformer) -> None:
    other = TOKENS.clone()
    other[1, 9:] = 0
    ours, padded = (hidden_states(model, tokens).view(N_TEXTS, LENGTH, -1) for tokens in (TOKENS, other))
    assert torch.allclose(ours[1, :9], padded[1, :9], atol=1e-6)
    assert torch.equal(ours[[0, 2]], padded[[0, 2]])
    assert not torch.allclose(ours[1, 9:], padded[1, 9:])


def test_gradients_are_those_of_finite_differences(model: Transformer) -> None:
    """Along a random direction of each weight, in float64: every kind of weight, and every layer."""
    twin = as_dtype(model, torch.float64)
    weights = {name: weight for name, weight in twin.named_parameters() if name != "embedding"}
    aim = torch.randn(N_TEXTS * LENGTH, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def value() -> Tensor:
        by, hidden = Parallel(N_TEXTS, twin.spec.softmax_scale), hidden_states(twin, TOKENS)
        logits = by.read(by.begin(hidden, twin.norm), twin.head, torch.float64)
        return (hidden * aim).sum() + logits.square().sum()

    for weight in weights.values():
        weight.requires_grad_(True)
    value().backward()
    for name, weight in weights.items():
        assert weight.grad is not None, name
        way = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        slope = float((weight.grad * way).sum())
        assert slope == pytest.approx(difference(weight, way, value), rel=1e-4), name
    assert not twin.embedding.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_rounds_and_keeps_gradients(model: Transformer, dtype: torch.dtype) -> None:
    """As on a GPU: weights of either kind, products in bfloat16, the stream in the weights' dtype."""
    twin, exact = as_dtype(model, dtype), hidden_states(model, TOKENS)
    weights = [weight for layer in twin.layers for weight in layer.parameters()]
    for weight in weights:
        weight.requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = hidden_states(twin, TOKENS)
    hidden.float().square().sum().backward()
    assert hidden.dtype == dtype
    assert float((hidden.detach() - exact).square().mean().sqrt() / exact.std()) < 0.1
    assert all(weight.grad is not None and weight.grad.dtype == dtype for weight in weights)


def test_logits_of_half_weights_are_not_rounded(model: Transformer) -> None:
    twin = as_dtype(model, torch.bfloat16)
    logits = twin.logits(
        torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16(), Parallel(1, twin.spec.softmax_scale)
    )
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_a_head_is_converted_once_unless_it_is_trained(model: Transformer) -> None:
    twin = as_dtype(model, torch.bfloat16)
    by = Parallel(1, twin.spec.softmax_scale)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    stream, head = by.begin(x, twin.norm), twin.head
    first = by.read(stream, head, torch.float32)
    head.matrix.data.mul_(2)
    assert torch.equal(by.read(stream, head, torch.float32), first), "converted before"
    head.matrix.requires_grad_(True)
    assert torch.equal(by.read(stream, head, torch.float32), 2 * first)
    head.matrix.data.mul_(2)
    assert torch.equal(by.read(stream, head, torch.float32), 4 * first)
    other = as_dtype(model, torch.bfloat16)
    assert torch.equal(by.read(by.begin(x, other.norm), other.head, torch.float32), first), "another head"


@torch.no_grad()
def difference(weight: nn.Parameter, way: Tensor, value: Callable[[], Tensor]) -> float:
    """How fast the value grows along a direction of a weight."""
    step, before = 1e-6, weight.data.clone()
    values = []
    for sign in (1, -1):
        weight.data.copy_(before + sign * step * way)
        values.append(float(value()))
    weight.data.copy_(before)
    return (values[0] - values[1]) / (2 * step)


def as_dtype(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The same weights in another dtype; float64 is what finite differences need, and the engine does not offer it."""
    twin = Transformer(model.spec, CPU, dtype)
    theirs = dict(model.named_parameters())
    for name, weight in twin.named_parameters():
        weight.data.copy_(theirs[name])
    return twin
