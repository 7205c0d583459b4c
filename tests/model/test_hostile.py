"""Model folders made to do harm: code to run, names that lead elsewhere, pipes, sizes that no file backs."""

import json
import os
import pty
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from saguaro.errors import CorruptModel, ModelNotFound, RequestError, SaguaroError, TokenizerMismatch
from saguaro.model.hf_config import read_spec
from saguaro.model.load import load, load_borrower, locate
from saguaro.model.shapes import Shapes
from saguaro.model.tiny import FAMILIES, tiny_model, write_tiny
from saguaro.model.tokenizer import load_tokenizer
from saguaro.model.weights import destinations
from tests.model.write_gguf import write_gguf

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A whole model folder, to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def open_all(path: Path) -> None:
    loaded = load("m", locate(str(path)), CPU, torch.float32)
    load_tokenizer(path, loaded.model.spec.n_vocab)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Code


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(tiny: Path, tmp_path: Path) -> None:
    """On a terminal transformers would ask whether to run it; here a terminal says yes to everything."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "own.py").write_text("open('ran', 'w')\nclass Own: pass\n")
    maps = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}
    edit(folder / "tokenizer_config.json", auto_map=maps, tokenizer_class="Own")
    edit(folder / "config.json", auto_map=maps, model_type="own")
    script = "import sys; from pathlib import Path; from saguaro.model.tokenizer import load_tokenizer\n"
    script += "load_tokenizer(Path(sys.argv[1]), 288)"
    main, child = pty.openpty()
    os.write(main, b"y\n" * 20)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        stdin=child,
        stdout=child,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HOME": str(tmp_path / "hub")},
        check=False,
    )
    os.close(main)
    os.close(child)
    error = next(line for line in done.stderr.splitlines()[::-1] if "TokenizerMismatch" in line)
    assert f"the tokenizer in {folder} is code" in error
    assert "which is never run; copy the model's tokenizer.json there" in error
    assert not list(tmp_path.rglob("ran"))


# Names and kinds of files


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a\0b", "x" * 5000, 5, None],
    ids=lambda name: str(name)[:30],
)
def test_an_index_names_neighbours_only(folder: Path, name: object) -> None:
    other = folder.parent / "other"
    other.mkdir()
    (folder / "model.safetensors").rename(other / "model.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(other / "model.safetensors"), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptModel, match=r"index.json names .*; it must be the name of a file beside it") as caught:
        open_all(folder)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "token_map.safetensors",
        "special_tokens_map.json",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "broken link", "circle", "link to a pipe", "device"])
def test_what_is_no_file_is_refused_unopened(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(folder / "pipe")
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "broken link": lambda: path.symlink_to("nowhere"),
        "circle": lambda: path.symlink_to(path),
        "link to a pipe": lambda: path.symlink_to("pipe"),
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    with pytest.raises(CorruptModel, match=f"{name} (is a|cannot be read)"):
        open_all(folder)


def test_links_out_of_the_folder_work_as_in_the_cache_of_the_hub(tiny: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(tiny.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    open_all(snapshot)


def test_a_gguf_path_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound, match=r"m.gguf' is no folder, no .gguf file"):
        open_all(tmp_path / "m.gguf")
    with pytest.raises(CorruptModel, match=r"m.gguf is a pipe"):
        load_tokenizer(tmp_path / "m.gguf", 288)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-this-name/model", "a/" * 3000])
def test_a_model_name_that_cannot_be_a_path(name: str) -> None:
    with pytest.raises(ModelNotFound, match="check the spelling") as caught:
        locate(name)
    assert len(str(caught.value)) < 1000


def test_a_tokenizer_config_names_neighbours_only(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", fast_tokenizer_files=["../../tokenizer.1.0.json"])
    with pytest.raises(CorruptModel, match=r"tokenizer_config.json names '../../tokenizer.1.0.json'"):
        open_all(folder)


# Sizes


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "head_dim",
        "num_key_value_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [10**9, 10**30, 0, -1, 2.0, 2.5, True, "64", [], {}])
def test_a_size_that_the_weights_do_not_have(folder: Path, key: str, value: object) -> None:
    if key == "num_key_value_heads" and value is True:
        edit(folder / "config.json", num_attention_heads=1)
    edit(folder / "config.json", **{key: value})
    with pytest.raises(CorruptModel, match=str(folder)):
        open_all(folder)


def test_layers_that_are_only_promised_take_no_memory(folder: Path) -> None:
    """Within what Python and torch themselves need: a billion layers, or half a terabyte of embedding."""
    script = "import resource, sys, torch; from pathlib import Path; from saguaro.model.load import load\n"
    script += "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    script += "resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))\n"
    script += "load('m', Path(sys.argv[1]), torch.device('cpu'), torch.float32)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    edit(folder / "config.json", num_hidden_layers=10**9)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert "CorruptModel" in done.stderr
    assert "lacks 8999999982 tensors (model.layers.2.self_attn.q_proj.weight" in done.stderr


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_shapes_are_those_of_the_model(tmp_path: Path, family: str, tied: bool) -> None:
    write_tiny(tmp_path, family, tied=tied)
    model = load("m", tmp_path, CPU, torch.float32).model
    needed, places = Shapes(read_spec(tmp_path)), destinations(model)
    assert {name: needed.get(name) for name in needed} == {name: tuple(place.shape) for name, place in places.items()}


# Values


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": ' * 5_000 + "1" + "}" * 5_000,
        '{"hidden_size": ' + "9" * 5_000 + "}",
        '{"a": 1' + " " * 2**24,
    ],
    ids=["deep", "deep objects", "digits", "long"],
)
def test_json_that_is_too_much(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CorruptModel, match=r"config.json is .*download the model again"):
        open_all(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": float("inf")},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e-45}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"tie_word_embeddings": "no"},
        {"eos_token_id": [1.5]},
        {"saguaro": "target"},
    ],
    ids=str,
)
def test_numbers_that_no_model_has(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "config.json", **changes)
    (folder / "generation_config.json").unlink()
    with pytest.raises(CorruptModel, match=str(folder)):
        open_all(folder)


def test_a_tensor_of_whole_numbers_is_no_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(64, dtype=torch.int64)}, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"'model.norm.weight' is of I64; weights are F32"):
        open_all(folder)


@pytest.mark.parametrize("scale", [torch.ones(64, 1, 1), torch.ones(1000, 1, 1), torch.ones(64, 1).int(), None])
def test_int8_rows_need_a_scale_each(folder: Path, scale: torch.Tensor | None) -> None:
    """A scale of another shape would be multiplied out to something far larger than either."""
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    if scale is not None:
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"q_proj.weight' is (int8 and .* not beside|\[64, 64\] and its scale)"):
        open_all(folder)


@pytest.mark.parametrize(
    ("frequencies", "said"),
    [("many", "'many'"), ([1.0], "1 values"), ([None] * 8, "8 values"), ([1e400] * 8, "finite")],
)
def test_a_draft_with_impossible_rotations(folder: Path, frequencies: object, said: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    save_file({"ids": torch.arange(288)}, folder / "token_map.safetensors")
    edit(folder / "config.json", saguaro={"embedding": "target", "frequencies": frequencies})
    with pytest.raises(CorruptModel, match=said):
        load_borrower(folder, Path("target"), embedding, CPU, torch.float32)


def test_a_token_map_of_floats(folder: Path) -> None:
    save_file({"ids": torch.full((288,), float("nan"))}, folder / "token_map.safetensors")
    with pytest.raises(CorruptModel, match=r"holds `ids` of torch.float32"):
        open_all(folder)


# GGUF


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("general.alignment", "32", gguf.GGUFValueType.STRING),
        ("general.alignment", [32], gguf.GGUFValueType.ARRAY),
        ("llama.block_count", "two", gguf.GGUFValueType.STRING),
        ("llama.block_count", 10**9, gguf.GGUFValueType.UINT32),
        ("llama.attention.layer_norm_rms_epsilon", "small", gguf.GGUFValueType.STRING),
        ("llama.rope.freq_base", "x", gguf.GGUFValueType.STRING),
        ("llama.rope.freq_base", 0.0, gguf.GGUFValueType.FLOAT32),
        ("llama.rope.freq_base", float("nan"), gguf.GGUFValueType.FLOAT32),
        ("split.count", "x", gguf.GGUFValueType.STRING),
        ("tokenizer.ggml.eos_token_id", -5, gguf.GGUFValueType.INT32),
        ("tokenizer.ggml.eos_token_id", 1.5, gguf.GGUFValueType.FLOAT32),
        ("tokenizer.chat_template", 5, gguf.GGUFValueType.INT32),
        ("tokenizer.ggml.merges", ["ab"], gguf.GGUFValueType.ARRAY),
        ("tokenizer.ggml.merges", ["a nowhere"], gguf.GGUFValueType.ARRAY),
        ("tokenizer.ggml.merges", [1, 2], gguf.GGUFValueType.ARRAY),
        ("tokenizer.ggml.tokens", ["a" * 2000] * 288, gguf.GGUFValueType.ARRAY),
    ],
)
def test_metadata_of_the_wrong_type(tmp_path: Path, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        items = {int: gguf.GGUFValueType.INT32, str: gguf.GGUFValueType.STRING}
        item = items[type(value[0])] if isinstance(value, list) else None
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind, item)

    path = write_gguf(tmp_path / "odd.gguf", tiny_model("llama"), add=add)
    with pytest.raises(SaguaroError, match=r"odd.gguf"):
        open_all(path)


def test_a_gguf_header_in_a_file_without_end(tmp_path: Path) -> None:
    """A sparse file has terabytes of zeros, each 24 of which are a tensor without a name."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0))
    os.truncate(path, 2**42)
    with pytest.raises(CorruptModel, match=r"announces 1099511627776 tensors"):
        open_all(path)


# Regular expressions


def write_pattern(folder: Path, pattern: str) -> None:
    """Split texts by a regular expression before they are encoded."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    path.write_text(json.dumps(content))


def test_a_regular_expression_that_gives_up_ends_the_request_alone(folder: Path) -> None:
    write_pattern(folder, "(x+x+)+y")
    tokenizer = load_tokenizer(folder, 288)
    with pytest.raises(RequestError, match=r"fails on this text .*retry-limit"):
        tokenizer.encode("x" * 40)
    assert tokenizer.encode("the end")


def test_a_regular_expression_that_gives_up_on_every_text_is_refused(folder: Path) -> None:
    write_pattern(folder, "(?:.*.*.*){4}4[^4]")
    with pytest.raises(TokenizerMismatch, match=r"cannot be read .*retry-limit"):
        load_tokenizer(folder, 288)
