"""An EAGLE-3 head learns, drafts better for it in the engine, and is written as others read it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.distill.corpus import Text
from saguaro.distill.eagle_head import config_of_head, load_head, make_head, pick_taps, save_head, with_rows
from saguaro.distill.eagle_learner import EagleLearner
from saguaro.distill.loss import Lesson
from saguaro.distill.parallel import hidden_states
from saguaro.distill.recipe import LOSSES, Recipe
from saguaro.distill.train import train
from saguaro.errors import ConfigError, ModelError
from saguaro.measure.metrics import Summary
from saguaro.model.eagle import Eagle
from saguaro.model.eagle_config import read_eagle_spec
from saguaro.model.load import Loaded, load
from saguaro.model.spec import Rope
from saguaro.model.tiny import FAMILIES, tiny_model, write_tiny
from saguaro.model.tiny_eagle import EMBEDS, IDS, LAYOUTS, write_tiny_eagle
from saguaro.model.transformer import Transformer
from tests.distill.test_student import largest_file
from tests.distill.test_train import Interrupt
from tests.model.eagle_reference import Reference, features_of
from tests.model.test_eagle import draft_of
from tests.model.write_gguf import write_gguf
from tests.parity.driver import LLAMA3

CPU = torch.device("cpu")
N_LAYERS, N_PROMPT = 6, 4
TAPS, IDS_OF_HEAD = (2, 3, 5), torch.arange(0, 288, 1)[torch.arange(288) % 7 > 0]
RECIPE = Recipe(steps=80, batch_texts=16, length=32, learning_rate=1e-2, warmup=5, unroll=4)
SHORT = Recipe(steps=5, batch_texts=3, length=12, learning_rate=3e-3, warmup=2, loss="kl+tv", unroll=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=N_LAYERS)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load("target", folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def target(loaded: Loaded) -> Transformer:
    return loaded.model


@pytest.fixture(scope="module")
def texts(target: Transformer) -> list[Text]:
    """What the target says greedily after random prompts."""
    tokens = torch.randint(264, (16, N_PROMPT), generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        hidden = hidden_states(target, tokens).view(*tokens.shape, -1)[:, -1]
        tokens = torch.cat((tokens, target.logits(hidden)[:, :264].argmax(-1)[:, None]), 1)
    return [Text(row, N_PROMPT) for row in tokens.tolist()]


def weights_of(head: Eagle) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in head.named_parameters() if name != "embedding"}


# It learns


def test_it_drafts_better_in_the_engine(target: Transformer, folder: Path, texts: list[Text], tmp_path: Path) -> None:
    """More accepted tokens per round than before training, with chains, and no other tokens than the target's."""
    head = make_head(target, TAPS, IDS_OF_HEAD, seed=0)
    save_head(head, tmp_path / "before", torch.float32)
    before = weights_of(head)
    reports = train(EagleLearner(head, target, RECIPE), texts, folder=tmp_path / "work")
    save_head(head, tmp_path / "after", torch.float32)
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert reports[-1].acceptance > reports[0].acceptance + 0.1
    assert all(not torch.equal(weight, before[name]) for name, weight in weights_of(head).items())
    prompts = [text.prompt for text in texts[:8]]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = LLM(folder, device="cpu", dtype="float32", kv_memory="1MiB", threads=1)
    expected = [result.token_ids for result in plain.generate(prompts, params)]
    found: dict[str, float] = {}
    for name in ("before", "after"):
        settings: dict[str, Any] = {"method": "sd", "link": "inline", "lookahead": 4, "nodes": 4, "width": 1}
        with plain.sibling(draft=str(tmp_path / name), **settings) as llm:
            summary = Summary()
            llm.engine.round.observers.append(summary.add)
            assert [result.token_ids for result in llm.generate(prompts, params)] == expected
            assert summary.tokens_per_round is not None
            found[name] = summary.tokens_per_round
    assert found["after"] > found["before"] + 0.5, found


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_falls(target: Transformer, texts: list[Text], tmp_path: Path, kind: str) -> None:
    recipe = replace(RECIPE, loss=kind, steps=20, batch_texts=8, unroll=2)
    reports = train(EagleLearner(make_head(target, TAPS, IDS_OF_HEAD, 0), target, recipe), texts, folder=tmp_path)
    assert reports[-1].loss < reports[0].loss
    assert reports[-1].acceptance > reports[0].acceptance


def test_nothing_is_learnt_of_tokens_that_the_head_lacks(target: Transformer) -> None:
    learner = EagleLearner(make_head(target, TAPS, torch.tensor([3, 7, 9]), 0), target, RECIPE)
    log_p = torch.tensor([[0.2, 0.3, 0.1]]).log().expand(2, 3)
    log_q = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(2, 3)
    lost = learner.lost(Lesson(log_p, torch.tensor([7, 8])), log_q)
    p = torch.tensor([2, 3, 1]) / 6
    assert lost.tolist() == pytest.approx([float((p * (p / torch.tensor([0.5, 0.25, 0.25])).log()).sum()), 0.0])


def test_chunks_of_positions_change_nothing(
    target: Transformer, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = (make_head(target, TAPS, IDS_OF_HEAD, 0) for _ in range(2))
    at_once = train(EagleLearner(whole, target, SHORT), texts, folder=tmp_path / "whole")
    monkeypatch.setattr("saguaro.distill.learner.CHUNK", 5 * 288)
    in_pieces = train(EagleLearner(pieces, target, SHORT), texts, folder=tmp_path / "pieces")
    for one, other in zip(at_once, in_pieces, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)


# Interrupted and resumed


@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_and_resumed_is_uninterrupted(
    target: Transformer, texts: list[Text], tmp_path: Path, after: int
) -> None:
    def learner() -> EagleLearner:
        return EagleLearner(make_head(target, TAPS, IDS_OF_HEAD, 4), target, SHORT)

    whole = learner()
    expected = train(whole, texts, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(learner(), texts, folder=tmp_path / "cut", save_every=2, progress=Interrupt(after))
    resumed = learner()
    assert train(resumed, texts, folder=tmp_path / "cut", save_every=2) == expected
    theirs = weights_of(resumed.draft)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(whole.draft).items())


def test_another_training_does_not_go_on(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    train(EagleLearner(make_head(target, TAPS, IDS_OF_HEAD, 0), target, SHORT), texts, folder=tmp_path)
    for taps, recipe, message in (
        ((1, 3, 5), SHORT, r"feature layers is \[1, 3, 5\], and the training begun in .* has \[2, 3, 5\]"),
        (TAPS, replace(SHORT, unroll=2), "unroll is 2, and the training begun in .* has 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(EagleLearner(make_head(target, taps, IDS_OF_HEAD, 0), target, recipe), texts, folder=tmp_path)


# What is written


def test_what_is_written(target: Transformer, folder: Path, tmp_path: Path) -> None:
    head = make_head(target, TAPS, IDS_OF_HEAD, 0)
    save_head(head, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {
        *("hidden_norm", "input_layernorm", "post_attention_layernorm"),
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    }
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert set(tensors) == names | {"d2t", "t2d"}
    assert {tensors[name].dtype for name in names} == {torch.float16}
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(len(IDS_OF_HEAD))).equal(IDS_OF_HEAD)
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().equal(IDS_OF_HEAD)
    shapes = {name: list(tensors[name].shape) for name in names}
    assert shapes["fc.weight"] == [64, 3 * 64]
    assert shapes["midlayer.self_attn.q_proj.weight"] == [64, 128]
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": 64, "vocab_size": 288, "draft_vocab_size": len(IDS_OF_HEAD), "tie_word_embeddings": False,
        "rope_theta": 5000.0, "torch_dtype": "float16",
        "eagle_config": {IDS: [1, 2, 4], "use_aux_hidden_state": True}, IDS: [2, 3, 5],
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    assert "rope_scaling" not in config
    assert draft_of(tmp_path, folder, target).reads.taps == TAPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_others_are_read_and_written(layout: str, folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    """Whatever they began as, they are written in one layout, and compute what they did."""
    start = write_tiny_eagle(tmp_path / "start", layout, folder, seed=2)
    if layout in EMBEDS:
        path = start / "model.safetensors"
        save_file(load_file(path) | {"embed_tokens.weight": loaded.model.embedding.data.clone()}, path)
    head = load_head(start, loaded)
    assert head.embedding is loaded.model.embedding
    if head.token_map is None:
        head = with_rows(head, loaded.model, torch.arange(288))
    save_head(head, tmp_path / "out", torch.float32)
    again = draft_of(tmp_path / "out", folder, loaded.model)
    assert replace(again.reads, n_draft_vocab=None) == replace(head.reads, n_draft_vocab=None)
    text = torch.arange(20, 31)
    reference = tiny_model("llama", num_hidden_layers=N_LAYERS)
    features = features_of(reference, text.tolist(), head.reads.taps)[:-1]
    first, second = Reference(start, folder), Reference(tmp_path / "out", folder)
    said = [one.logits(one.run(text[1:].tolist(), one.states(features))) for one in (first, second)]
    assert torch.allclose(said[0], said[1], atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "gguf"])
def test_targets_of_every_family(family: str, tmp_path: Path) -> None:
    """A step of training, and the written head drafts; a GGUF file with rotations of its own too."""
    if family == "gguf":
        rope: dict[str, Any] = {"rope_parameters": LLAMA3, "head_dim": 16, "num_hidden_layers": 5}
        path = write_gguf(tmp_path / "target.gguf", tiny_model("llama", **rope))
    else:
        path = write_tiny(tmp_path / "target", family, num_hidden_layers=5)
    target = load("target", path, CPU, torch.float32).model
    head = make_head(target, pick_taps(5, None), IDS_OF_HEAD, 0)
    texts = [Text(list(range(start, start + 9)), 3) for start in range(20, 40)]
    learner = EagleLearner(head, target, replace(SHORT, steps=1))
    train(learner, texts, folder=tmp_path / "work")
    save_head(head, tmp_path / "head", torch.float32)
    assert read_eagle_spec(tmp_path / "head", target.spec) == head.reads
    again = draft_of(tmp_path / "head", path, None)
    assert torch.equal(again.frequencies, head.frequencies)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in weights_of(head).items())


def test_a_rope_is_written_for_older_readers_too(folder: Path, target: Transformer) -> None:
    eagle = make_head(target, TAPS, IDS_OF_HEAD, 0).reads
    config = config_of_head(
        replace(eagle, layers=replace(eagle.layers, rope=Rope(theta=7.0, kind="linear", factor=2.0)))
    )
    assert (config["rope_theta"], config["rope_scaling"]) == (7.0, {"rope_type": "linear", "factor": 2.0})


def test_another_head(target: Transformer) -> None:
    """Rows that it has are kept, the others are the target's."""
    head = make_head(target, TAPS, torch.tensor([5, 9, 70]), 0)
    head.head.matrix.data.mul_(2)
    changed = with_rows(head, target, torch.tensor([9, 11]))
    assert changed.token_map is not None
    assert changed.token_map.tolist() == [9, 11]
    assert torch.equal(changed.head.matrix[:, 0], 2 * target.head.matrix[:, 9])
    assert torch.equal(changed.head.matrix[:, 1], target.head.matrix[:, 11])
    for name, weight in weights_of(head).items():
        assert name == "head.weight" or torch.equal(weight, changed.get_parameter(name))


# What cannot be made


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([0, 2], r"feature_layers is \[0, 2\]; give layers from 1 to 6"),
        ([7], r"feature_layers is \[7\]; give layers from 1 to 6"),
        ([], r"feature_layers is \[\]; give layers"),
    ],
)
def test_feature_layers_that_cannot_be(layers: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pick_taps(6, layers)


def test_a_small_target_must_be_told_its_layers() -> None:
    with pytest.raises(ConfigError, match=r"the target has 4 layers, .* need at least 5; give feature_layers"):
        pick_taps(4, None)


def test_heads_that_cannot_begin_one(folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no EAGLE-3 draft; give the folder of one"):
        load_head(folder, loaded)
    own = write_tiny_eagle(tmp_path / "own", "specforge", folder)
    with pytest.raises(ConfigError, match="whose embedding is not its target's"):
        load_head(own, loaded)
    ids: dict[str, Any] = {IDS: [0, 3, 5]}
    lowest = write_tiny_eagle(tmp_path / "lowest", "speculators", folder, **ids)
    with pytest.raises(ConfigError, match="reads the target's embedding as a feature"):
        load_head(lowest, loaded)


def test_a_full_disk_leaves_nothing_that_looks_whole(target: Transformer, tmp_path: Path) -> None:
    head = make_head(target, TAPS, IDS_OF_HEAD, 0)
    save_head(head, tmp_path)
    with largest_file(20_000), pytest.raises(ModelError, match="cannot write"):
        save_head(head, tmp_path)
    assert not (tmp_path / "config.json").exists()
