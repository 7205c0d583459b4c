"""EAGLE-3 drafts: each layout of their files gives the numbers of the description, and what does not fit is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.attention.step import Segment, make_step
from saguaro.config import SamplingParams
from saguaro.draft.load import load_draft, read_draft
from saguaro.errors import CorruptModel, ModelError, TokenizerMismatch, UnsupportedModel
from saguaro.kernels.formats import packed_kind, ready
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.methods import draft_side
from saguaro.model.eagle import Eagle
from saguaro.model.load import load
from saguaro.model.tiny import tiny_model, tiny_tokenizer, write_tiny
from saguaro.model.tiny_eagle import IDS, LAYOUTS, write_tiny_eagle
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import Ran, make_runner
from saguaro.types import DRAFT, Features, Joined, Outcome
from tests.draft.config import new_config
from tests.model.damage import changed, having, without
from tests.model.eagle_reference import Reference, features_of, watched

CPU = torch.device("cpu")
N_KNOWN, N_LAYERS = 264, 6
TAPS = {"specforge": (1, 3, 5), "speculators": (1, 3, 5)}  # the others have the default: 2, L // 2, L - 3
TEXT = [104, 105, 32, 116, 104, 101, 200, 3, 3, 250, 7]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def reference_target() -> Any:
    """What target_folder holds, as transformers computes it."""
    return tiny_model("llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Transformer:
    return load("target", target_folder, CPU, torch.float32).model


def draft_of(folder: Path, target_folder: Path, target: Transformer | None, **changes: Any) -> Eagle:
    config = new_config(N_KNOWN, draft=str(folder), target=str(target_folder), n_text=288, **changes)
    model = read_draft(config, target)
    assert isinstance(model, Eagle)
    return model


def run(
    model: Transformer, segment: Segment, features: Tensor | None, taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """The logits after every token of a text, and what was tapped, in pages of 4."""
    plan = KVPlan(8, 4, model.spec.kv_bytes_per_token(torch.float32), 32)
    runner = make_runner(model, KVCache(plan, model.spec, CPU, torch.float32), None, 32, taps=taps)
    if taps:
        ran = runner.run([segment], is_followed=False)
        assert isinstance(ran, Ran)
        return ran.logits, ran.features
    step = replace(make_step([segment], 4, CPU), features=features)
    return runner.logits(runner.hidden(step)), None


def a_text(tokens: Sequence[int]) -> Segment:
    return Segment(tokens, 0, [5, 2, 7], len(tokens))


@pytest.mark.parametrize("packed", [False, True])
def test_features_are_those_of_the_layers(
    packed: bool, target_folder: Path, target: Transformer, reference_target: Any
) -> None:
    """Twice the same layer, in any order; by modules, and by the native call of packed weights."""
    model = target
    if packed:
        kind = packed_kind("float32", CPU)
        model = ready(load("target", target_folder, CPU, torch.float32, kind).model, "float32")
    taps = (4, 0, 2, 2)
    logits, found = run(model, a_text(TEXT), None, taps)
    assert found is not None
    assert torch.allclose(found, features_of(reference_target, TEXT, taps), atol=1e-3, rtol=1e-4)
    plain, _ = run(model, a_text(TEXT), None)
    assert torch.equal(logits, plain), "what is kept changes nothing"
    (last,) = run(model, a_text(TEXT), None, (N_LAYERS,))[1:]
    assert last is not None
    assert torch.allclose(model.logits(last), plain, atol=1e-4)


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_description(
    layout: str,
    with_target: bool,
    tmp_path: Path,
    target_folder: Path,
    target: Transformer,
    reference_target: Any,
) -> None:
    """Read beside its target, and in a process of its own."""
    folder = write_tiny_eagle(tmp_path, layout, target_folder, seed=3)
    model, reference = (
        draft_of(folder, target_folder, target if with_target else None),
        Reference(folder, target_folder),
    )
    taps = TAPS.get(layout, (2, 3, 3))
    assert model.reads.taps == taps
    features = features_of(reference_target, TEXT, taps)[:-1]
    states = reference.states(features)
    assert torch.allclose(model.read_features(features), states, atol=1e-4)
    found, _ = run(model, a_text(TEXT[1:]), model.read_features(features))
    expected = reference.logits(reference.run(TEXT[1:], states))
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.isinf(), expected.isinf()), "d2t"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_of_five_steps_is_that_of_the_description(
    layout: str, tmp_path: Path, target_folder: Path, target: Transformer, reference_target: Any
) -> None:
    """Text is read with true features, drafted tokens with own states; a prompt in two parts, then accepted tokens."""
    folder = write_tiny_eagle(tmp_path, layout, target_folder, seed=4)
    config = new_config(N_KNOWN, draft=str(folder), target=str(target_folder), n_text=288, lookahead=5)
    model, reference = load_draft(config, target), Reference(folder, target_folder)
    assert isinstance(model, Eagle)
    side, taps, none = draft_side(config, model), model.reads.taps, torch.zeros(1, dtype=torch.int64)
    said: list[Tensor] = []
    side.drafter.runner.logits = watched(side.drafter.runner.logits, said)  # type: ignore[attr-defined]

    def decided(text: Sequence[int], n_accepted: int, start: int) -> Outcome:
        features = features_of(reference_target, text, taps)[start : len(text) - 1]
        own = Features(none, none + start, none + len(features), features)
        return Outcome(none, none + n_accepted, none + n_accepted, torch.tensor([text[-1]]), features=own)

    def check(text: Sequence[int]) -> list[int]:
        """What was drafted after this text."""
        features = features_of(reference_target, text, taps)[:-1]
        tokens, logits = reference.draft(text, features, 5, N_KNOWN)
        assert torch.allclose(torch.cat(said[-5:]), logits, atol=1e-4, rtol=1e-4)
        row = side.rows.get(0)
        assert row is not None
        assert (row.text, row.speculation) == (list(text), tokens)
        return tokens

    side.admit([Joined(0, TEXT[:-1], 10, 0, SamplingParams(temperature=0))])
    first = decided(TEXT[:5], 0, 0).features
    side.respond(replace(Outcome.nothing(), features=first), [], [])
    side.prepare()
    spec = side.respond(decided(TEXT, 0, 4), [0], [5])
    assert spec.source.tolist() == [DRAFT]
    text = [*TEXT, *check(TEXT)[:2], 33]
    side.respond(decided(text, 2, len(TEXT) - 1), [0], [5])
    check(text)


# What does not fit


REFUSED: dict[str, tuple[str, Callable[[Path], None], type[ModelError], str]] = {
    "no d2t": (
        "safeailab",
        lambda f: without(f, "d2t"),
        CorruptModel,
        "has no 'd2t', and its head has 120 of 288 tokens",
    ),
    "d2t beyond": (
        "safeailab",
        lambda f: having(f, d2t=torch.arange(120) * 3),
        CorruptModel,
        "d2t names tokens 0 to 476",
    ),
    "d2t twice": ("safeailab", lambda f: having(f, d2t=-torch.arange(120)), CorruptModel, "names a token twice"),
    "d2t of floats": (
        "safeailab",
        lambda f: having(f, d2t=torch.zeros(120)),
        CorruptModel,
        "whole numbers, one for each",
    ),
    "no head": (
        "safeailab",
        lambda f: without(f, "lm_head.weight"),
        CorruptModel,
        "has no 'lm_head.weight' for its 120 tokens",
    ),
    "no norm": ("specforge", lambda f: without(f, "norm.weight"), CorruptModel, "lacks 1 tensors (model.norm.weight)"),
    "parallel": ("specforge", lambda f: having(f, mask_hidden=torch.zeros(1)), UnsupportedModel, "'mask_hidden'"),
    "fc of another target": (
        "specforge",
        lambda f: having(f, **{"fc.weight": torch.zeros(64, 96)}),
        CorruptModel,
        "reads 96 numbers; 3 layers of a target of hidden size 64 give 192: it was made for another target",
    ),
    "another target's size": (
        "specforge",
        lambda f: changed(f, target_hidden_size=128),
        UnsupportedModel,
        "made for a target of hidden size 128 (target_hidden_size); this target has 64",
    ),
    "another vocabulary": (
        "specforge",
        lambda f: changed(f, vocab_size=300),
        TokenizerMismatch,
        "made for a target of 300 tokens; this target has 288",
    ),
    "an output that is not there": (
        "specforge",
        lambda f: changed(f, eagle_config={IDS: [1, 2, 6]}),
        UnsupportedModel,
        f"reads the layers [1, 2, 6] of its target ({IDS}), and the target has the layers 0 to 5",
    ),
    "an input that is not there": (
        "speculators",
        lambda f: changed(f, **{IDS: [7]}),
        UnsupportedModel,
        "layers 0 to 5",
    ),
    "layers that are none": (
        "speculators",
        lambda f: changed(f, **{IDS: ["2"]}),
        CorruptModel,
        "must be a list of layers",
    ),
    "another number of layers": (
        "specforge",
        lambda f: changed(f, num_aux_hidden_states=2),
        CorruptModel,
        "says num_aux_hidden_states is 2 and names 3 layers",
    ),
    "the last state only": (
        "specforge",
        lambda f: changed(f, eagle_config={"use_aux_hidden_state": False}),
        UnsupportedModel,
        "use_aux_hidden_state is false",
    ),
    "another kind": (
        "speculators",
        lambda f: changed(f, speculators_model_type="peagle"),
        UnsupportedModel,
        "a speculators draft of kind 'peagle'; Saguaro reads eagle3 and dflash",
    ),
    "a norm before fc": ("specforge", lambda f: changed(f, norm_before_fc=True), UnsupportedModel, "norm_before_fc"),
    "another rope": (
        "specforge",
        lambda f: changed(f, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        UnsupportedModel,
        "rope type 'yarn' is not supported",
    ),
    "layers of another family": (
        "specforge",
        lambda f: changed(f, model_type="deepseek_v3"),
        UnsupportedModel,
        "has layers of type 'deepseek_v3'; Saguaro computes llama, qwen3",
    ),
    "another size of layers": (
        "safeailab",
        lambda f: changed(f, hidden_size=32, head_dim=16),
        CorruptModel,
        "weights and config do not belong together",
    ),
    "more layers than tensors": (
        "safeailab",
        lambda f: changed(f, num_hidden_layers=10**9),
        CorruptModel,
        "fewer tensors than its config.json has layers",
    ),
}


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    case: str, with_target: bool, tmp_path: Path, target_folder: Path, target: Transformer
) -> None:
    layout, change, kind, words = REFUSED[case]
    folder = write_tiny_eagle(tmp_path, layout, target_folder)
    change(folder)
    with pytest.raises(kind) as e:
        draft_of(folder, target_folder, target if with_target else None)
    assert words in str(e.value)
    assert str(folder) in str(e.value)


def test_a_small_target_must_be_told_its_layers(tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small", "llama", num_hidden_layers=4)
    folder = write_tiny_eagle(tmp_path / "draft", "safeailab", small)
    with pytest.raises(
        UnsupportedModel, match="its target has 4; the default layers, 2, L // 2 and L - 3, need at least 5"
    ):
        draft_of(folder, small, None)


def test_a_draft_that_borrows_must_have_its_targets_size(tmp_path: Path, target_folder: Path) -> None:
    folder = write_tiny_eagle(tmp_path, "safeailab", target_folder, hidden_size=32)
    with pytest.raises(UnsupportedModel, match="has hidden size 32 and uses its target's embedding or head"):
        draft_of(folder, target_folder, None)


def test_a_draft_with_an_embedding_and_a_head_may_have_any_size(tmp_path: Path, target_folder: Path) -> None:
    folder = write_tiny_eagle(tmp_path, "specforge", target_folder, hidden_size=32)
    assert draft_of(folder, target_folder, None).spec.hidden == 32


def test_other_tokens_are_refused(tmp_path: Path, target_folder: Path) -> None:
    """The vocabularies are as large as each other, and mean something else."""
    folder = write_tiny_eagle(tmp_path, "safeailab", target_folder)
    tiny_tokenizer(280).save_pretrained(folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = dict(zip(vocab, [*list(vocab.values())[7:], *list(vocab.values())[:7]], strict=True))
    raw["model"]["merges"] = []
    path.write_text(json.dumps(raw))
    with pytest.raises(TokenizerMismatch, match="mean something else to the draft"):
        draft_of(folder, target_folder, None)


def test_without_a_rope_it_has_the_targets(tmp_path: Path, target_folder: Path, target: Transformer) -> None:
    folder = write_tiny_eagle(tmp_path, "safeailab", target_folder, rope_theta=None)
    model = draft_of(folder, target_folder, None)
    assert torch.equal(model.frequencies, target.frequencies)
    assert model.spec.max_length == target.spec.max_length, "the length in its file bounds training"


def test_it_is_no_target(tmp_path: Path, target_folder: Path) -> None:
    folder = write_tiny_eagle(tmp_path, "safeailab", target_folder)
    with pytest.raises(
        UnsupportedModel, match="is a draft of kind EAGLE-3: it reads features of its target; pass it as the draft"
    ):
        load("target", folder, CPU, torch.float32)
