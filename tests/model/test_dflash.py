"""DFlash drafts: each layout of their files gives the numbers of the description, and what does not fit is refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.config import SamplingParams
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.load import load_draft, read_draft
from saguaro.errors import CorruptModel, ModelError, TokenizerMismatch, UnsupportedModel
from saguaro.methods import draft_side
from saguaro.model.dflash import DFlash
from saguaro.model.load import load
from saguaro.model.tiny import tiny_model, write_tiny
from saguaro.model.tiny_dflash import LAYOUTS, write_tiny_dflash
from saguaro.model.transformer import Transformer
from saguaro.types import DRAFT, Features, Joined, Outcome
from tests.draft.config import new_config
from tests.model.damage import changed, having, without
from tests.model.dflash_reference import Reference
from tests.model.eagle_reference import features_of, watched

CPU = torch.device("cpu")
N_KNOWN, N_LAYERS = 264, 6
TAPS = {"z-lab": (1, 3, 5), "speculators": (1, 3, 5), "llama": (4,)}
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


def draft_of(folder: Path, target_folder: Path, target: Transformer | None) -> DFlash:
    model = read_draft(new_config(N_KNOWN, draft=str(folder), target=str(target_folder), n_text=288), target)
    assert isinstance(model, DFlash)
    return model


class Bench:
    """A draft that is told texts and their features, beside the reference."""

    def __init__(
        self,
        folder: Path,
        target_folder: Path,
        target: Transformer | None,
        like: Any,
        *,
        packed: bool = True,
        **settings: Any,
    ) -> None:
        config = new_config(N_KNOWN, draft=str(folder), target=str(target_folder), n_text=288, **settings)
        model = load_draft(config, target) if packed else read_draft(config, target)
        assert isinstance(model, DFlash)
        self.side, self.taps, self.like = draft_side(config, model), model.reads.taps, like
        self.reference, self.said = Reference(folder, target_folder), list[Tensor]()
        assert isinstance(self.side.drafter, BlockDrafter)
        assert self.side.drafter.runner.is_native == packed
        self.side.drafter.runner.logits = watched(self.side.drafter.runner.logits, self.said)  # type: ignore[method-assign,assignment]

    def begin(self, n: int) -> None:
        """Draft after TEXT, whose features come in two parts."""
        self.side.admit([Joined(0, TEXT[:-1], 10, 0, SamplingParams(temperature=0))])
        self.side.respond(replace(Outcome.nothing(), features=self.decided(TEXT[:5], 0, 0).features), [], [])
        self.side.prepare()
        spec = self.side.respond(self.decided(TEXT, 0, 4), [0], [n])
        assert spec.source.tolist() == [DRAFT]

    def decided(self, text: Sequence[int], n_accepted: int, start: int) -> Outcome:
        """The text has grown to this, and the target has computed its tokens from `start` on."""
        none = torch.zeros(1, dtype=torch.int64)
        features = features_of(self.like, text, self.taps)[start : len(text) - 1]
        own = Features(none, none + start, none + len(features), features)
        return Outcome(none, none + n_accepted, none + n_accepted, torch.tensor([text[-1]]), features=own)

    def expected(self, text: Sequence[int], added: Sequence[int], n: int) -> Tensor:
        """The logits at n masks after a text and tokens that it does not have yet."""
        features = features_of(self.like, text, self.taps)[: len(text) - 1]
        both = [*text, *added]
        return self.reference.logits(features, both[-1], len(both) - 1, n)

    def check(self, text: Sequence[int], n: int) -> list[int]:
        """What was drafted after this text."""
        logits = self.expected(text, [], n)
        assert torch.allclose(self.said[-1], logits, atol=1e-4, rtol=1e-4)
        tokens = logits[:, :N_KNOWN].argmax(-1).tolist()
        row = self.side.rows.get(0)
        assert row is not None
        assert row.text == list(text)
        assert row.speculation == tokens[: len(row.speculation)]
        return list(row.speculation)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_description(
    layout: str,
    with_target: bool,
    packed: bool,
    tmp_path: Path,
    target_folder: Path,
    target: Transformer,
    reference_target: Any,
) -> None:
    """A prompt in two parts, then accepted tokens; read beside its target, and in a process of its own; by modules, and
    by the native call of packed weights."""
    folder = write_tiny_dflash(tmp_path, layout, target_folder, seed=3)
    n = LAYOUTS[layout]["block_size"] - 1
    whole = target if with_target else None
    bench = Bench(folder, target_folder, whole, reference_target, packed=packed, lookahead=n, n_tokens=900)
    assert bench.taps == TAPS[layout]
    side = bench.side
    bench.begin(n)
    text = [*TEXT, *bench.check(TEXT, n)[:2], 33]
    side.respond(bench.decided(text, 2, len(TEXT) - 1), [0], [n])
    assert len(bench.check(text, n)) == n


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prepared_block_begins_with_the_bonus(
    layout: str, tmp_path: Path, target_folder: Path, target: Transformer, reference_target: Any
) -> None:
    """The features of the text's last token and of those that an outcome adds are not known while it is awaited."""
    folder = write_tiny_dflash(tmp_path, layout, target_folder, seed=5)
    settings: dict[str, Any] = {"lookahead": 3, "budget": 8, "growth": "uniform"}
    bench = Bench(folder, target_folder, target, reference_target, **settings)
    side = bench.side
    bench.begin(3)
    flight = bench.check(TEXT, 4)
    bench.said.clear()
    side.prepare()
    assert isinstance(side.drafter, BlockDrafter)
    blocks = {added: side.drafter._block(said) for added, said in side.drafter._ahead[0].items()}
    assert len(blocks) == 8
    said = torch.cat(bench.said)
    for added, block in blocks.items():
        n = min(4, LAYOUTS[layout]["block_size"] - 1)
        assert len(block.positions) == n
        expected = bench.expected(TEXT, added, n)
        assert torch.allclose(said[:n], expected, atol=1e-4, rtol=1e-4)
        said = said[n:]
    added = next(added for added in blocks if len(added) > 1)
    assert list(added[:-1]) == flight[: len(added) - 1]
    outcome = bench.decided([*TEXT, *added], len(added) - 1, len(TEXT) - 1)
    spec = side.respond(outcome, [0], [3])
    assert spec.hit.tolist() == [True]
    assert spec.tokens[0].tolist()[: int(spec.length[0])] == [
        known[0].token for known in blocks[added].positions[: int(spec.length[0])]
    ]
    side.prepare()  # reads the features that came with the outcome
    side.respond(bench.decided([*TEXT, *added, 9], 0, len(TEXT) + len(added) - 1), [0], [3])
    bench.check([*TEXT, *added, 9], 4)


# What does not fit


REFUSED: dict[str, tuple[str, Callable[[Path], None], type[ModelError], str]] = {
    "no fc": ("z-lab", lambda f: without(f, "fc.weight"), CorruptModel, "lacks 1 tensors (fc.weight)"),
    "no fc, though the sizes agree": ("llama", lambda f: without(f, "fc.weight"), CorruptModel, "(fc.weight)"),
    "no hidden_norm": ("z-lab", lambda f: without(f, "hidden_norm.weight"), CorruptModel, "(hidden_norm.weight)"),
    "a Markov head": (
        "z-lab",
        lambda f: having(f, **{"markov.w1": torch.zeros(2)}),
        UnsupportedModel,
        "holds 'markov.w1', which a draft of kind DFlash does not have",
    ),
    "no d2t": ("speculators", lambda f: without(f, "d2t"), CorruptModel, "has no 'd2t', and its head has 96 of 288"),
    "fc of another target": (
        "z-lab",
        lambda f: having(f, **{"fc.weight": torch.zeros(64, 96)}),
        CorruptModel,
        "reads 96 numbers; 3 layers of a target of hidden size 64 give 192: it was made for another target",
    ),
    "another target's size": (
        "speculators",
        lambda f: changed(f, target_hidden_size=128),
        UnsupportedModel,
        "made for a target of hidden size 128 (target_hidden_size); this target has 64: take a DFlash draft",
    ),
    "another target's layers": (
        "z-lab",
        lambda f: changed(f, num_target_layers=36),
        UnsupportedModel,
        "made for a target of 36 layers (num_target_layers); this target has 6",
    ),
    "another vocabulary": (
        "z-lab",
        lambda f: changed(f, vocab_size=300),
        TokenizerMismatch,
        "made for a target of 300 tokens; this target has 288",
    ),
    "an output that is not there": (
        "z-lab",
        lambda f: changed(f, dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 2, 6]}),
        UnsupportedModel,
        "reads the layers [1, 2, 6] of its target (target_layer_ids), and the target has the layers 0 to 5",
    ),
    "the last output": (
        "z-lab",
        lambda f: changed(f, dflash_config={"mask_token_id": 1, "target_layer_ids": [1, 2, 5]}),
        UnsupportedModel,
        "reads the output of the target's last layer",
    ),
    "no layers": (
        "speculators",
        lambda f: changed(f, aux_hidden_state_layer_ids=None),
        CorruptModel,
        "aux_hidden_state_layer_ids is None; it must be a list of layers",
    ),
    "no mask": ("speculators", lambda f: changed(f, mask_token_id=None), CorruptModel, "mask_token_id is None"),
    "a mask that is no token": (
        "speculators",
        lambda f: changed(f, mask_token_id=288),
        CorruptModel,
        "says mask_token_id is 288; the target has 288 tokens",
    ),
    "a block of nothing": ("z-lab", lambda f: changed(f, block_size=1), CorruptModel, "block_size is 1; it must be"),
    "tokens from the anchor": (
        "speculators",
        lambda f: changed(f, sample_from_anchor=True),
        UnsupportedModel,
        "sample_from_anchor is True",
    ),
    "another head": (
        "speculators",
        lambda f: changed(f, projector_type="domino"),
        UnsupportedModel,
        "projector_type is 'domino'",
    ),
    "causal blocks": ("z-lab", lambda f: changed(f, is_causal=True), UnsupportedModel, "is_causal is True"),
    "DFlash2": (
        "z-lab",
        lambda f: changed(f, architectures=["DFlash2DraftModel"]),
        UnsupportedModel,
        "is a dflash2draftmodel; of block drafts Saguaro computes DFlash",
    ),
    "DSpark": (
        "z-lab",
        lambda f: changed(f, architectures=["Qwen3DSparkModel"]),
        UnsupportedModel,
        "is a qwen3dsparkmodel",
    ),
    "a window": (
        "z-lab",
        lambda f: changed(f, layer_types=["sliding_attention", "full_attention"]),
        UnsupportedModel,
        "sliding_attention layers is not supported",
    ),
    "another rope": (
        "z-lab",
        lambda f: changed(f, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        UnsupportedModel,
        "rope type 'yarn' is not supported",
    ),
    "layers of another family": (
        "z-lab",
        lambda f: changed(f, model_type="muse_glimmer_assistant"),
        UnsupportedModel,
        "has layers of type 'muse_glimmer_assistant'; Saguaro computes llama, qwen3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path, target_folder: Path) -> None:
    layout, change, kind, words = REFUSED[case]
    folder = write_tiny_dflash(tmp_path, layout, target_folder)
    change(folder)
    with pytest.raises(kind) as e:
        draft_of(folder, target_folder, None)
    assert words in str(e.value)
    assert str(folder) in str(e.value)


def test_a_draft_of_another_hidden_size_is_refused(tmp_path: Path, target_folder: Path) -> None:
    folder = write_tiny_dflash(tmp_path, "z-lab", target_folder, hidden_size=32)
    with pytest.raises(UnsupportedModel, match="has hidden size 32 and uses its target's embedding or head"):
        draft_of(folder, target_folder, None)


def test_it_is_no_target(tmp_path: Path, target_folder: Path) -> None:
    folder = write_tiny_dflash(tmp_path, "z-lab", target_folder)
    with pytest.raises(UnsupportedModel, match="is a draft of kind DFlash: it reads features of its target"):
        load("target", folder, CPU, torch.float32)
