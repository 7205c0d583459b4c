"""A reduced head says what the whole one says of its tokens, and nothing of the others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.errors import CorruptModel
from saguaro.model.load import load
from saguaro.model.tiny import write_tiny
from saguaro.model.token_map import FILE, read_token_map, write_token_map
from saguaro.model.transformer import Transformer

CPU = torch.device("cpu")
IDS = torch.tensor([7, 100, 3, 263, 0, 101, 105, 110, 116, 104, 256, 32])  # in no order


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("whole"), "llama", num_hidden_layers=3)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """The same with a head of a few rows."""
    return reduce(Path(shutil.copytree(whole, tmp_path / "reduced")), IDS)


def reduce(folder: Path, ids: Tensor) -> Path:
    """Cut the head down to these tokens."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][ids].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"ids": ids}, folder / FILE)
    return folder


def model(folder: Path) -> Transformer:
    return load("tiny", folder, CPU, torch.float32).model


def test_a_whole_head_has_no_map(whole: Path) -> None:
    assert read_token_map(whole, 288) is None
    assert model(whole).token_map is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_map_is_read_in_order(folder: Path, dtype: torch.dtype) -> None:
    save_file({"ids": IDS.to(dtype)}, folder / FILE)
    ids = read_token_map(folder, 264)
    assert ids is not None
    assert ids.dtype == torch.int64
    assert ids.equal(IDS)


def test_a_map_is_written_as_it_is_read(tmp_path: Path) -> None:
    write_token_map(IDS, tmp_path)
    ids = read_token_map(tmp_path, 264)
    assert ids is not None
    assert ids.equal(IDS)


def test_logits_are_those_of_the_whole_head(whole: Path, folder: Path) -> None:
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    full, reduced = model(whole).logits(hidden), model(folder).logits(hidden)
    assert reduced.shape == full.shape
    assert torch.allclose(reduced[:, IDS], full[:, IDS], atol=1e-5)
    others = torch.ones(288, dtype=torch.bool).index_fill_(0, IDS, False)
    assert reduced[:, others].eq(-torch.inf).all()


def test_a_tied_config_keeps_its_whole_embedding(folder: Path, whole: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    reduced = model(folder)
    assert torch.equal(reduced.embedding, model(whole).embedding)
    assert reduced.head.matrix.shape == (64, len(IDS))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptModel, match=r"lacks 1 tensors \(lm_head.weight"):
        model(folder)


def _garbage(path: Path) -> None:
    path.write_bytes(b"<html>")


def _other_name(path: Path) -> None:
    save_file({"tokens": IDS}, path)


def _ids(*ids: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        save_file({"ids": torch.tensor(ids, dtype=torch.int64)}, path)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_garbage, r"token_map.safetensors is damaged or holds no `ids` .*; write the draft again"),
        (_other_name, r"token_map.safetensors is damaged or holds no `ids`"),
        (_ids(), r"names tokens nothing; config.json knows 0 to 287"),
        (_ids(4, -1), r"names tokens -1 to 4; config.json knows 0 to 287"),
        (_ids(4, 288), r"names tokens 4 to 288; config.json knows 0 to 287"),
        (_ids(4, 5, 4), r"names a token twice; each row of the head needs a token of its own"),
        (_ids(4, 5), r"'lm_head.weight' in .* is \[12, 64\]; config.json says \[2, 64\]"),
    ],
)
def test_maps_that_cannot_be(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder / FILE)
    with pytest.raises(CorruptModel, match=message):
        model(folder)


@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reduced_draft_gives_the_tokens_of_ar(
    whole: Path, folder: Path, tmp_path: Path, method: str, temperature: float
) -> None:
    """It knows the tokens the target says, and one in three it does not know: it is of use, and changes nothing."""
    llm = LLM(whole, device="cpu", kv_memory="1MiB")
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=32, ignore_eos=True, repetition_penalty=1.2)
    expected = llm.generate("the end", params)[0]
    said = sorted(set(expected.token_ids))
    ids = torch.tensor([token for at, token in enumerate(said) if at % 3])
    draft = reduce(Path(shutil.copytree(whole, tmp_path / "draft")), ids)
    drafted = llm.sibling(method=method, draft=str(draft), link="inline", lookahead=3, budget=4)
    result = drafted.generate("the end", params)[0]
    assert result.token_ids == expected.token_ids
    assert result.outputs[0].n_rounds < expected.outputs[0].n_rounds
