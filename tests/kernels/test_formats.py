"""The table of weight formats: names, refusals, and layers that mix formats."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from saguaro.errors import ConfigError
from saguaro.kernels import native
from saguaro.kernels.cpu import CPUProducts, Float32Weight
from saguaro.kernels.formats import FORMATS, find_format, packed_kind, ready
from saguaro.model.linear import Linear
from saguaro.model.load import load
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, Residual
from saguaro.model.tiny import write_tiny
from saguaro.model.transformer import Layer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", "dtype is 'half'; nothing is computed in float16: use bfloat16, .* which read float16 checkpoints"),
        (
            "float16",
            "dtype is 'float16'; nothing is computed in float16: use bfloat16, .* which read float16 checkpoints",
        ),
        ("fp4", f"dtype is 'fp4'; it must be one of auto, {', '.join(FORMATS)}"),
    ],
)
def test_a_format_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_format(name, CPU)


def test_int8_is_refused_where_it_cannot_be_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("tiny", write_tiny(tmp_path, "llama"), CPU, torch.float32).model
    monkeypatch.setattr(native, "find", lambda: "no C compiler was found; install gcc")
    assert packed_kind("int8", CPU) is None
    assert find_format("auto", CPU) == "float32"
    assert not ready(model, "float32").packed
    with pytest.raises(ConfigError, match=r"dtype is int8 and .* no C compiler was found; install gcc; use float32"):
        ready(model, "int8")
    assert "the device cuda:1" in FORMATS["int8"].fault(torch.device("cuda:1"))


class Doubled(nn.Module):
    """A product that no fused kernel reads."""

    def __init__(self, inner: Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner.forward(x)


class LayerNorm(nn.Module):
    """A norm that no fused kernel computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", [Norm(1 + draw(32, seed=1) / 4, 1e-5), LayerNorm()], ids=["Norm", "LayerNorm"])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_what_is_not_fused_is_composed(norm: nn.Module, is_packed: bool, is_wrapped: bool) -> None:
    """Beside fused products: other weights, norms and modules give the composed result."""
    by, x, y = CPUProducts(Float32Weight), draw(3, 32, seed=2), draw(3, 48, seed=3)
    wide, narrow, bias = draw(64, 32, seed=4), draw(32, 48, seed=5), draw(64, seed=6)

    def module(weight: Tensor, added: Tensor | None, packs_it: bool) -> nn.Module:
        linear = Linear(Float32Weight(weight) if packs_it else weight.t(), added)
        return Doubled(linear) if is_wrapped else linear

    read, write = module(wide, bias, is_packed), module(narrow, None, is_packed)
    plain_read, plain_write = module(wide, bias, False), module(narrow, None, False)
    stream, expected = by.begin(x, norm), COMPOSED.begin(x, norm)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(by.read(stream, read, torch.float32), COMPOSED.read(expected, plain_read, torch.float32))
    close(by.read_gated(stream, read), COMPOSED.read_gated(expected, plain_read))
    written = by.write(stream, y, write, norm)
    wanted: Residual = COMPOSED.write(expected, y, plain_write, norm)
    close(written.x, wanted.x)
    close(written.normed, wanted.normed)
    close(by.read_gated(written, read), COMPOSED.read_gated(wanted, plain_read))


def test_a_layer_lists_the_tensors_of_all_its_modules(tmp_path: Path) -> None:
    layer = load("tiny", write_tiny(tmp_path, "qwen3"), CPU, torch.float32).model.layers[0]
    assert isinstance(layer, Layer)
    assert {place.data_ptr() for place in layer.places().values()} >= {p.data_ptr() for p in layer.parameters()}
