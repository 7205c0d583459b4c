"""Training makes a draft better, the loss is what it says, and an interruption changes nothing."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.distill import loss
from saguaro.distill.batch import Batches, collate, crop
from saguaro.distill.checkpoint import StepReport
from saguaro.distill.corpus import Text
from saguaro.distill.learner import ModelLearner
from saguaro.distill.parallel import hidden_states
from saguaro.distill.recipe import LOSSES, Recipe
from saguaro.distill.student import make_student, pick_layers
from saguaro.distill.train import STAGE
from saguaro.distill.train import train as train_learner
from saguaro.errors import ConfigError, CorruptModel, ModelError
from saguaro.model.load import load
from saguaro.model.tiny import EOS_ID, write_tiny
from saguaro.model.transformer import Transformer
from tests.distill.test_student import largest_file

CPU = torch.device("cpu")
N_PROMPT = 4
RECIPE = Recipe(steps=60, batch_texts=16, length=32, learning_rate=6e-3, warmup=5)
SHORT = Recipe(steps=7, batch_texts=3, length=12, learning_rate=3e-3, warmup=2, loss="kl+tv")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)
    return load("target", folder, CPU, torch.float32).model


@pytest.fixture(scope="module")
def texts(target: Transformer) -> list[Text]:
    """What the target says at temperature 1 after random prompts."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(288, (48, N_PROMPT), generator=draw)
    for _ in range(28):
        hidden = hidden_states(target, tokens).view(*tokens.shape, -1)[:, -1]
        p = target.logits(hidden).softmax(-1)
        tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=draw)), 1)
    return [Text(row, N_PROMPT) for row in tokens.tolist()]


def student_of(target: Transformer, n_rows: int = 200) -> Transformer:
    ids = torch.tensor([EOS_ID, *range(n_rows)])
    return make_student(target, pick_layers(4, 2), ids)


def weights_of(student: Transformer) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in student.named_parameters() if name != "embedding"}


def train(
    student: Transformer, target: Transformer, texts: list[Text], recipe: Recipe, **others: Any
) -> list[StepReport]:
    return train_learner(ModelLearner(student, target, recipe), texts, **others)


# It learns


@pytest.mark.parametrize("kind", LOSSES)
def test_acceptance_rises(target: Transformer, texts: list[Text], tmp_path: Path, kind: str) -> None:
    student, before = student_of(target), {name: w.clone() for name, w in target.named_parameters()}
    untrained = weights_of(student)
    reports = train(student, target, texts, replace(RECIPE, loss=kind), folder=tmp_path)
    assert len(reports) == RECIPE.steps
    assert reports[0].acceptance < 0.3
    assert reports[-1].acceptance > reports[0].acceptance + 0.15
    assert reports[-1].agreement > reports[0].agreement + 0.2
    assert reports[-1].loss < 0.8 * reports[0].loss
    assert all(not torch.equal(weight, untrained[name]) for name, weight in weights_of(student).items())
    assert all(torch.equal(weight, before[name]) for name, weight in target.named_parameters())
    assert not any(weight.requires_grad or weight.grad is not None for weight in student.parameters())


def test_a_whole_copy_has_nothing_to_learn(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    ids = torch.arange(288)
    report = train(make_student(target, range(4), ids), target, texts, replace(SHORT, steps=1), folder=tmp_path)[0]
    assert report.loss == pytest.approx(0, abs=1e-5)
    assert report.agreement == 1
    assert report.acceptance == pytest.approx(1, abs=1e-5)


def test_chunks_of_positions_change_nothing(
    target: Transformer, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and last norm take part in many chunks, the layers in one sum of them."""
    whole, pieces = student_of(target), student_of(target)
    at_once = train(whole, target, texts, SHORT, folder=tmp_path / "whole")
    monkeypatch.setattr("saguaro.distill.learner.CHUNK", 5 * 288)
    in_pieces = train(pieces, target, texts, SHORT, folder=tmp_path / "pieces")
    for one, other in zip(at_once, in_pieces, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
    theirs = weights_of(pieces)
    assert all(torch.allclose(weight, theirs[name], atol=2e-3) for name, weight in weights_of(whole).items())


def test_a_loss_that_is_no_number(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    student = student_of(target)
    student.head.matrix.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"the loss is nan at step 1 with learning_rate 0.003; use a lower one"):
        train(student, target, texts, SHORT, folder=tmp_path)
    assert not any(tmp_path.iterdir())


def test_steps_are_told(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    done: list[tuple[str, int, int]] = []
    seen: list[tuple[int, StepReport]] = []
    reports = train(
        student_of(target),
        target,
        texts,
        SHORT,
        folder=tmp_path,
        progress=lambda *what: done.append(what),
        watch=lambda *what: seen.append(what),
    )
    assert done == [(STAGE, step, 7) for step in range(8)]
    assert seen == list(enumerate(reports))


@pytest.mark.parametrize("lag", [1, 3, 20])
def test_steps_that_are_reported_later_are_the_same(
    target: Transformer, texts: list[Text], tmp_path: Path, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which is ahead of the host: every step is reported, in order, and before it is saved."""
    at_once, later = student_of(target), student_of(target)
    expected = train(at_once, target, texts, SHORT, folder=tmp_path / "at_once")
    monkeypatch.setattr("saguaro.distill.train.lag_on", lambda device: lag)
    seen: list[int] = []

    assert (
        train(later, target, texts, SHORT, folder=tmp_path / "later", save_every=2, watch=lambda n, _: seen.append(n))
        == expected
    )
    assert seen == list(range(SHORT.steps))
    theirs = weights_of(later)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(at_once).items())


def test_a_loss_that_is_no_number_is_not_saved_later_either(
    target: Transformer, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saguaro.distill.train.lag_on", lambda device: 1)
    student = student_of(target)
    student.head.matrix.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match="the loss is nan at step 1"):
        train(student, target, texts, SHORT, folder=tmp_path)
    assert not any(tmp_path.iterdir())


# The loss


def test_losses_by_hand() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()[None] + 5
    taught, log_q = loss.lesson(logits, torch.tensor([3, 0])), torch.tensor([[0.7, 0.3]]).log()
    assert taught.best.tolist() == [3]
    assert taught.log_p.exp().tolist()[0] == pytest.approx([0.4, 0.1])
    expected = 0.5 * (0.8 * math.log(0.8 / 0.7) + 0.2 * math.log(0.2 / 0.3))
    assert float(loss.kl(taught, log_q)) == pytest.approx(expected)
    assert float(loss.acceptance(taught, log_q)) == pytest.approx(0.4 + 0.1)
    assert float(loss.agreement(taught, log_q, torch.tensor([3, 0]))) == 1
    assert float(loss.agreement(taught, log_q.flip(1), torch.tensor([3, 0]))) == 0


# Batches


def test_every_text_comes_before_one_comes_again() -> None:
    texts = [Text([number, number, number], 1) for number in range(10)]
    batches = Batches(texts, Recipe(batch_texts=4, length=8))
    order = list(itertools.chain(*(batches.batch(step).tokens[:, 0].tolist() for step in range(5))))
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert batches.batch(1).tokens[:, 0].tolist() == order[4:8], "a batch depends on its step alone"
    assert Batches(texts, Recipe(batch_texts=10, seed=1)).batch(0).tokens[:, 0].tolist() != order[:10]


@pytest.mark.parametrize(("n", "n_prompt", "length"), [(20, 4, 8), (20, 15, 8), (9, 8, 8), (5, 0, 8), (2, 1, 2)])
def test_a_piece_holds_some_continuation(n: int, n_prompt: int, length: int) -> None:
    text = Text(list(range(n)), n_prompt)
    pieces = [crop(text, length, share / 100) for share in range(100)]
    for piece in pieces:
        start = piece.tokens[0]
        assert piece.tokens == list(range(start, start + min(n, length)))
        assert piece.prompt == [token for token in piece.tokens if token < n_prompt]
        assert piece.continuation
    assert pieces[-1].tokens[-1] == n - 1


def test_where_a_batch_is_learnt() -> None:
    """After prompt [1, 2], token 3 is predicted at 2; nothing is after the last, and padding is nothing."""
    batch = collate([Text([1, 2, 3, 4], 2), Text([5, 6], 0), Text([7, 8, 9], 2)], prompt_weight=0.25)
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]]
    assert batch.at.tolist() == [0, 1, 2, 4, 8, 9]
    assert batch.weight.tolist() == [0.25, 1, 1, 1, 0.25, 1]
    assert batch.is_said.tolist() == [False, True, True, True, False, True]
    assert collate([Text([1, 2, 3, 4], 2)], prompt_weight=0.0).at.tolist() == [1, 2]


@pytest.mark.parametrize("texts", [[], [Text([1, 2], 2)], [Text([1], 0)]])
def test_texts_without_a_continuation(texts: list[Text]) -> None:
    with pytest.raises(ConfigError, match=rf"none of {len(texts)} texts has a continuation to learn from"):
        Batches(texts, SHORT)


# The recipe


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"batch_texts": 0}, "batch_texts is 0; it must be at least 1"),
        ({"length": 1}, "length is 1; it must be at least 2"),
        ({"warmup": -1}, "warmup is -1; it must be 0 or more"),
        ({"learning_rate": 0.0}, r"learning_rate is 0.0; it must be more than 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be 0 or more"),
        ({"final_rate": 1.5}, r"final_rate is 1.5; it must be at most 1"),
        ({"clip": -1.0}, r"clip is -1.0; it must be 0 or more"),
        ({"loss": "ce"}, r"loss is 'ce'; it must be one of kl, tv, kl\+tv"),
    ],
)
def test_recipes_that_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**wrong)


# Interrupted and resumed


class Interrupt:
    """A progress that ends the run after some steps."""

    def __init__(self, after: int) -> None:
        self._after = after

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done == self._after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 2, 3, 5, 6])
def test_interrupted_and_resumed_is_uninterrupted(
    target: Transformer, texts: list[Text], tmp_path: Path, after: int
) -> None:
    whole = student_of(target)
    expected = train(whole, target, texts, SHORT, folder=tmp_path / "whole")
    student = student_of(target)
    with pytest.raises(KeyboardInterrupt):
        train(student, target, texts, SHORT, folder=tmp_path / "cut", save_every=2, progress=Interrupt(after))
    assert not any(weight.requires_grad for weight in student.parameters())
    resumed, done = student_of(target), []
    reports = train(
        resumed,
        target,
        texts,
        SHORT,
        folder=tmp_path / "cut",
        save_every=2,
        progress=lambda _, n, __: done.append(n),
    )
    assert done[0] == after // 2 * 2
    assert reports == expected
    theirs = weights_of(resumed)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(whole).items())
    assert len(list((tmp_path / "cut").iterdir())) == 2


def test_a_finished_training_is_not_done_again(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    first, again = student_of(target), student_of(target)
    reports = train(first, target, texts, SHORT, folder=tmp_path)
    assert train(again, target, texts, SHORT, folder=tmp_path, watch=lambda *_: pytest.fail("trained")) == reports
    theirs = weights_of(again)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(first).items())


def test_another_training_does_not_go_on(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    train(student_of(target), target, texts, SHORT, folder=tmp_path)
    message = rf"steps is 8, and the training begun in {tmp_path} has 7; set it as it was to go on, remove"
    with pytest.raises(ConfigError, match=message):
        train(student_of(target), target, texts, replace(SHORT, steps=8), folder=tmp_path)
    with pytest.raises(ConfigError, match="texts is '"):
        train(student_of(target), target, texts[1:], SHORT, folder=tmp_path)
    with pytest.raises(ConfigError, match="the draft at first is '"):
        train(student_of(target, 100), target, texts, SHORT, folder=tmp_path)


def _truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])


def _remove(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def _no_reports(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reports": [[1]]}))


@pytest.mark.parametrize("damage", [_truncate, _remove, _no_reports])
def test_damaged_checkpoints(
    target: Transformer, texts: list[Text], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    train(student_of(target), target, texts, SHORT, folder=tmp_path)
    damage(tmp_path)
    with pytest.raises(CorruptModel, match=r"the checkpoint in .* is damaged .*; remove its checkpoint files to begin"):
        train(student_of(target), target, texts, SHORT, folder=tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint(target: Transformer, texts: list[Text], tmp_path: Path) -> None:
    expected = train(student_of(target), target, texts, SHORT, folder=tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        train(student_of(target), target, texts, SHORT, folder=folder, save_every=2, progress=Interrupt(3))
    with largest_file(20_000), pytest.raises(ModelError, match=r"cannot write .*checkpoint-00000004.safetensors"):
        train(student_of(target), target, texts, SHORT, folder=folder, save_every=2)
    assert {path.name for path in folder.iterdir()} == {"checkpoint.json", "checkpoint-00000002.safetensors"}
    assert train(student_of(target), target, texts, SHORT, folder=folder, save_every=2) == expected
