"""A grown model is its source as long as epsilon is 0, whatever the shape, and drifts from it as epsilon rises."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from saguaro.errors import ConfigError
from saguaro.measure.grown import SHAPES, Grown, Shape, agreement, choices, find_epsilon, forward, grow, place_heads
from saguaro.model.layout import Layout
from saguaro.model.load import load
from saguaro.model.mlp import MLP
from saguaro.model.tiny import write_tiny
from saguaro.model.transformer import Layer, Transformer
from tests.parity.driver import CPU, LINEAR, LLAMA3, difference, random_tokens

N_KNOWN = 288
TEXT = random_tokens(150, N_KNOWN)  # more than a chunk
# The source: hidden 96, 3 layers, 2 groups of 3 query heads of 16, 96 neurons, 288 tokens.
SHAPES_SMALL = [
    Shape("the source's own", 96, 3, 6, 2, 16, 96, 288),
    Shape("larger groups, more layers", 160, 7, 20, 4, 32, 160, 320),
    Shape("equal groups, head as before", 128, 4, 9, 3, 16, 128, 288),
    Shape("smaller groups", 112, 3, 16, 8, 32, 96, 300),
    Shape("groups of one, head three times", 96, 5, 8, 8, 48, 100, 289),
    Shape("wide and tied", 512, 3, 12, 4, 32, 200, 300, is_tied=True),
]
BIG = SHAPES_SMALL[1]


def tiny_source(folder: Path, *, tied: bool = True, **overrides: Any) -> Transformer:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3}
    path = write_tiny(folder, "llama", tied=tied, **{**sizes, **overrides})
    return load("tiny", path, CPU, torch.float32).model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_source(tmp_path_factory.mktemp("source"))


def grow_small(source: Transformer, shape: Shape = BIG, epsilon: float = 0.0, seed: int = 0) -> Grown:
    return grow(source, shape, epsilon=epsilon, seed=seed, device=CPU, dtype=torch.float32)


def logits_of(model: Transformer, tokens: list[int] = TEXT) -> Tensor:
    return torch.cat(list(forward(model, [tokens])))


def assert_same_function(model: Transformer, source: Transformer) -> None:
    ours, theirs = logits_of(model), logits_of(source)
    assert ours.shape[1] == model.spec.n_vocab
    assert ours.isfinite().all()
    assert difference(ours[:, :N_KNOWN], theirs) < 1e-4 * float(theirs.abs().max())


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.named_parameters()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("shape", SHAPES_SMALL, ids=lambda shape: shape.name)
def test_without_noise_it_is_the_source(source: Transformer, shape: Shape) -> None:
    grown = grow_small(source, shape)
    spec = grown.model.spec
    assert (spec.hidden, spec.n_layers, spec.n_heads, spec.n_kv_heads) == (
        shape.hidden,
        shape.n_layers,
        shape.n_heads,
        shape.n_kv_heads,
    )
    assert grown.model.is_tied == shape.is_tied
    assert_same_function(grown.model, source)


def test_in_bfloat16(source: Transformer) -> None:
    grown = grow(source, BIG, epsilon=0.0, device=CPU, dtype=torch.bfloat16)
    assert {weight.dtype for weight in grown.model.parameters()} == {torch.bfloat16}
    right = logits_of(source)
    assert (logits_of(grown.model)[:, :N_KNOWN] - right).norm() < 0.05 * right.norm()


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR], ids=lambda rope: rope["rope_type"])
def test_stretched_rotary_frequencies(tmp_path: Path, rope: dict[str, Any]) -> None:
    source = tiny_source(tmp_path, tied=False, rope_parameters=rope)
    assert_same_function(grow_small(source).model, source)


def test_frequencies_that_no_config_tells(source: Transformer, tmp_path: Path) -> None:
    """A GGUF file may bring factors for each of them."""
    other = tiny_source(tmp_path)
    other.frequencies = other.frequencies / torch.linspace(1, 4, 8)
    assert difference(logits_of(other), logits_of(source)) > 0.1
    assert_same_function(grow_small(other).model, other)


def test_weights_in_the_memory_order_of_a_gpu(source: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_outputs(self: Layout, n_in: int, n_out: int) -> Parameter:
        return Parameter(torch.empty(n_out, n_in, dtype=self.dtype).t(), requires_grad=False)

    monkeypatch.setattr(Layout, "matrix", by_outputs)
    grown = grow_small(source)
    assert not grown.model.head.matrix.is_contiguous()
    assert_same_function(grown.model, source)
    grown.set_epsilon(1.0)
    assert difference(logits_of(grown.model)[:, :N_KNOWN], logits_of(source)) > 0.1


@pytest.mark.parametrize("shape", SHAPES_SMALL[1:], ids=lambda shape: shape.name)
def test_noise_moves_the_logits_and_can_be_taken_back(source: Transformer, shape: Shape) -> None:
    grown = grow_small(source, shape)
    clean, before = weights_of(grown.model), logits_of(grown.model)
    moved = []
    for epsilon in (0.1, 1.0):
        grown.set_epsilon(epsilon)
        assert grown.epsilon == epsilon
        moved.append(float((logits_of(grown.model) - before)[:, :N_KNOWN].norm() / before[:, :N_KNOWN].norm()))
    assert 1e-3 < moved[0] < 0.3 * moved[1]
    grown.set_epsilon(0.0)
    assert same_bits(weights_of(grown.model), clean)
    assert torch.equal(logits_of(grown.model), before)


def test_one_epsilon_one_model(source: Transformer) -> None:
    grown = grow_small(source, epsilon=0.0)
    for epsilon in (0.7, 0.0, 0.3):
        grown.set_epsilon(epsilon)
        assert same_bits(weights_of(grown.model), weights_of(grow_small(source, epsilon=epsilon).model))
    assert not same_bits(weights_of(grown.model), weights_of(grow_small(source, epsilon=0.3, seed=1).model))


def test_noise_is_as_large_in_any_shape(source: Transformer) -> None:
    """More heads, neurons, layers and channels do not make one epsilon mean more."""
    right, moved = logits_of(source), []
    for shape in (BIG, Shape("huge", 640, 24, 48, 8, 32, 1000, 300)):
        ours = logits_of(grow_small(source, shape, epsilon=0.25).model)[:, :N_KNOWN]
        moved.append(float((ours - right).norm() / right.norm()))
    assert all(0.15 < part < 0.25 for part in moved)


def test_a_wide_stream_is_not_mostly_noise(source: Transformer) -> None:
    wide = grow_small(source, SHAPES_SMALL[5], epsilon=1.0).model
    layer = wide.layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mlp, MLP)
    rows = layer.mlp.down.matrix.data[96:]  # the noise neurons of a layer of the source
    inside, beyond = (float(part.square().sum()) for part in (rows[:, :96], rows[:, 96:]))
    assert 0.9 < beyond / inside < 1.1


def test_agreement_counts_known_tokens_only(source: Transformer) -> None:
    grown = grow_small(source)
    texts = [TEXT, TEXT[:20]]
    assert agreement(grown.model, source, texts, N_KNOWN) == 1.0
    grown.model.head.matrix.data[:, N_KNOWN:] *= 1e3  # tokens beyond the tokenizer's shout
    assert agreement(grown.model, source, texts, N_KNOWN) == 1.0
    right = logits_of(source, TEXT[:20]).argmax(-1)
    assert torch.equal(choices(source, texts, N_KNOWN)[len(TEXT) :], right)
    grown.set_epsilon(0.5)
    assert agreement(grown.model, source, texts, N_KNOWN) < 1.0


@pytest.mark.parametrize("wanted", [0.9, 0.6])
def test_the_epsilon_of_an_agreement(source: Transformer, wanted: float) -> None:
    texts = [random_tokens(100, N_KNOWN, seed) for seed in range(3)]
    draft = grow_small(source, SHAPES_SMALL[3]).model
    grown = grow_small(source, epsilon=0.0)
    epsilon = find_epsilon(grown, draft, texts, N_KNOWN, wanted)
    assert grown.epsilon == epsilon > 0
    assert abs(agreement(grown.model, draft, texts, N_KNOWN) - wanted) < 0.04


def test_agreements_that_cannot_be(source: Transformer) -> None:
    grown = grow_small(source, SHAPES_SMALL[0])  # no room for noise
    with pytest.raises(ConfigError, match=r"agreement is 1\.000 even with epsilon 64\.0, not 0\.5"):
        find_epsilon(grown, source, [TEXT[:8]], N_KNOWN, 0.5)
    with pytest.raises(ConfigError, match=r"wanted agreement is 1\.5"):
        find_epsilon(grown, source, [TEXT[:8]], N_KNOWN, 1.5)
    with pytest.raises(ConfigError, match="no tokens"):
        agreement(grown.model, source, [[]], N_KNOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 95}, "has hidden 95; the source has 96"),
        ({"n_layers": 2}, "has n_layers 2; the source has 3"),
        ({"intermediate": 95}, "has intermediate 95; the source has 96"),
        ({"n_vocab": 287}, "has n_vocab 287; the source has 288"),
        ({"head_dim": 24}, "has head_dim 24; it must be a multiple of the source's 16"),
        ({"head_dim": 8}, "has head_dim 8; it must be a multiple of the source's 16"),
        ({"n_heads": 7}, "has 7 heads; they must be a multiple of n_kv_heads, 2"),
        ({"n_heads": 6, "n_kv_heads": 1}, "has n_kv_heads 1 of 6 query heads; the source's 6 heads need 2"),
        ({"n_heads": 6, "n_kv_heads": 3}, "has n_kv_heads 3 of 2 query heads; the source's 6 heads need 4"),
    ],
)
def test_a_shape_the_source_does_not_fit_in(source: Transformer, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grow_small(source, replace(SHAPES_SMALL[0], name="small", **change))


@pytest.mark.parametrize("epsilon", [-0.1, float("nan"), float("inf")])
def test_an_epsilon_that_cannot_be(source: Transformer, epsilon: float) -> None:
    with pytest.raises(ConfigError, match=r"epsilon is .*; it must be"):
        grow_small(source, epsilon=epsilon)


def test_sources_that_cannot_be_grown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is tied and the source is not"):
        grow_small(tiny_source(tmp_path / "untied", tied=False), replace(BIG, is_tied=True))
    with pytest.raises(ConfigError, match="LlamaForCausalLM with biases"):
        grow_small(tiny_source(tmp_path / "biased", attention_bias=True))


def test_heads_of_the_shapes_we_measure() -> None:
    for shape in SHAPES.values():
        places = place_heads(9, 3, shape.n_heads, shape.n_kv_heads)
        group = shape.n_heads // shape.n_kv_heads
        assert [place.to for place in places] == list(range(6 if group == 2 else 3))
        pairs = [(place, *pair) for place in places for pair in place.queries]
        assert [query for _, query, _ in pairs] == list(range(9))
        assert all(query // 3 == place.kv and to // group == place.to for place, query, to in pairs)


@pytest.mark.network
def test_the_default_model_in_the_shape_of_a_draft(default_folder: Path) -> None:
    source = load("default", default_folder, CPU, torch.float32).model
    n_known = source.spec.n_vocab
    grown = grow_small(source, replace(SHAPES["0.6b"], n_vocab=n_known + 64))
    tokens = random_tokens(24, n_known)
    right = logits_of(source, tokens)
    assert difference(logits_of(grown.model, tokens)[:, :n_known], right) < 2e-5 * float(right.abs().max())
    grown.set_epsilon(0.2)
    assert 0.3 < agreement(grown.model, source, [tokens], n_known) <= 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(source: Transformer) -> None:
    grown = grow(source, BIG, epsilon=0.0, device=torch.device("cuda"), dtype=torch.float32)
    right = logits_of(source)
    assert difference(logits_of(grown.model).cpu()[:, :N_KNOWN], right) < 1e-3 * float(right.abs().max())
    texts = [random_tokens(100, N_KNOWN, seed) for seed in range(3)]
    find_epsilon(grown, source, texts, N_KNOWN, 0.8)
    assert abs(agreement(grown.model, source, texts, N_KNOWN) - 0.8) < 0.04
