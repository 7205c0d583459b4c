"""A draft is found, cut or refused: what drop: means, and whose vocabulary fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saguaro.config import DraftConfig
from saguaro.distill.student import make_student, save_student
from saguaro.draft.load import dropped_layers, load_draft, read_draft
from saguaro.errors import ConfigError, CorruptModel, ModelNotFound, TokenizerMismatch, UnsupportedModel
from saguaro.model.gguf_header import TensorInfo
from saguaro.model.load import load
from saguaro.model.stored import Stored, read_stored
from saguaro.model.tiny import EOS, tiny_model, write_tiny
from saguaro.model.transformer import Transformer
from saguaro.model.weights import read_tensor
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
    assert (draft.head.matrix.data_ptr(), draft.embedding.data_ptr()) == (
        target.head.matrix.data_ptr(),
        target.embedding.data_ptr(),
    )
    assert (target.spec.n_layers, len(target.layers)) == (4, 4)


def test_drop_loads_the_target_where_it_is_not_at_hand(target: Transformer, target_folder: Path) -> None:
    shared = read_draft(settings("drop:1", target_folder), target)
    own = read_draft(settings("drop:1", target_folder), None)
    assert own.head.matrix.data_ptr() != shared.head.matrix.data_ptr()
    pairs = zip(own.parameters(), shared.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Another model


def test_a_draft_has_a_dtype_of_its_own(folder: Path, target_folder: Path, target: Transformer) -> None:
    draft = load_draft(settings(folder, target_folder, dtype="bfloat16"), target)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert torch.equal(draft.head.matrix, target.head.matrix.bfloat16())


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


# A draft that borrows the target's embedding

IDS = torch.tensor([256, *range(97, 123), 32, 0])


@pytest.fixture
def student(target: Transformer, tmp_path: Path) -> Path:
    save_student(make_student(target, [0, 3], IDS), tmp_path / "student", torch.float32)
    return tmp_path / "student"


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_embedding_is_the_targets_tensor(student: Path, target: Transformer, target_folder: Path) -> None:
    draft = read_draft(settings(student, target_folder), target)
    assert draft.embedding is target.embedding
    assert (draft.spec.n_layers, draft.spec.n_vocab, draft.head.matrix.shape) == (2, 288, (64, len(IDS)))
    assert draft.token_map is not None
    assert draft.token_map.equal(IDS)
    assert torch.equal(draft.head.matrix, target.head.matrix[:, IDS])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_only_the_embedding_is_read_where_the_target_is_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, is_gguf: bool
) -> None:
    theirs = tiny_model("llama", tied=tied)
    if is_gguf:
        path = write_gguf(tmp_path / "target.gguf", theirs)
    else:
        path = tmp_path / "target"
        theirs.save_pretrained(path, max_shard_size="60KB")
    target = load("target", path, CPU, torch.float32).model
    save_student(make_student(target, [1], IDS), tmp_path / "student", torch.float32)
    expected = load_draft(settings(tmp_path / "student", path), target)
    assert expected.embedding is target.embedding

    read: list[str] = []
    watch_reading(monkeypatch, read)
    own = load_draft(settings(tmp_path / "student", path), None)
    assert read == ["token_embd.weight" if is_gguf else "model.embed_tokens.weight"]
    assert torch.equal(own.embedding, target.embedding)
    assert "embedding" in dict(own.named_parameters())
    ours = dict(own.named_parameters())
    assert all(torch.equal(ours[name], weight) for name, weight in expected.named_parameters())


def watch_reading(monkeypatch: pytest.MonkeyPatch, read: list[str]) -> None:
    """Note what is read of the target."""

    def read_gguf(path: Path, info: TensorInfo, n_heads: int) -> Stored:
        read.append(info.name)
        return read_stored(path, info, n_heads)

    def read_folder(folder: Path, name: str) -> Tensor:
        read.append(name)
        return read_tensor(folder, name)

    monkeypatch.setattr("saguaro.model.gguf.read_stored", read_gguf)
    monkeypatch.setattr("saguaro.model.load.read_tensor", read_folder)


def test_a_borrower_of_another_dtype_reads_its_own(student: Path, target: Transformer, target_folder: Path) -> None:
    draft = load_draft(settings(student, target_folder, dtype="bfloat16"), target)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert torch.equal(draft.embedding, target.embedding.bfloat16())


def test_a_borrower_is_no_target(student: Path) -> None:
    with pytest.raises(UnsupportedModel) as e:
        load("student", student, CPU, torch.float32)
    assert str(e.value) == (
        f"{student} is a draft without an embedding of its own: it reads its target's; pass it as the draft of the "
        "target it was made for"
    )


@pytest.mark.parametrize(
    ("changes", "found"), [({"hidden_size": 32}, "288 and 32"), ({"vocab_size": 300}, "300 and 64")]
)
def test_a_borrower_made_for_another_target(student: Path, tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    other = write_tiny(tmp_path / "other", "llama", **changes)
    with pytest.raises(UnsupportedModel) as e:
        load_draft(settings(student, other), None)
    assert str(e.value) == (
        f"the draft {student} was made for a target of 288 tokens and hidden size 64; {other} has {found}: make a "
        "draft for it with `saguaro distill`"
    )


def _no_map(folder: Path) -> None:
    (folder / "token_map.safetensors").unlink()


def _other_map(folder: Path) -> None:
    save_file({"ids": torch.tensor([3, 288])}, folder / "token_map.safetensors")


def _says_whole(folder: Path) -> None:
    change(folder, saguaro={"embedding": "own"})


def _says_nonsense(folder: Path) -> None:
    change(folder, saguaro={"embedding": "mine"})


def _has_embedding(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "model.embed_tokens.weight": torch.zeros(288, 64)}, folder / "model.safetensors")


def _lacks_a_layer(folder: Path) -> None:
    change(folder, num_hidden_layers=3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_map, r"student borrows its target's embedding and has no token_map.safetensors; write the draft again"),
        (_other_map, r"token_map.safetensors names tokens 3 to 288; config.json knows 0 to 287"),
        (_says_whole, r"lacks 1 tensors \(model.embed_tokens.weight"),
        (_says_nonsense, r"config.json says the embedding is 'mine'; it is 'own' or 'target'"),
        (_has_embedding, r"holds 'model.embed_tokens.weight', which its config.json says is the target's"),
        (_lacks_a_layer, r"lacks 9 tensors"),
    ],
)
def test_borrowers_that_cannot_be(
    student: Path, target_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(student)
    with pytest.raises(CorruptModel, match=message):
        load_draft(settings(student, target_folder), None)
