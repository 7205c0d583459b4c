"""Whatever file the weights come from, the same model comes out of it."""

import copy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.model.load import load
from saguaro.model.tiny import tiny_model, write_tiny
from saguaro.model.weights import destinations
from tests.model.write_fp8 import LAYOUTS, save_fp8
from tests.model.write_gguf import F32, Q8_0, through, write_gguf
from tests.parity.driver import CPU, LINEAR, LLAMA3, TOLERANCE, Driver, difference, random_tokens, reference


def logits_of(path: Path) -> torch.Tensor:
    ours = Driver(path)
    return ours.chunks(random_tokens(47, ours.model.spec.n_vocab), [47])


def expected(model: Any) -> torch.Tensor:
    return reference(model, random_tokens(47, model.config.vocab_size))


def test_shards_are_the_single_file(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(tmp_path / "single"), logits_of(tmp_path / "shards"))


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(logits_of(tmp_path), expected(theirs)) < TOLERANCE


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_tensor_arrives_in_the_wanted_dtype(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    theirs = tiny_model("llama", tied=tied, attention_bias=True, mlp_bias=True)
    theirs.save_pretrained(tmp_path)
    ours = load("tiny", tmp_path, CPU, dtype).model
    places = destinations(ours)
    assert set(places) == set(dict(theirs.named_parameters()))
    for name, weight in theirs.named_parameters():
        assert places[name].dtype == dtype
        assert torch.equal(places[name], weight.data.to(dtype)), name
    assert {p.dtype for p in ours.parameters()} == {dtype}


def test_bfloat16_weights_give_nearly_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path)
    tokens = random_tokens(20, model.config.vocab_size)
    logits = Driver(tmp_path, torch.bfloat16).chunks(tokens, [13, 7])
    assert logits.dtype == torch.float32
    right = reference(model, tokens)
    assert (logits - right).norm() < 0.05 * right.norm()


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tied": True}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": LINEAR}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"tied": True}),
    ],
    ids=["llama", "llama-tied", "llama-bias", "llama-llama3", "llama-linear", "qwen2", "qwen3", "qwen3-tied"],
)
def test_a_gguf_file_is_the_model_it_was_made_of(
    tmp_path: Path, family: str, overrides: dict[str, Any], kind: gguf.GGMLQuantizationType
) -> None:
    """Quantised, it is the model with the weights that the quantisation left."""
    model = tiny_model(family, **overrides)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    assert difference(logits_of(path), expected(through(model, kind))) < TOLERANCE


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_file_of_another_kind(tmp_path: Path, name: str) -> None:
    kind, model = gguf.GGMLQuantizationType[name], tiny_model("qwen2")
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    assert difference(logits_of(path), expected(through(model, kind))) < TOLERANCE


def test_quantisation_changes_the_weights() -> None:
    """Or the test above would show nothing for Q8_0."""
    before = expected(tiny_model("llama"))
    assert difference(before, expected(through(tiny_model("llama"), Q8_0))) > 100 * TOLERANCE


def test_a_gguf_file_talks_as_the_folder_does(tmp_path: Path) -> None:
    write_tiny(tmp_path / "folder", "llama", vocab_size=264)
    model = tiny_model("llama", vocab_size=264)
    two = [
        LLM(path, device="cpu", kv_memory="1MiB")
        for path in (tmp_path / "folder", write_gguf(tmp_path / "a.gguf", model))
    ]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "user", "content": "the thin café"}]
    talked = [[llm.generate("in the end, é", greedy)[0], llm.chat(messages, greedy)[0]] for llm in two]
    for ours, theirs in zip(*talked, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].text == theirs.outputs[0].text


# ru_maxrss would count the parent's memory, which a child has until it executes; VmHWM begins with the program.
_MEASURE = """
import sys
from pathlib import Path
import torch
from saguaro.kernels.formats import packed_kind
from saguaro.model.load import load

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

before = kib("VmRSS")
kind = packed_kind("int8", torch.device("cpu")) if "packed" in sys.argv else None
loaded = load("big", Path(sys.argv[1]), torch.device("cpu"), torch.float32, kind)
print(1024 * before, 1024 * kib("VmHWM"), loaded.weight_bytes)
"""


@pytest.fixture(scope="module")
def big() -> Any:
    """200 MB of weights."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1000}
    return tiny_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=3)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["float32", "bfloat16", "gguf"])
def test_loading_makes_no_second_copy(big: Any, source: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep these for three runs
        path = Path(folder)
        if source == "gguf":
            path = write_gguf(path / "big.gguf", big)
        else:
            copy.deepcopy(big).to(getattr(torch, source)).save_pretrained(path)
        command = [sys.executable, "-c", _MEASURE, str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    baseline, peak, weights = map(int, output.split())
    assert weights > 200e6
    assert 0.9 * weights < peak - baseline < 1.3 * weights


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["gguf", "fp8"])
def test_a_packed_model_has_no_plain_copy(big: Any, source: str) -> None:
    """Beside the packed weights there is one tensor of the file, of at most 17 MB, and what the libraries take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if source == "gguf":
            path = write_gguf(path / "big.gguf", big)
        else:
            save_fp8(path, copy.deepcopy(big), LAYOUTS["blocks"])
        command = [sys.executable, "-c", _MEASURE, str(path), "packed"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    baseline, peak, weights = map(int, output.split())
    assert 50e6 < weights < 60e6
    assert 0.9 * weights < peak - baseline < 2 * weights
