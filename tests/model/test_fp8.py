"""A checkpoint in FP8 is the model with the weights that its quantisation left, however it is stored and loaded."""

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.draft.load import load_draft
from saguaro.errors import CorruptModel, ModelError, UnsupportedModel
from saguaro.kernels.cpu import CPUWeight, Float32Weight, Int8Weight, decode
from saguaro.kernels.formats import computed_in, packed_kind, ready
from saguaro.model.folder import ModelFolder
from saguaro.model.hf_config import read_spec
from saguaro.model.load import load, read_embedding, read_head, stored_as
from saguaro.model.quantization import parse_quantization
from saguaro.model.scaled import Scaled
from saguaro.model.split import ALONE, Cut, Split
from saguaro.model.tiny import tiny_model
from saguaro.model.transformer import Transformer
from saguaro.model.weights import cuts, destinations
from tests.draft.config import new_config
from tests.model.write_fp8 import LAYOUTS, Layout, blocks, compressed, edit, spread, write_fp8
from tests.model.write_gguf import Q8_0, write_gguf
from tests.parallel.threads import CPU, exchanges, splits
from tests.parity.driver import TOLERANCE, Driver, difference, random_tokens, reference

Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
BLOCKS = blocks(128, 128)


def loaded(path: Path, dtype: str = "float32", split: Split = ALONE, *, packs: bool = False) -> Transformer:
    kind = packed_kind(dtype, CPU) if packs else None
    model = load("tiny", path, CPU, computed_in(dtype), kind, split=split).model
    return ready(model, dtype) if packs else model


def bits(model: Transformer) -> list[Tensor]:
    """Everything that a model's numbers depend on."""
    found = [weight.data for weight in model.parameters()]
    for weight in model.packed:
        assert isinstance(weight, Float32Weight | Int8Weight)
        found += [weight.values] if isinstance(weight, Float32Weight) else [weight.steps, weight.scales]
    return found


def assert_same(one: Transformer, other: Transformer) -> None:
    for ours, theirs in zip(bits(one), bits(other), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_weights_and_logits_are_those_of_the_dequantised_model(tmp_path: Path, name: str, family: str) -> None:
    model = write_fp8(tmp_path, family, LAYOUTS[name])
    ours = Driver(tmp_path)
    places = destinations(ours.model)
    assert all(torch.equal(places[name], weight) for name, weight in model.named_parameters())
    tokens = random_tokens(30, ours.model.spec.n_vocab)
    assert difference(ours.chunks(tokens, [20, 10]), reference(model, tokens)) < TOLERANCE


def test_quantisation_changes_the_weights(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    model = write_fp8(tmp_path, "llama", LAYOUTS["rows"])
    before = tiny_model("llama", hidden_size=192, intermediate_size=320)
    assert difference(*(dict(each.named_parameters())[Q].data for each in (model, before))) > 10 * TOLERANCE


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16"])
@pytest.mark.parametrize(("name", "family"), [("blocks-that-do-not-divide", "llama"), ("rows", "qwen3")])
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_packed_is_the_dequantised_model(
    tmp_path: Path, name: str, family: str, dtype: str, tied: bool
) -> None:
    more = {"tied": tied, "attention_bias": family == "llama"}
    write_fp8(tmp_path / "fp8", family, LAYOUTS[name], **more).save_pretrained(tmp_path / "plain")
    assert_same(*(loaded(tmp_path / each, dtype, packs=True) for each in ("fp8", "plain")))


def test_scales_may_be_in_another_file_than_their_matrix(tmp_path: Path) -> None:
    for n_files in (1, 3):
        write_fp8(tmp_path / str(n_files), "qwen3", BLOCKS, n_files=n_files)
    assert len(list((tmp_path / "3").glob("*.safetensors"))) == 3
    assert_same(loaded(tmp_path / "1"), loaded(tmp_path / "3"))


@pytest.mark.parametrize("name", ["blocks", "blocks-that-do-not-divide", "rows", "modelopt"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["plain", "int8"])
def test_every_rank_holds_its_part(tmp_path: Path, name: str, size: int, dtype: str) -> None:
    """Cuts go through blocks: a part begins and ends within one."""
    write_fp8(tmp_path / "fp8", "qwen3", LAYOUTS[name], num_key_value_heads=4).save_pretrained(tmp_path / "plain")
    group = splits(exchanges("shared", size, tmp_path))

    def part(path: Path, rank: int) -> Transformer:
        return loaded(path, "float32" if dtype == "plain" else dtype, group[rank], packs=dtype != "plain")

    for rank in range(size):
        assert_same(part(tmp_path / "fp8", rank), part(tmp_path / "plain", rank))


def test_a_rank_reads_no_more_than_its_part(tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama", BLOCKS)
    model = loaded(tmp_path, split=Split(1, 2, lambda x: x[None]))
    folder = ModelFolder(tmp_path)
    held, names = dict(folder.tensors(cuts(model))), [n for n, (dtype, _) in folder.stored.items() if "F8" in dtype]
    for name, place in destinations(model).items():
        found = held[name]
        assert found.shape == place.shape
        assert isinstance(found, Scaled) == (name in names)


@pytest.mark.parametrize("name", ["blocks", "modelopt-rows"])
def test_as_target_and_as_draft(tmp_path: Path, name: str) -> None:
    write_fp8(tmp_path / "target", "qwen3", LAYOUTS[name])
    write_fp8(tmp_path / "draft", "qwen3", LAYOUTS[name], seed=0, num_hidden_layers=1)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ways: tuple[dict[str, Any], ...]
    told, ways = [], ({}, {"draft": str(tmp_path / "draft"), "method": "sd"}, {"draft": "drop:1", "method": "ssd"})
    for more in ways:
        with LLM(tmp_path / "target", device="cpu", kv_memory="1MiB", **more) as llm:
            told.append(llm.generate("in the end", greedy)[0].outputs[0].token_ids)
    assert told[0] == told[1] == told[2]


def test_a_draft_has_the_weights_of_its_file(tmp_path: Path) -> None:
    model = write_fp8(tmp_path, "qwen3", BLOCKS)
    draft = load_draft(new_config(264, draft=str(tmp_path), target=str(tmp_path)), None)
    model.save_pretrained(tmp_path / "plain")
    assert_same(draft, loaded(tmp_path / "plain", packs=True))


def test_what_a_target_lends_may_be_in_fp8(tmp_path: Path) -> None:
    """An embedding and a head, which a draft reads from its target's files."""
    model = write_fp8(tmp_path, "llama", BLOCKS)
    weights = {"model.embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    kept = {}

    def convert(tensors: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            steps, scales = weight.data.to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
            kept[name] = steps.float() * spread(scales, 128, 128, *weight.shape)
            tensors |= {name: steps, f"{name}_scale_inv": scales}

    edit(tmp_path, convert)
    change_quantization(tmp_path, modules_to_not_convert=[])
    assert torch.equal(read_embedding(tmp_path, CPU, torch.float32), kept["model.embed_tokens.weight"])
    for kind in (None, Float32Weight):
        head = read_head(tmp_path, read_spec(tmp_path), CPU, torch.float32, kind)
        x = torch.eye(192)
        assert torch.equal(head(x), kept["lm_head.weight"].t())


# Blocks


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Scaled, Tensor]:
    """Some rows or columns of a matrix with scales, and the same multiplied out."""
    n, m = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    height, width = draw(st.integers(1, n)), draw(st.integers(1, m))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    scales = torch.rand(-(-n // height), -(-m // width), generator=generator) + 0.1
    steps = torch.randint(-128, 128, (n, m), generator=generator, dtype=torch.int8)
    if draw(st.booleans()):
        steps = (steps.float() * 3.3).to(torch.float8_e4m3fn)
    whole = Scaled(steps, scales, (height, width))
    expected = steps.float() * spread(scales, height, width, n, m)
    dim = draw(st.integers(0, 1))
    first = draw(st.integers(0, (n, m)[dim] - 1))
    cut = Cut(first, draw(st.integers(first + 1, (n, m)[dim])), dim)
    return whole.part(cut), cut.of(expected)


@given(matrices())
def test_any_part_of_any_blocks(found: tuple[Scaled, Tensor]) -> None:
    part, expected = found
    assert torch.equal(part.decoded(), expected)
    place = torch.empty(part.shape)
    decode(part, place)
    assert torch.equal(place, expected)


@given(matrices(), st.sampled_from([Int8Weight, Float32Weight]))
def test_any_part_is_packed_as_its_values_are(found: tuple[Scaled, Tensor], kind: type[CPUWeight]) -> None:
    part, expected = found
    weight = kind.empty(part.shape[0], part.shape[1], CPU)
    weight.fill(0, part)
    x = torch.randn(2, expected.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.equal(weight.multiply(x, None), kind(expected).multiply(x, None))


def test_every_number_of_eight_bits() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(8, 32)
    found, place = Scaled(every, torch.full((8, 1), 0.7), (1, 32)), torch.empty(8, 32)
    decode(found, place)
    expected = every.float() * 0.7
    assert int(expected.isnan().sum()) == 2
    assert torch.equal(place.isnan(), expected.isnan())
    assert torch.equal(place.nan_to_num(), expected.nan_to_num())


# What is refused


def change_quantization(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] = {**content["quantization_config"], **changes}
    path.write_text(json.dumps(content))


def group_with(**changes: Any) -> dict[str, Any]:
    """config_groups whose parts are changed."""
    group = compressed("channel", (1, None)).about["config_groups"]["group_0"]
    for part, fields in changes.items():
        group = {**group, part: {**(group[part] or {}), **fields}}
    return {"config_groups": {"group_0": group}}


ROWS, OWN = LAYOUTS["rows"], LAYOUTS["modelopt-in-config"]


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (BLOCKS, {"quant_method": "awq", "bits": 4}, "quantisation 'awq'"),
        (BLOCKS, {"quant_method": "gptq", "bits": 4}, "quantisation 'gptq'"),
        (BLOCKS, {"quant_method": "mxfp4"}, "quantisation 'mxfp4'"),
        (BLOCKS, {"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes'"),
        (BLOCKS, {"quant_method": None}, "quantisation None"),
        (BLOCKS, {"activation_scheme": "static"}, "FP8 with the activation_scheme 'static'"),
        (BLOCKS, {"fmt": "e5m2"}, "FP8 of fmt 'e5m2'"),
        (BLOCKS, {"weight_block_size": None}, "quant_method fp8 with the weight_block_size null"),
        (ROWS, {"format": "pack-quantized"}, "compressed-tensors of format 'pack-quantized'"),
        (ROWS, {"format": "nvfp4-pack-quantized"}, "compressed-tensors of format 'nvfp4-pack-quantized'"),
        (ROWS, {"format": "int-quantized"}, "compressed-tensors of format 'int-quantized'"),
        (ROWS, {"kv_cache_scheme": {"num_bits": 8}}, "compressed-tensors with a kv_cache_scheme"),
        (ROWS, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors with a sparsity_config"),
        (ROWS, {"transform_config": {"config_groups": {}}}, "compressed-tensors with a transform_config"),
        (ROWS, group_with(weights={"num_bits": 4, "type": "int"}), "with weights of 4-bit 'int'"),
        (ROWS, group_with(weights={"strategy": "group"}), "weights of strategy 'group'"),
        (ROWS, group_with(weights={"symmetric": False}), "weights that are not symmetric"),
        (ROWS, group_with(input_activations={"dynamic": False}), "static FP8 activations"),
        (ROWS, group_with(output_activations={"num_bits": 8}), "quantised output_activations"),
        (OWN, {"quant_algo": "NVFP4"}, "ModelOpt's quant_algo 'NVFP4'"),
        (OWN, {"quant_algo": "W4A16_AWQ"}, "ModelOpt's quant_algo 'W4A16_AWQ'"),
        (OWN, {"kv_cache_quant_algo": "FP8"}, r"ModelOpt with quantised keys and values \(kv_cache_quant_algo\)"),
    ],
    ids=str,
)
def test_another_format(tmp_path: Path, layout: Layout, changes: dict[str, Any], message: str) -> None:
    write_fp8(tmp_path, "llama", layout)
    change_quantization(tmp_path, **changes)
    remedy = r"config.json: .*is not supported; FP8 \(e4m3\) is read as .*: use .* the unquantised checkpoint or a GGUF"
    for read in (read_spec, loaded):
        with pytest.raises(UnsupportedModel, match=message) as e:
            read(tmp_path)
        assert e.match(remedy)


def test_groups_of_different_schemes(tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama", ROWS)
    groups = [compressed(*each).about["config_groups"]["group_0"] for each in (("channel", (1, None)), ("tensor", ()))]
    change_quantization(tmp_path, config_groups={"a": groups[0], "b": groups[0]})
    assert loaded(tmp_path)
    change_quantization(tmp_path, config_groups={"a": groups[0], "b": groups[1]})
    with pytest.raises(UnsupportedModel, match="compressed-tensors with 2 different config_groups"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (BLOCKS, {"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must be two whole numbers"),
        (BLOCKS, {"weight_block_size": [0, 128]}, "of at least 1"),
        (BLOCKS, {"weight_block_size": "128"}, "two whole numbers"),
        (BLOCKS, {"modules_to_not_convert": "lm_head"}, "the list of modules that are not converted is 'lm_head'"),
        (BLOCKS, {"modules_to_not_convert": [5]}, "the list of modules"),
        (ROWS, {"config_groups": None}, "no complete quantization_config of compressed-tensors"),
        (ROWS, {"config_groups": {"a": {"weights": {}}}}, "no complete quantization_config of compressed-tensors"),
    ],
    ids=str,
)
def test_a_config_that_is_damaged(tmp_path: Path, layout: Layout, changes: dict[str, Any], message: str) -> None:
    write_fp8(tmp_path, "llama", layout)
    change_quantization(tmp_path, **changes)
    with pytest.raises(CorruptModel, match=message):
        loaded(tmp_path)


def to_e5m2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors[Q] = tensors[Q].float().to(torch.float8_e5m2)
    return tensors


SCALE = f"{Q}_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SCALE), "q_proj.weight' is FP8 and '.*q_proj.weight_scale_inv' is not beside it"),
        (lambda t: t.update({SCALE: t[SCALE].t()[:1].contiguous()}), r"its scale \[1, 2\] of F32; .* floats, \[2, 2\]"),
        (lambda t: t.update({SCALE: t[SCALE].int()}), r"its scale \[2, 2\] of I32"),
        (lambda t: t.update({SCALE: torch.ones(2, 2, 1)}), r"its scale \[2, 2, 1\] of F32"),
        (lambda t: t[SCALE].fill_(0.0), "q_proj.weight_scale_inv' has a scale of 0.0; scales are finite and more"),
        (lambda t: t[SCALE][1, 1].fill_(float("nan")), "q_proj.weight_scale_inv' has a scale of nan"),
        (lambda t: t[SCALE][0, 1].fill_(float("inf")), "has a scale of inf"),
        (lambda t: t[SCALE][0, 1].fill_(-1.0), "has a scale of -1.0"),
        (lambda t: t.update({Q: t[Q].float()}), "q_proj.weight' is of F32 and has a scale '.*_scale_inv'"),
        (to_e5m2, "q_proj.weight' is of F8_E5M2 and has a scale '.*', and config.json says FP8"),
        (lambda t: to_e5m2(t).pop(SCALE), "q_proj.weight' is of F8_E5M2, and config.json says FP8"),
        (lambda t: t.update({Q: t[Q].float().to(torch.int8)}), "q_proj.weight' is of I8 and has a scale"),
        (
            lambda t: t.update(
                {
                    "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn),
                    "lm_head.weight_scale_inv": torch.ones(3, 2),
                }
            ),
            "lm_head.weight' is FP8, and config.json lists its module as not converted",
        ),
        (lambda t: t.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}), "scales of quantised keys"),
        (lambda t: t.update({"model.layers.0.self_attn.k_proj.input_scale": torch.ones(1)}), "quantised activations"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
            "'model.norm.weight' is FP8",
        ),
    ],
)
def test_a_config_that_does_not_agree_with_the_tensors(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    write_fp8(tmp_path, "llama", BLOCKS)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message) as e:
        loaded(tmp_path)
    assert str(tmp_path) in str(e.value)


def test_scales_without_a_config(tmp_path: Path) -> None:
    """Their matrices would be read as they are, which is another model."""
    write_fp8(tmp_path, "llama", BLOCKS)
    change = json.loads((tmp_path / "config.json").read_text())
    del change["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(change))
    for read in (loaded, lambda path: ModelFolder(path).read(Q)):
        with pytest.raises(CorruptModel, match=r"is of F8_E4M3 and has a scale .* config.json says nothing of it"):
            read(tmp_path)


def test_a_config_of_weights_that_were_converted(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", "llama", BLOCKS).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "config.json").write_bytes((tmp_path / "fp8" / "config.json").read_bytes())
    with pytest.raises(CorruptModel, match=r"says FP8 .* and no tensor is of F8_E4M3; .* remove quantization_config"):
        loaded(tmp_path / "plain")


@pytest.mark.parametrize(
    ("about", "block"),
    [
        ({"quant_method": "fp8"}, (128, 128)),
        ({"quant_method": "FP8", "fmt": "float8_e4m3fn", "ignored_layers": ["lm_head"]}, (128, 128)),
        ({**ROWS.about, **group_with(weights={"strategy": None, "group_size": -1})}, (1, None)),
        ({**ROWS.about, **group_with(weights={"strategy": None})}, (None, None)),
        ({**ROWS.about, **group_with(weights={"strategy": "block", "block_structure": "64x128"})}, (64, 128)),
        (
            {**ROWS.about, **group_with(), "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}},
            (None, None),
        ),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, (None, None)),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, (1, None)),
    ],
    ids=str,
)
def test_other_ways_to_say_it(about: dict[str, Any], block: tuple[int | None, int | None]) -> None:
    found = parse_quantization(about)
    assert found is not None
    assert found.block == block


def test_two_files_that_disagree(tmp_path: Path) -> None:
    write_fp8(tmp_path, "llama", OWN)
    about = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    assert loaded(tmp_path)
    about["quantization"]["quant_algo"] = "FP8_PER_CHANNEL_PER_TOKEN"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    with pytest.raises(CorruptModel, match=r"hf_quant_config.json says FP8 .* per row, and config.json .* per matrix"):
        loaded(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CorruptModel, match="says quantization is None; it is an object"):
        loaded(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["float", "dynamic", "FP8", "channel"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "a"]), inner, max_size=3),
    max_leaves=6,
)
ABOUTS = [layout.about | {layout.kept_key: []} for layout in (BLOCKS, ROWS, OWN)]


@given(st.sampled_from(ABOUTS), st.data())
def test_any_config_is_read_or_refused(about: dict[str, Any], data: st.DataObject) -> None:
    """Whatever a field holds."""
    changed = {**about, data.draw(st.sampled_from([*about])): data.draw(JSON)}
    if "config_groups" in about and data.draw(st.booleans()):
        weights = {**about["config_groups"]["group_0"]["weights"]}
        weights[data.draw(st.sampled_from([*weights]))] = data.draw(JSON)
        changed = {**about, "config_groups": {"a": {"weights": weights}}}
    with contextlib.suppress(UnsupportedModel, CorruptModel):
        found = parse_quantization(changed)
        assert found is not None
        assert all(n >= 1 for n in found.grid((300, 200)))


def test_a_list_of_too_many_wildcards() -> None:
    with pytest.raises(CorruptModel, match="1001 modules with wildcards are not converted; at most 1000 are read"):
        parse_quantization({**BLOCKS.about, "modules_to_not_convert": [f"*{n}" for n in range(1001)]})


# What is said


def test_what_is_stored_is_said(tmp_path: Path) -> None:
    model = write_fp8(tmp_path / "fp8", "llama", BLOCKS)
    model.half().save_pretrained(tmp_path / "half")
    assert stored_as(tmp_path / "fp8") == "safetensors: FP8 (e4m3), a scale per block of 128 x 128; float32"
    assert stored_as(tmp_path / "half") == "safetensors: float16"
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), Q8_0)
    assert stored_as(path) == "GGUF: Q8_0; F32"


def test_a_conversion_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_fp8(tmp_path / "fp8", "llama", BLOCKS)
    model.half().save_pretrained(tmp_path / "half")

    def said(folder: str, dtype: str, *, packs: bool = False, rank: int = 0) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loaded(tmp_path / folder, dtype, ALONE if rank == 0 else Split(1, 2, lambda x: x[None]), packs=packs)
        return [record.getMessage() for record in caplog.records]

    (line,) = said("fp8", "bfloat16")
    assert "it is converted to bfloat16 while loading, and takes the memory of bfloat16" in line
    (line,) = said("half", "bfloat16")
    assert "stored in float16; it is rounded to bfloat16" in line
    assert not said("fp8", "bfloat16", rank=1)
    assert not said("fp8", "int8", packs=True)
    assert not said("half", "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("n_files", [1, 2])
def test_a_float16_checkpoint(tmp_path: Path, dtype: str, n_files: int) -> None:
    """It is read as its values are, in any dtype of computation."""
    half = tiny_model("qwen3").half()
    half.save_pretrained(tmp_path / "half", max_shard_size="1GB" if n_files == 1 else "200KB")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "float16"
    half.float().save_pretrained(tmp_path / "float")
    assert_same(*(loaded(tmp_path / each, dtype, packs=True) for each in ("half", "float")))
