"""A draft is found, cut or refused: what drop: means, and whose vocabulary fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro.config import DraftConfig
from saguaro.draft.load import dropped_layers, load_draft
from saguaro.errors import ConfigError, CorruptModel, ModelNotFound, TokenizerMismatch
from saguaro.model.load import load
from saguaro.model.tiny import EOS, tiny_model, write_tiny
from saguaro.model.transformer import Transformer
from tests.draft.config import new_config
from tests.model.write_gguf import write_gguf

N_KNOWN = 264  # tokens of the tiny tokenizer; the tiny models have 288 rows
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Transformer:
    return load("target", target_folder, CPU, torch.float32).model


@pytest.fixture
def folder(target_folder: Path, tmp_path: Path) -> Path:
    """A copy of the target as a draft, to be changed."""
    return Path(shutil.copytree(target_folder, tmp_path / "draft"))


def settings(draft: Path | str, target: Path, **changes: Any) -> DraftConfig:
    return new_config(N_KNOWN, draft=str(draft), target=str(target), **changes)


def respell(folder: Path, names: dict[str, str]) -> None:
    """Give tokens of a tokenizer other names; the merges go, for they are made of names."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"] = {names.get(text, text): token for text, token in raw["model"]["vocab"].items()}
    raw["model"]["merges"] = []
    raw["added_tokens"] = [{**one, "content": names.get(one["content"], one["content"])} for one in raw["added_tokens"]]
    path.write_text(json.dumps(raw))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace(EOS, names.get(EOS, EOS)))


# drop:


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("drop:3", [3]),
        ("drop:3,5-7", [3, 5, 6, 7]),
        ("drop:0-2,1,9", [0, 1, 2, 9]),
        ("drop: 4 , 2", [2, 4]),
        ("drop:6-6", [6]),
    ],
)
def test_what_drop_leaves_out(name: str, layers: list[int]) -> None:
    assert dropped_layers(name, n_layers=10) == layers


@pytest.mark.parametrize(
    "name",
    [
        f"drop:{what}"
        for what in ("", ",", "a", "1,", "1,,2", "-1", "1-", "1-2-3", "1.5", "1;2", "7-5", "1,7-5", "7-5,1")
    ],
)
def test_what_drop_does_not_understand(name: str) -> None:
    with pytest.raises(ConfigError) as e:
        dropped_layers(name, n_layers=10)
    assert str(e.value) == f"draft is {name!r}; write drop: and layers, such as drop:20 or drop:4,9-12"


@pytest.mark.parametrize(
    "name", ["drop:4", "drop:0,17", "drop:2-4", "drop:0-3", "drop:3,2,1,0", "drop:0-9999999999999"]
)
def test_layers_the_target_does_not_have_or_cannot_spare(name: str) -> None:
    with pytest.raises(ConfigError) as e:
        dropped_layers(name, n_layers=4)
    assert str(e.value) == f"draft is {name!r}; the target has layers 0 to 3, and one must be left"


def test_drop_shares_every_weight(target: Transformer, target_folder: Path) -> None:
    draft = load_draft(settings("drop:1-2", target_folder), target)
    assert draft.spec.n_layers == len(draft.layers) == 2
    assert [next(layer.parameters()).data_ptr() for layer in draft.layers] == [
        next(target.layers[index].parameters()).data_ptr() for index in (0, 3)
    ]
    ours = {p.data_ptr() for p in target.parameters()}
    assert {p.data_ptr() for p in draft.parameters()} <= ours
    assert (draft.head.data_ptr(), draft.embedding.data_ptr()) == (target.head.data_ptr(), target.embedding.data_ptr())
    assert (target.spec.n_layers, len(target.layers)) == (4, 4)


def test_drop_loads_the_target_where_it_is_not_at_hand(target: Transformer, target_folder: Path) -> None:
    shared = load_draft(settings("drop:1", target_folder), target)
    own = load_draft(settings("drop:1", target_folder), None)
    assert own.head.data_ptr() != shared.head.data_ptr()
    pairs = zip(own.parameters(), shared.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Another model


def test_a_draft_has_a_dtype_of_its_own(folder: Path, target_folder: Path, target: Transformer) -> None:
    draft = load_draft(settings(folder, target_folder, dtype="bfloat16"), target)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert torch.equal(draft.head, target.head.bfloat16())


@pytest.mark.parametrize("n_vocab", [N_KNOWN, 512])
def test_a_draft_may_have_more_or_fewer_rows_of_padding(tmp_path: Path, target_folder: Path, n_vocab: int) -> None:
    draft = write_tiny(tmp_path, "qwen2", seed=1, vocab_size=n_vocab)
    assert load_draft(settings(draft, target_folder), None).spec.n_vocab == n_vocab


def test_a_draft_that_knows_fewer_tokens(tmp_path: Path, target_folder: Path) -> None:
    draft = write_tiny(tmp_path, "llama", vocab_size=263)
    message = f"the draft {draft} knows 263 tokens, the target {target_folder} says 264; a draft must have the target's"
    with pytest.raises(TokenizerMismatch, match=message):
        load_draft(settings(draft, target_folder), None)


def test_a_draft_with_another_tokenizer(folder: Path, target_folder: Path) -> None:
    respell(folder, {"a": "b", "b": "c", "c": "d", "d": "a"})
    with pytest.raises(TokenizerMismatch) as e:
        load_draft(settings(folder, target_folder), None)
    assert str(e.value).startswith(
        f"4 of 264 tokens mean something else to the draft {folder} than to the target {target_folder} "
        "(token 97 is 'b' to the draft and 'a' to the target); a draft must have the target's vocabulary"
    )


def test_a_draft_whose_tokenizer_is_shorter(folder: Path, target_folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"] = {text: token for text, token in raw["model"]["vocab"].items() if token <= 256}
    raw["model"]["merges"] = []
    path.write_text(json.dumps(raw))
    message = r"7 of 264 tokens .*\(token 257 is None to the draft and 'ĠÃ' to the target\)"
    with pytest.raises(TokenizerMismatch, match=message):
        load_draft(settings(folder, target_folder), None)


def test_a_special_token_may_have_another_name(folder: Path, target_folder: Path) -> None:
    respell(folder, {EOS: "<|fin|>"})
    assert load_draft(settings(folder, target_folder), None).spec.n_layers == 4


def _no_tokenizer(draft: Path, target: Path) -> None:
    for path in draft.glob("tokenizer*"):
        path.unlink()


def _target_without(draft: Path, target: Path) -> None:
    _no_tokenizer(target, draft)


@pytest.mark.parametrize("strip", [_no_tokenizer, _target_without])
def test_weights_alone_are_believed_to_fit(folder: Path, tmp_path: Path, strip: Callable[[Path, Path], None]) -> None:
    """A draft made for this target needs no tokenizer, and a target may have been given one from elsewhere."""
    other = Path(shutil.copytree(folder, tmp_path / "target"))
    strip(folder, other)
    assert load_draft(settings(folder, other), None).spec.n_layers == 4


def test_a_gguf_draft(tmp_path: Path, target_folder: Path) -> None:
    draft = write_gguf(tmp_path / "draft.gguf", tiny_model("qwen2", seed=2))
    assert load_draft(settings(draft, target_folder), None).spec.n_layers == 2
    small = write_gguf(tmp_path / "small.gguf", tiny_model("qwen2", vocab_size=260))
    with pytest.raises(TokenizerMismatch, match="knows 260 tokens"):
        load_draft(settings(small, target_folder), None)


def test_a_draft_that_is_damaged_or_gone(folder: Path, target_folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CorruptModel, match=r"model.safetensors is damaged"):
        load_draft(settings(folder, target_folder), None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"holds no model.safetensors"):
        load_draft(settings(folder, target_folder), None)


def test_the_tokenizer_that_is_used_decides(target_folder: Path, folder: Path, tmp_path: Path) -> None:
    """Where a target is given another tokenizer than its folder's, its folder's does not matter."""
    odd = Path(shutil.copytree(target_folder, tmp_path / "odd"))
    letters = "abcdefghijklmnopqrstuvwxyz"
    respell(odd, dict(zip(letters, letters[::-1], strict=True)))
    load_draft(settings(folder, odd, tokenizer=str(target_folder)), None)
    with pytest.raises(TokenizerMismatch):
        load_draft(settings(folder, target_folder, tokenizer=str(odd)), None)
