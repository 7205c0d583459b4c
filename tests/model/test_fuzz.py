"""Damaged model files: whatever a byte or a value of them becomes, the model loads or an error of ours says why not.

Every case is made from a seed. A failure names the seed: run that case again to see it.
"""

import copy
import json
import math
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from saguaro.errors import RequestError, SaguaroError
from saguaro.model.generation import generation_defaults
from saguaro.model.load import load, locate
from saguaro.model.tiny import tiny_model, write_tiny
from saguaro.model.tokenizer import load_tokenizer
from tests.model.write_gguf import write_gguf

N_CASES = 80  # of each kind of file

DEEP = json.loads("[" * 200 + "]" * 200)
VALUES: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 10**9, 2**31, 2**63, 2**64, 10**30, 10**400, 0.0, -0.5, 1.5]
VALUES += [1e-300, 1e300, float("inf"), float("-inf"), float("nan"), "", "x", "x" * 5000, "../../etc/passwd", "\0"]
VALUES += ["\ud800", [], [0], [[]], ["x", None], {}, {"a": 1}, {"": {"": []}}, DEEP]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("sharded"), "llama")
    (folder / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama")).read_bytes()


def open_all(path: Path) -> None:
    """Read everything there is: the weights, the tokenizer, a text, a conversation."""
    loaded = load("fuzz", locate(str(path)), torch.device("cpu"), torch.float32)
    generation_defaults("auto", path)
    tokenizer = load_tokenizer(path, loaded.model.spec.n_vocab)
    tokens = tokenizer.encode("the end of the tale, 1234")
    tokenizer.decode(tokens)
    assert all(isinstance(tokenizer.bytes.of(token), bytes) for token in tokens)
    assert isinstance(tokenizer.chat_template.names, frozenset)
    tokenizer.encode_chat([{"role": "user", "content": "the end"}])


def try_to_open(path: Path, seed: int | str) -> bool:
    """Whether it opens; an error must be one of ours, say which file, and be short."""
    message = ""
    try:
        open_all(path)
    except RequestError:  # it opens, and the template or the tokenizer does not take the text
        return True
    except SaguaroError as e:
        message = str(e)
    except BaseException as e:
        pytest.fail(f"seed {seed}: {type(e).__name__}: {e}")
    if not message:
        return True
    assert str(path) in message, (seed, message)
    assert len(message) < 3000, (seed, message)
    return False


def mutated(value: Any, rng: random.Random) -> Any:
    """The same JSON with one value changed, removed or added, anywhere in it."""
    value = copy.deepcopy(value)
    holder, key = value, rng.choice(list(value))
    while isinstance(holder[key], dict | list) and len(holder[key]) and rng.random() < 0.8:
        holder = holder[key]
        key = rng.randrange(len(holder)) if isinstance(holder, list) else rng.choice(list(holder))
    what = rng.random()
    if what < 0.1:
        del holder[key]
    elif what < 0.2 and isinstance(holder, dict):
        holder[str(rng.choice(VALUES))[:40]] = rng.choice(VALUES)
    elif what < 0.3:
        holder[key] = [holder[key]]
    else:
        holder[key] = rng.choice(VALUES)
    return value


def damaged(content: bytes, rng: random.Random, end: int) -> bytes:
    """The same bytes with a few changed, put in or left out before `end`."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        at = rng.randrange(min(end, len(found)) + 1)
        what = rng.randrange(4)
        if what == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif what == 1:
            found[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 255]))
        elif what == 2:
            del found[at : at + rng.choice([1, 8, 100])]
        else:
            found[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
    return bytes(found)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "saguaro"]
)
def test_json_of_a_folder(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    path = folder / ("config.json" if name == "saguaro" else name)
    content = json.loads(path.read_text())
    if name == "saguaro":
        content = {"saguaro": {"embedding": "own", "frequencies": [1.0] * 8}, **content}
    if name == "tokenizer_config.json":  # a template has a file of its own, or is said here
        content["chat_template"] = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
    for seed in range(N_CASES):
        rng = random.Random(f"{name}{seed}")
        text = json.dumps(mutated(content, rng))
        path.write_bytes(damaged(text.encode(), rng, len(text)) if seed % 4 == 0 else text.encode())
        try_to_open(folder, seed)


def test_the_index_of_the_weights(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    for seed in range(N_CASES):
        path.write_text(json.dumps(mutated(content, random.Random(seed))))
        try_to_open(folder, seed)


def test_headers_of_safetensors(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    n_header = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:n_header])
    for seed in range(N_CASES):
        rng = random.Random(seed)
        if seed % 2:
            path.write_bytes(damaged(content, rng, n_header))
        else:
            text = json.dumps(mutated(header, rng)).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + content[n_header:])
        try_to_open(folder, seed)


def test_gguf_headers(tiny_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    end = tiny_gguf.index(b"blk.1.ffn_norm.weight") + 60
    for seed in range(3 * N_CASES):
        path.write_bytes(damaged(tiny_gguf, random.Random(seed), end))
        try_to_open(path, seed)


def test_the_fuzz_opens_what_is_whole(tiny: Path, sharded: Path, tiny_gguf: bytes, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(tiny_gguf)
    assert all(try_to_open(path, 0) for path in (tiny, sharded, tmp_path / "whole.gguf"))


KINDS = gguf.GGUFValueType
OTHERS: list[tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]] = [
    ("text", KINDS.STRING, None),
    ("", KINDS.STRING, None),
    (True, KINDS.BOOL, None),
    (0, KINDS.UINT32, None),
    (3, KINDS.UINT8, None),
    (2**64 - 1, KINDS.UINT64, None),
    (-1, KINDS.INT32, None),
    (1.5, KINDS.FLOAT32, None),
    (0.0, KINDS.FLOAT64, None),
    (math.inf, KINDS.FLOAT32, None),
    (1e300, KINDS.FLOAT64, None),
    (math.nan, KINDS.FLOAT32, None),
    ([1, 2], KINDS.ARRAY, KINDS.INT32),
    ([0.5, math.nan], KINDS.ARRAY, KINDS.FLOAT32),
    (["a", "b c", "d\0"], KINDS.ARRAY, KINDS.STRING),
]


def test_metadata_of_other_types(tmp_path: Path) -> None:
    model, keys = tiny_model("llama"), list[str]()
    write_gguf(tmp_path / "whole.gguf", model, add=lambda writer: keys.extend(writer.kv_data[0]))
    keys += ["general.alignment", "split.count", "llama.rope.scaling.type", "llama.rope.scaling.factor"]
    keys += ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", "llama.rope.dimension_count"]
    for key in keys:
        for entry in random.Random(key).sample(OTHERS, 5):

            def swap(writer: gguf.GGUFWriter, key: str = key, entry: Any = entry) -> None:
                writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(*entry)

            try_to_open(write_gguf(tmp_path / "odd.gguf", model, add=swap), f"{key} {entry}")
