"""A draft cut out of its target says what the target would with these layers, and survives being written."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saguaro import LLM, SamplingParams
from saguaro.config import DraftConfig
from saguaro.distill.parallel import hidden_states
from saguaro.distill.student import config_of, half_for, make_student, pick_layers, save_student, with_head
from saguaro.draft.load import load_draft, read_draft
from saguaro.errors import ConfigError, CorruptModel, ModelError, ModelNotFound
from saguaro.model.hf_config import parse_spec, read_spec
from saguaro.model.load import load
from saguaro.model.tiny import EOS_ID, FAMILIES, tiny_model, write_tiny
from saguaro.model.transformer import Transformer
from tests.draft.config import new_config
from tests.model.write_gguf import write_gguf
from tests.parity.driver import LINEAR, LLAMA3

CPU = torch.device("cpu")
IDS = torch.tensor([101, EOS_ID, *range(32, 90), 263, 0])  # in no order
TOKENS = torch.randint(288, (2, 17), generator=torch.Generator().manual_seed(1))
FILES = {"config.json", "model.safetensors", "token_map.safetensors"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(folder: Path) -> Transformer:
    return read(folder)


def read(path: Path) -> Transformer:
    return load("tiny", path, CPU, torch.float32).model


def settings(draft: Path, target: Path) -> DraftConfig:
    return new_config(264, draft=str(draft), target=str(target))


@pytest.mark.parametrize(
    ("n_target", "n", "layers"),
    [(4, 4, [0, 1, 2, 3]), (4, 1, [0]), (30, 2, [0, 29]), (30, 3, [0, 14, 29]), (1, 1, [0])],
)
def test_layers_are_first_last_and_between(n_target: int, n: int, layers: list[int]) -> None:
    assert pick_layers(n_target, n) == layers


@pytest.mark.parametrize("n", [0, 5])
def test_more_layers_than_there_are(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"to have {n} layers; the target has 4: choose 1 to 4"):
        pick_layers(4, n)


def test_a_student_is_the_target_without_some_layers(target: Transformer) -> None:
    student, cut = make_student(target, [0, 2], IDS), target.without([1, 3])
    ours, theirs = (hidden_states(model, TOKENS) for model in (student, cut))
    assert torch.equal(ours, theirs)
    assert torch.allclose(student.logits(ours)[:, IDS], cut.logits(theirs)[:, IDS], atol=1e-5)
    others = torch.ones(288, dtype=torch.bool).index_fill_(0, IDS, False)
    assert student.logits(ours)[:, others].eq(-torch.inf).all()


def test_another_head(target: Transformer) -> None:
    """Tokens it could say have the logits they had; those it could not, the target's rows."""
    student = make_student(target, [0, 2], IDS)
    with torch.no_grad():
        for weight in (student.head.matrix, student.norm.weight, student.layers[1].get_parameter("mlp.gate_up.weight")):
            weight.mul_(1.25)
    ids = torch.tensor([40, 120, EOS_ID, 7, 101])
    changed = with_head(student, target, ids)
    assert changed.token_map is not None
    assert changed.token_map.tolist() == ids.tolist()
    assert torch.equal(hidden_states(changed, TOKENS), hidden_states(student, TOKENS))
    rows = {int(token): row for row, token in enumerate(IDS)}
    for row, token in enumerate(ids.tolist()):
        wanted = student.head.matrix[:, rows[token]] if token in rows else target.head.matrix[:, token]
        assert torch.equal(changed.head.matrix[:, row], wanted)


def test_only_the_embedding_is_shared(target: Transformer) -> None:
    student = make_student(target, [0, 2], IDS)
    assert student.embedding is target.embedding
    theirs = {weight.data_ptr() for weight in target.parameters()}
    own = [name for name, weight in student.named_parameters() if weight.data_ptr() not in theirs]
    assert set(own) == set(dict(student.named_parameters())) - {"embedding"}


def test_a_student_of_a_half_target_is_whole(folder: Path) -> None:
    """The weights that are trained are float32; the embedding stays as it is."""
    target = load("tiny", folder, CPU, torch.bfloat16).model
    student = make_student(target, [0, 3], IDS)
    assert {p.dtype for name, p in student.named_parameters() if name != "embedding"} == {torch.float32}
    assert student.embedding is target.embedding
    assert hidden_states(student, TOKENS).dtype == torch.float32


@pytest.mark.parametrize(
    ("layers", "ids", "message"),
    [
        ([], IDS, r"to have layers \[\]; the target has 0 to 3"),
        ([0, 4], IDS, r"to have layers \[0, 4\]; the target has 0 to 3"),
        ([0], torch.tensor([1, 2]), r"lacks the target's end of text, \[256\]; add it"),
        ([0], torch.tensor([256, 288]), r"names tokens 256 to 288; config.json knows 0 to 287"),
        ([0], torch.tensor([256, 1, 1]), r"names a token twice"),
    ],
)
def test_students_that_cannot_be(target: Transformer, layers: list[int], ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_student(target, layers, ids)


@pytest.mark.parametrize(
    ("family", "others"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
        ("llama", {"tied": True, "rope_parameters": LINEAR, "eos_token_id": [256, 3]}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_config_is_read_as_it_was_written(tmp_path: Path, family: str, others: dict[str, Any]) -> None:
    write_tiny(tmp_path / "target", family, **others)
    spec = read_spec(tmp_path / "target")
    assert parse_spec(json.loads(json.dumps(config_of(spec)))) == spec
    target = read(tmp_path / "target")
    student = make_student(target, [1], torch.tensor([256, 3, 7]))
    save_student(student, tmp_path / "student", torch.float32)
    assert read_spec(tmp_path / "student") == student.spec
    again = read_draft(settings(tmp_path / "student", tmp_path / "target"), target)
    assert torch.equal(hidden_states(again, TOKENS), hidden_states(student, TOKENS))
    assert torch.equal(again.head.matrix, student.head.matrix)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_target(tmp_path: Path, family: str) -> None:
    """llama3 rotations, which a GGUF file holds as numbers of their own, come along."""
    rope: dict[str, Any] = {"rope_parameters": LLAMA3, "head_dim": 16} if family == "llama" else {}
    path = write_gguf(tmp_path / "target.gguf", tiny_model(family, **rope))
    target = read(path)
    student = make_student(target, [0], IDS)
    save_student(student, tmp_path / "student", torch.float32)
    again = read_draft(settings(tmp_path / "student", path), None)
    assert again.spec == student.spec
    assert torch.equal(again.frequencies, target.frequencies)
    assert ("frequencies" in json.loads((tmp_path / "student/config.json").read_text())["saguaro"]) == bool(rope)
    assert torch.equal(hidden_states(again, TOKENS), hidden_states(student, TOKENS))


def test_what_is_written(target: Transformer, tmp_path: Path) -> None:
    save_student(make_student(target, [0, 3], IDS), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert len(weights) == 2 * 9 + 2
    assert "model.embed_tokens.weight" not in weights
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["saguaro"]) == ("float16", {"embedding": "target"})


def test_int8_rows(target: Transformer, folder: Path, tmp_path: Path) -> None:
    """Matrices are stored on a scale for each row, and come back within half a step of it."""
    student = make_student(target, [0, 3], IDS)
    save_student(student, tmp_path, torch.int8)
    stored = load_file(tmp_path / "model.safetensors")
    assert {w.dtype for n, w in stored.items() if f"{n}_scale" in stored} == {torch.int8}
    again = read_draft(settings(tmp_path, folder), target)
    for name, weight in student.named_parameters():
        if weight.dim() == 2 and name != "embedding":
            step = weight.abs().amax(0) / 127  # a weight is [in, out]
            assert ((again.get_parameter(name) - weight).abs() <= 0.501 * step).all()
    del stored["lm_head.weight_scale"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"'lm_head.weight' is int8 and 'lm_head.weight_scale' is not beside it"):
        read_draft(settings(tmp_path, folder), target)


def test_the_half_that_loses_less() -> None:
    assert half_for({"a": torch.tensor([0.3, -1.7])}) == torch.float16
    assert half_for({"a": torch.tensor([0.3]), "b": torch.tensor([7e4])}) == torch.bfloat16
    assert half_for({"a": torch.tensor([3e-9, 5e-9])}) == torch.bfloat16


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: what a full disk is to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_that_looks_whole(target: Transformer, folder: Path, tmp_path: Path) -> None:
    student = make_student(target, [0, 3], IDS)
    save_student(student, tmp_path)  # an older one
    with largest_file(20_000), pytest.raises(ModelError) as e:
        save_student(student, tmp_path)
    assert str(e.value).startswith(f"cannot write {tmp_path / 'model.safetensors'} (")
    assert str(e.value).endswith("; make room on the disk or choose another folder")
    assert {path.name for path in tmp_path.iterdir()} == FILES - {"config.json"}
    with pytest.raises(ModelNotFound, match=r"has no config.json"):
        load_draft(settings(tmp_path, folder), target)
    save_student(student, tmp_path)
    assert load_draft(settings(tmp_path, folder), target).spec.n_layers == 2


def test_a_folder_that_cannot_be(target: Transformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write to .*file .*; choose another folder"):
        save_student(make_student(target, [0], IDS), tmp_path / "file")


@pytest.mark.parametrize(("method", "link"), [("sd", "inline"), ("ssd-uniform", "inline"), ("sd", "process")])
def test_a_student_drafts_and_changes_nothing(
    target: Transformer, folder: Path, tmp_path: Path, method: str, link: str
) -> None:
    """All layers and the tokens that are said: it is of use, in this process and in another."""
    llm = LLM(folder, device="cpu", kv_memory="1MiB")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = llm.generate("the end", params)[0]
    ids = torch.tensor(sorted({EOS_ID, *expected.token_ids}))
    save_student(make_student(target, range(4), ids), tmp_path)
    with llm.sibling(method=method, draft=str(tmp_path), link=link, lookahead=3, budget=4) as drafted:
        result = drafted.generate("the end", params)[0]
    assert result.token_ids == expected.token_ids
    assert result.outputs[0].n_rounds < 12
