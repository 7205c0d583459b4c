"""What cannot be served is refused at once, by an error that says what was given and what to do."""

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from saguaro import LLM, SamplingParams
from saguaro.errors import (
    CapacityError,
    ConfigError,
    CorruptModel,
    DownloadError,
    EmptyPrompt,
    ModelNotFound,
    PromptTooLong,
    TokenizerMismatch,
    UnsupportedModel,
)
from saguaro.model.families import FAMILIES
from saguaro.model.gguf import GGUFModel
from saguaro.model.hf_config import parse_spec
from saguaro.model.load import _allocate
from saguaro.model.tiny import tiny_model, tiny_tokenizer, write_tiny
from tests.model.write_gguf import write_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
HTML = b"<!DOCTYPE html><html><body>404</body></html>" * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def open_model(path: Path | str, **settings: Any) -> LLM:
    return LLM(path, **{"device": "cpu", "kv_memory": "1MiB", **settings})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama")).read_bytes()


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A whole model folder, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Where is the model?


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "'/no/such/folder' is no folder, no .gguf file and no Hub id"),
        ("nonsense", "'nonsense' is no folder.* check the spelling"),
        ("models/lost.gguf", "'models/lost.gguf' is no folder, no .gguf file"),
        ("double--dash/model", "'double--dash/model' is no local folder, and no Hub id either"),
    ],
)
def test_a_model_that_is_nowhere(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        open_model(name)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DownloadError, match="saguaro-tests/none is not in the Hub's cache and the Hub cannot be reached"
    ):
        open_model("saguaro-tests/none")


def test_a_file_that_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"is a file but not .gguf; give the folder"):
        open_model(folder / "config.json")


def test_a_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no config.json; a model folder holds"):
        open_model(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]", HTML, POINTER])
def test_a_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CorruptModel, match=r"config.json .* download the model again"):
        open_model(folder)


# What the config says

KNOWN = ", ".join(FAMILIES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, f"names MixtralForCausalLM.* it knows {KNOWN}"),
        ({"architectures": ["GPT2LMHeadModel"]}, "names GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "gemma3"}, "names gemma3"),
        ({"architectures": None, "model_type": None}, f"it knows {KNOWN}"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window 4096 is not supported"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32},
            "sliding_window 32 is not supported; use a checkpoint with full attention",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention layers is not supported",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported; .* llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantisation 'awq' .* use the unquantised"),
        ({"num_local_experts": 8}, "num_local_experts 8 .* mixtures of experts are not computed"),
        ({"num_experts": 64}, "num_experts 64"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only silu"),
    ],
    ids=str,
)
def test_a_model_this_engine_does_not_compute(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json is no LlamaForCausalLM config"),
        ({"vocab_size": "many"}, "config.json is no LlamaForCausalLM config .*'many'"),
        ({"rope_parameters": "default"}, "config.json is no LlamaForCausalLM config"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "config.json has no 'low_freq_factor'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, "4 heads, no multiple of its 3 key heads"),
        ({"head_dim": 15}, "heads of size 15; rotary embedding needs pairs"),
    ],
    ids=str,
)
def test_a_config_that_no_model_can_have(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CorruptModel, match=message):
        open_model(folder)


def test_a_config_without_a_size(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptModel, match=r"config.json has no 'intermediate_size'"):
        open_model(folder)


def test_a_window_that_is_not_used_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Qwen2 checkpoints carry a sliding window and the word that it is not used."""
    write_tiny(tmp_path, "qwen2")
    edit_config(tmp_path, use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    assert open_model(tmp_path).generate("a", GREEDY)[0].outputs[0].token_ids


# What the weights say


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.002, 0.5, 0.99999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CorruptModel, match=r"model.safetensors is damaged or truncated .* download it again"):
        open_model(folder)


@pytest.mark.parametrize("content", [HTML, POINTER], ids=["html", "git-lfs"])
def test_something_else_in_place_of_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptModel, match=r"model.safetensors is damaged"):
        open_model(folder)


def test_safetensors_without_some_tensors(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CorruptModel, match=r"lacks 2 tensors \(model.norm.weight, model.layers.1.mlp.up_proj.weight"):
        open_model(folder)


def test_safetensors_with_a_tensor_too_many(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": tensors["model.norm.weight"].clone()}, path)
    with pytest.raises(CorruptModel, match=r"'model.layers.0.self_attn.q_proj.bias', which LlamaForCausalLM does not"):
        open_model(folder)


def test_weights_of_another_size_than_the_config(folder: Path) -> None:
    edit_config(folder, intermediate_size=128)
    with pytest.raises(CorruptModel, match=r"is \[\d+, \d+\]; config.json says \[.*128.*\]: weights and config do not"):
        open_model(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CorruptModel, match=f"{lost.name} is missing, though the index names it"):
        open_model(tmp_path)


def test_an_index_without_a_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CorruptModel, match=r"has no weight_map"):
        open_model(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no model.safetensors .*Saguaro reads safetensors and GGUF"):
        open_model(folder)


def test_a_folder_with_pickled_weights_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"only pytorch_model.bin, which Saguaro does not unpickle; convert it"):
        open_model(folder)


# GGUF

ODD_TENSORS = ["blk.0.ffn_gate.bias", "blk.1.ffn_down.bias", "blk.0.attn_output.bias", "blk.0.attn_q_norm.weight"]
ODD_TENSORS += ["blk.0.attn_norm.bias", "output.bias", "output_norm.bias", "blk.0.attn_q.scale", "blk.0.attn_sinks"]


@pytest.mark.parametrize("n_bytes", [0, 3, 4, 8, 23, 24, 100, 1000, 5000, 100_000, -1])
def test_a_truncated_gguf_file(tiny_gguf: bytes, tmp_path: Path, n_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_gguf[:n_bytes])
    with pytest.raises(CorruptModel, match=r"cut.gguf .*download it again"):
        open_model(path)


@pytest.mark.parametrize("content", [HTML, POINTER, b"GGUF" + bytes(100)], ids=["html", "git-lfs", "magic only"])
def test_something_else_in_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptModel, match=r"other.gguf is not a complete GGUF file"):
        open_model(path)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda writer: writer.add_expert_count(8), "mixture of experts"),
        (lambda writer: writer.add_sliding_window(4096), "sliding window"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope type 'yarn'"),
        (
            lambda writer: writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 3),
            "odd.gguf is one of 3 files of a split model; merge them with llama-gguf-split --merge",
        ),
        *[
            (lambda writer, name=name: writer.add_tensor(name, np.zeros(64, np.float32)), f"odd.gguf holds .*{name}")
            for name in ODD_TENSORS
        ],
    ],
    ids=["experts", "window", "yarn", "split", *ODD_TENSORS],
)
def test_a_gguf_feature_this_engine_does_not_compute(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        open_model(write_gguf(tmp_path / "odd.gguf", tiny_model("llama"), add=add))


def test_a_gguf_file_whose_layers_differ(tmp_path: Path) -> None:
    model = GGUFModel(write_gguf(tmp_path / "odd.gguf", tiny_model("llama")))
    model.metadata["llama.feed_forward_length"] = [96, 64]
    with pytest.raises(
        UnsupportedModel, match=r"odd.gguf has a list as llama.feed_forward_length; .* one value for all"
    ):
        model.config()


def test_a_gguf_file_with_biases_of_queries_only(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))

    with pytest.raises(UnsupportedModel, match="biases of queries and none of the attention's output"):
        open_model(write_gguf(tmp_path / "odd.gguf", tiny_model("llama"), add=add))


def test_a_later_part_of_a_split_gguf_file(tmp_path: Path) -> None:
    """It has no metadata but its number and their count."""
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "")
    writer.kv_data[0].clear()
    writer.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, 2)
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"b.gguf is one of 2 files"):
        open_model(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (4, b"\0\0\0\3", "big-endian"),
        (b"token_embd.weight\x02\0\0\0" + struct.pack("<QQ", 64, 288), struct.pack("<I", 250), "quantisation 250"),
        (b"token_embd.weight\x02\0\0\0" + struct.pack("<QQ", 64, 288), struct.pack("<I", 24), "as I8, which"),
    ],
    ids=["big-endian", "unknown", "integers"],
)
def test_a_gguf_file_in_another_writing(
    tiny_gguf: bytes, tmp_path: Path, at: int | bytes, value: bytes, message: str
) -> None:
    start = at if isinstance(at, int) else tiny_gguf.index(at) + len(at)
    (tmp_path / "odd.gguf").write_bytes(tiny_gguf[:start] + value + tiny_gguf[start + len(value) :])
    with pytest.raises(UnsupportedModel, match=f"odd.gguf .*{message}"):
        open_model(tmp_path / "odd.gguf")


@pytest.mark.parametrize("n_texts", [2**63, 2**64 - 1, 10**6])
def test_a_gguf_header_that_promises_more_than_the_file(tiny_gguf: bytes, tmp_path: Path, n_texts: int) -> None:
    key = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
    start = tiny_gguf.index(key) + len(key)
    (tmp_path / "odd.gguf").write_bytes(tiny_gguf[:start] + struct.pack("<Q", n_texts) + tiny_gguf[start + 8 :])
    with pytest.raises(CorruptModel, match=r"odd.gguf is not a complete GGUF file"):
        open_model(tmp_path / "odd.gguf")


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "falcon.gguf", tiny_model("llama"), family="falcon")
    with pytest.raises(UnsupportedModel, match=r"architecture 'falcon'; Saguaro reads llama, qwen2, qwen3"):
        open_model(path)


# Tokenizers


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(TokenizerMismatch, match=r"holds no tokenizer.json or tokenizer.model; copy the model's"):
        open_model(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", HTML], ids=["empty", "cut", "no model", "html"])
def test_a_corrupt_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerMismatch, match=r"the tokenizer in .* cannot be read"):
        open_model(folder)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", vocab_size=200)
    tiny_tokenizer(288).save_pretrained(tmp_path)
    with pytest.raises(TokenizerMismatch, match=r"makes ids up to 263, the weights know 200: .* not of the same model"):
        open_model(tmp_path)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_row": 1}, "unknown key 'max_batch_row'; did you mean 'max_batch_rows'?"),
        ({"unknown_key": 1}, "unknown key 'unknown_key'; known keys: draft, .*method, lookahead"),
        ({"kv_memory": "lots"}, "kv_memory is 'lots'; write a size such as 512MiB"),
        ({"dtype": "int3"}, "dtype is 'int3'; it must be one of auto, float32, bfloat16"),
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu, cuda"),
        ({"device": "cuda:99"}, r"device is 'cuda:99'; this machine has \d+ CUDA devices"),
        ({"method": "magic"}, "magic"),
        ({"page_size": 0}, "page_size is 0; it must be "),
        ({"max_batch_rows": 2.5}, "max_batch_rows is 2.5; it must be of type int"),
        ({"max_batch_tokens": 3}, "max_batch_tokens is 3; it must be between max_batch_rows, 32, and"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be(tiny: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_model(tiny, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory": "1KiB"}, r"kv_memory 1.0 KiB holds 0 tokens .* raise kv_memory to at least 16.0 KiB"),
        ({"kv_memory": "32KiB", "max_model_len": 128}, r"holds 64 tokens .* 128 are needed: .* or lower max_model_len"),
        ({"max_model_len": 257}, "max_model_len is 257; the model knows 256 positions"),
    ],
    ids=str,
)
def test_a_memory_too_small_for_one_request(tiny: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        open_model(tiny, **settings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, r"temperature is -1; it must be 0 \(greedy\) or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be of type float"),
        ({"top_p": 0}, "top_p is 0; it must be more than 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"stop": ("",)}, "stop is .*non-empty strings"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens is 9; it must be at most max_tokens, 3"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
    ],
    ids=str,
)
def test_a_sampling_parameter_that_cannot_be(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)


# Requests: one is refused, others go on


@pytest.fixture(scope="module")
def one(tiny: Path) -> LLM:
    return open_model(tiny, max_model_len=64, max_batch_rows=4)


@pytest.fixture
def small(one: LLM) -> Iterator[LLM]:
    """A model of 64 positions; after the refusal it must serve as before, with nothing left behind."""
    before = one.generate("still here?", GREEDY)[0].outputs[0].token_ids
    yield one
    assert not one.engine.scheduler.has_work
    assert one.generate("still here?", GREEDY)[0].outputs[0].token_ids == before
    one.engine.pool.check(one.engine.scheduler.tables())
    assert one.engine.pool.n_free == one.engine.pool.n_pages


def test_a_prompt_longer_than_the_context(small: LLM) -> None:
    with pytest.raises(
        PromptTooLong, match=r"the prompt has 70 tokens, at most 63 fit \(max_model_len is 64\); shorten"
    ):
        small.generate("x" * 70, GREEDY)


def test_a_prompt_as_long_as_the_context_has_no_room_for_a_token(small: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"at most 63 fit"):
        small.generate("x" * 64, SamplingParams(max_tokens=None))
    assert len(small.generate("x" * 63, SamplingParams(max_tokens=None))[0].outputs[0].token_ids) == 1


def test_an_output_that_cannot_fit(small: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"need 65, 64 fit .* set max_tokens to at most 54, or to None"):
        small.generate("x" * 10, SamplingParams(max_tokens=55))


@pytest.mark.parametrize("prompt", ["", [[]], [""]], ids=repr)
def test_an_empty_prompt(small: LLM, prompt: Any) -> None:
    with pytest.raises(EmptyPrompt, match=r"the prompt has no tokens; give at least one"):
        small.generate(prompt, GREEDY)


def test_an_empty_stream(small: LLM) -> None:
    with pytest.raises(EmptyPrompt, match=r"the prompt has no tokens"):
        small.stream([], GREEDY)


@pytest.mark.parametrize("token", ["a", 1.0, None])
def test_a_prompt_that_is_no_list_of_ids(small: LLM, token: Any) -> None:
    with pytest.raises(ConfigError, match=r"it must be text or a list of token ids"):
        small.engine.add([1, token], GREEDY)


@pytest.mark.parametrize("token", [288, -1, 2**40])
def test_a_token_that_is_not_in_the_vocabulary(small: LLM, token: Any) -> None:
    with pytest.raises(ConfigError, match=f"prompt names token {token!r}; ids go from 0 to 287"):
        small.engine.add([1, token], GREEDY)


@pytest.mark.parametrize("params", [{"logit_bias": {288: 1.0}}, {"stop_token_ids": (288,)}], ids=str)
def test_a_parameter_that_names_an_unknown_token(small: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(params))} names token 288"):
        small.generate("a", SamplingParams(**params))


def test_one_bad_prompt_of_several_is_named_and_all_are_withdrawn(small: LLM) -> None:
    with pytest.raises(PromptTooLong, match=r"prompt 1: the prompt has 99 tokens"):
        small.generate(["good", "x" * 99, "good"], GREEDY)


def test_a_refusal_does_not_disturb_a_running_request(small: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=20, ignore_eos=True)
    alone = small.generate("a long story", params)[0].outputs[0]
    stream = small.stream("a long story", params)
    tokens = list(next(stream).token_ids)
    with pytest.raises(PromptTooLong):
        small.generate("x" * 99, GREEDY)
    small.engine.pool.check(small.engine.scheduler.tables())
    for delta in stream:
        tokens += delta.token_ids
    assert tokens == alone.token_ids


def test_messages_that_are_none(small: LLM) -> None:
    with pytest.raises(ConfigError, match=r"must be a mapping with 'role' and 'content'"):
        small.chat([{"role": "user"}], GREEDY)
    with pytest.raises(ConfigError, match=r"messages is empty"):
        small.chat([], GREEDY)


def test_a_chat_without_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    llm = open_model(folder)
    with pytest.raises(TokenizerMismatch, match=r"has no chat template; use generate"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert llm.generate("hi", GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("wrong", [{"architectures": 5}, {"quantization_config": "x"}, {"layer_types": 3}])
def test_a_config_of_the_wrong_types_is_corrupt(wrong: dict[str, object]) -> None:
    with pytest.raises(CorruptModel, match=r"config\.json is no"):
        parse_spec({"model_type": "llama", **wrong})


def test_a_model_larger_than_memory_names_the_remedy() -> None:
    spec = parse_spec({**tiny_model("llama").config.to_dict(), "vocab_size": 2**40, "hidden_size": 2**16})
    with pytest.raises(CapacityError, match="use a smaller model, bfloat16 or another device"):
        _allocate(spec, torch.device("cpu"), torch.float32)
