"""Products with e4m3 weights: against their twin and float64, and row by row the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from saguaro import LLM, SamplingParams
from saguaro.config import EngineConfig
from saguaro.errors import ConfigError
from saguaro.kernels.formats import FORMATS, find_format, packed_kind
from saguaro.kernels.fp8 import CHUNK, GROUP, MAX_ROWS, FP8Weight, multiply_plain, quantised, weights_of
from saguaro.model.linear import Linear
from saguaro.model.load import load
from saguaro.model.products import COMPOSED, Residual
from saguaro.model.scaled import Scaled
from saguaro.model.split import Cut, Split
from saguaro.model.tiny import tiny_model
from tests.model.write_fp8 import LAYOUTS, write_fp8
from tests.parity.driver import TOLERANCE, Driver, difference, random_tokens, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, exact: Tensor, tolerance: float) -> bool:
    return float((found.double() - exact).abs().max()) <= tolerance * float(exact.abs().max())


@pytest.mark.parametrize("n_in", [1, 128, 200])
def test_weights_lose_a_sixteenth_at_most(n_in: int) -> None:
    """e4m3 has 4 significant bits; a group's small values lose more, of its largest one 2^-9 / 448."""
    weight = values(9, n_in) * torch.logspace(-3, 3, 9, device=DEVICE)[:, None]
    found = weights_of(*quantised(weight))
    largest = weight.abs().amax(1, keepdim=True)
    assert bool(((found - weight).abs() <= weight.abs() / 16 + largest * 2.0**-9 / 448).all())


def test_zeros_stay_zeros_and_odd_numbers_are_seen() -> None:
    assert not weights_of(*quantised(torch.zeros(2, 130))).any()
    for odd in ("nan", "inf"):
        weight = torch.ones(2, 130)
        weight[1, 129] = float(odd)
        found = weights_of(*quantised(weight))
        assert found[0].isfinite().all()
        assert not found[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("n_rows", [1, 5, MAX_ROWS, MAX_ROWS + 1])
def test_a_product_is_that_of_the_decoded_weight(n_rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = FP8Weight(values(70, 200, seed=1)), values(70, seed=2, dtype=dtype) if has_bias else None
    x = values(n_rows, 200, dtype=dtype)
    exact = x.double() @ weights_of(weight.steps, weight.scales).double().t()
    exact += 0 if bias is None else bias.double()
    found = Linear(weight, bias)(x)
    assert found.dtype == dtype
    assert close(found, exact, 1e-5 if dtype == torch.float32 else 2.0**-6)


def test_more_outputs_than_are_decoded_at_once() -> None:
    weight, x = FP8Weight(values(CHUNK + 3, 8, seed=1)), values(MAX_ROWS + 1, 8)
    exact = x.double() @ weights_of(weight.steps, weight.scales).double().t()
    assert close(weight.multiply(x, None), exact, 1e-5)
    again = FP8Weight.empty(CHUNK + 3, 8, DEVICE)
    again.fill(0, weights_of(weight.steps, weight.scales))
    assert torch.equal(weights_of(again.steps, again.scales), weights_of(weight.steps, weight.scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    weight, x = FP8Weight(values(70, 300, seed=1)), values(MAX_ROWS, 300, dtype=dtype)
    together = weight.multiply(x, None)
    for n in (1, 2, 9, 33):
        assert torch.equal(weight.multiply(x[:n], None), together[:n])
    assert torch.equal(weight.multiply(x[40:41], None), together[40:41])


def test_it_is_a_weight_of_a_layer() -> None:
    """Beside norms and the residual stream, which are composed."""
    weight = FP8Weight(values(64, 32, seed=1))
    linear, plain = Linear(weight), Linear(weights_of(weight.steps, weight.scales).t())
    x, y = values(3, 64), values(3, 32)
    norm = torch.nn.Identity()
    found = COMPOSED.write(Residual(x, norm), y, linear, norm).x
    assert close(found, (x + y @ plain.matrix).double(), 1e-5)
    assert weight.n_params == 64 * 32
    assert weight.n_bytes == 64 * 32 + 4 * 64


@st.composite
def stored(draw: st.DrawFn) -> tuple[Scaled, int]:
    """A matrix of a checkpoint in blocks, and the outputs before it in a fused weight."""
    n, m = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    height, width = draw(st.integers(1, n)), draw(st.sampled_from([GROUP, 2 * GROUP, m]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scales = torch.rand(-(-n // height), -(-m // width), generator=generator) + 0.1
    steps = (torch.randn(n, m, generator=generator) * 99).to(torch.float8_e4m3fn)
    first = draw(st.integers(0, n - 1))
    return Scaled(steps, scales, (height, width)).part(Cut(first, draw(st.integers(first + 1, n)))), draw(
        st.integers(0, 3)
    )


@given(stored())
@settings(deadline=None)
def test_a_checkpoint_in_fp8_keeps_its_bits(given: tuple[Scaled, int]) -> None:
    found, first = given
    weight = FP8Weight.empty(first + found.shape[0], found.shape[1], CPU)
    weight.fill(first, found)
    assert torch.equal(weight.steps[first:].view(torch.uint8), found.steps.view(torch.uint8))
    assert torch.equal(weights_of(weight.steps[first:], weight.scales[:, first:]), found.decoded())


@pytest.mark.parametrize(("steps", "width"), [(torch.int8, 200), (torch.float8_e4m3fn, 24)])
def test_other_blocks_are_quantised_again(steps: torch.dtype, width: int) -> None:
    found = Scaled((values(7, 200).cpu() * 20).to(steps), torch.rand(7, -(-200 // width)) + 0.1, (1, width))
    weight = FP8Weight.empty(7, 200, CPU)
    weight.fill(0, found)
    assert torch.equal(weight.steps.float(), FP8Weight(found.decoded()).steps.float())


# The Triton kernel


@pytest.mark.parametrize("n_split", [None, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), [(1, 128, 64), (5, 300, 70), (17, 512, 33)])
def test_the_kernel_is_its_twin(n_rows: int, n_in: int, n_out: int, dtype: torch.dtype, n_split: int | None) -> None:
    pytest.importorskip("triton")
    from saguaro.kernels.fp8_rows import multiply

    weight, bias = FP8Weight(values(n_out, n_in, seed=1)), values(n_out, seed=2, dtype=dtype)
    x = values(n_rows, n_in + 3, dtype=dtype)[:, :n_in]
    for each in (None, bias):
        exact = multiply_plain(x.double().float(), weight.steps, weight.scales, each).double()
        found = multiply(x, weight.steps, weight.scales, each, n_split)
        assert close(found, exact, 1e-5 if dtype == torch.float32 else 2.0**-7)


@pytest.mark.parametrize("n_split", [1, 2])
def test_a_row_of_the_kernel_does_not_depend_on_the_others(n_split: int) -> None:
    pytest.importorskip("triton")
    from saguaro.kernels.fp8_rows import multiply

    weight, x = FP8Weight(values(70, 300, seed=1)), values(MAX_ROWS, 300, dtype=torch.bfloat16)
    together = multiply(x, weight.steps, weight.scales, None, n_split)
    for n in (1, 16, 17):
        assert torch.equal(multiply(x[:n], weight.steps, weight.scales, None, n_split), together[:n])
    assert torch.equal(multiply(x[40:41], weight.steps, weight.scales, None, n_split), together[40:41])


# The format


def test_it_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"dtype is fp8 and the device is cpu; .* GPU .*; use dtype int8 on a CPU"):
        find_format("fp8", CPU)
    assert packed_kind("fp8", CPU) is None


def test_the_flag_is_another_name_of_the_dtype() -> None:
    config = EngineConfig(quantization="fp8")
    assert config.dtype == replace(config, lookahead=2).dtype == "fp8"
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be auto or bfloat16 with quantization fp8"):
        EngineConfig(quantization="fp8", dtype="int8")
    with pytest.raises(
        ConfigError, match="quantization is 'awq'; it must be fp8 or none; how a checkpoint is quantised"
    ):
        EngineConfig(quantization="awq")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["blocks", "rows", "modelopt"])
def test_a_checkpoint_in_fp8_loaded_in_e4m3(tmp_path: Path, layout: str, tied: bool) -> None:
    """As on a GPU: in the memory of 8 bits, but for the head, and with the numbers of its file."""
    theirs = write_fp8(tmp_path, "qwen3", replace(LAYOUTS[layout], kept=(), is_kept=lambda _: False), tied=tied)
    found, whole = (load("tiny", tmp_path, CPU, torch.float32, kind) for kind in (FP8Weight, None))
    assert len(found.model.packed) == 4 * len(found.model.layers)
    assert found.n_params == whole.n_params
    plain = (2 - tied) * 4 * 288 * 192
    assert found.weight_bytes - plain < 0.28 * (whole.weight_bytes - plain)
    tokens = random_tokens(20, 288)
    assert difference(Driver(tmp_path, kind=FP8Weight).chunks(tokens, [13, 7]), reference(theirs, tokens)) < TOLERANCE


def test_a_plain_checkpoint_loaded_in_e4m3(tmp_path: Path) -> None:
    """Loaded at once or packed after it: the same bits, and nearly the same logits."""
    theirs = tiny_model("llama", hidden_size=192, intermediate_size=320)
    theirs.save_pretrained(tmp_path)
    found = load("tiny", tmp_path, CPU, torch.float32, FP8Weight).model
    later = load("tiny", tmp_path, CPU, torch.float32).model
    later.pack(FP8Weight, COMPOSED, "fp8")
    for ours, other in zip(found.packed, later.packed, strict=True):
        assert isinstance(ours, FP8Weight)
        assert isinstance(other, FP8Weight)
        assert torch.equal(ours.steps.view(torch.uint8), other.steps.view(torch.uint8))
        assert torch.equal(ours.scales, other.scales)
    for name, weight in theirs.named_parameters():
        if weight.dim() == 2 and ".layers." in name:
            weight.data = weights_of(*quantised(weight.data))
    tokens = random_tokens(20, 288)
    assert difference(Driver(tmp_path, kind=FP8Weight).chunks(tokens, [20]), reference(theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("stored", ["fp8", "plain"])
def test_the_engine_speculates_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    """As on a GPU, in float32: target and draft have the format, and every method gives the target's tokens."""
    monkeypatch.setitem(FORMATS, "fp8", replace(FORMATS["fp8"], dtype=torch.float32, fault=lambda _: ""))
    model = write_fp8(tmp_path, "qwen3", LAYOUTS["blocks"])
    if stored == "plain":
        for path in tmp_path.glob("model*"):
            path.unlink()
        model.save_pretrained(tmp_path)
    greedy, told = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for method in ("ar", "sd", "ssd"):
        more: dict[str, Any] = {} if method == "ar" else {"draft": str(tmp_path), "method": method}
        with LLM(tmp_path, device="cpu", kv_memory="1MiB", quantization="fp8", **more) as llm:
            assert llm.engine.loaded.model.format == "fp8"
            assert len(llm.engine.loaded.model.packed) == 4 * 2
            told.append(llm.generate("in the end", greedy)[0].outputs[0].token_ids)
    assert told[0] == told[1] == told[2]


def test_a_rank_has_the_same_numbers(tmp_path: Path) -> None:
    """Scales belong to one output, so a part is quantised as the whole is."""
    tiny_model("llama", hidden_size=192, intermediate_size=320).save_pretrained(tmp_path)
    whole = load("tiny", tmp_path, CPU, torch.float32, FP8Weight).model.layers[0]
    ranks = [Split(rank, 2, lambda x: x[None]) for rank in range(2)]
    parts = [load("tiny", tmp_path, CPU, torch.float32, FP8Weight, split=rank).model.layers[0] for rank in ranks]

    def down_of(layer: nn.Module) -> FP8Weight:
        (found,) = (
            part.weight for part in layer.modules() if isinstance(part, Linear) and "mlp.down_proj" in part._parts
        )
        assert isinstance(found, FP8Weight)
        return found

    both = [down_of(part) for part in parts]
    assert torch.equal(
        torch.cat([weights_of(each.steps, each.scales) for each in both]),
        weights_of(down_of(whole).steps, down_of(whole).scales),
    )
