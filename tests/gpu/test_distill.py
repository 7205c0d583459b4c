"""Training on a CUDA device: near that of the CPU, and a step never waits for the device. Skipped without one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saguaro.distill.batch import Batches
from saguaro.distill.corpus import Text
from saguaro.distill.eagle_head import make_head
from saguaro.distill.eagle_learner import EagleLearner
from saguaro.distill.learner import Gradients, Learner, ModelLearner
from saguaro.distill.recipe import Recipe
from saguaro.distill.student import make_student
from saguaro.distill.train import train
from saguaro.model.load import load
from saguaro.model.tiny import write_tiny
from saguaro.model.transformer import Transformer
from tests.distill.test_train import Interrupt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RECIPE = Recipe(steps=6, batch_texts=4, length=24, learning_rate=3e-3, warmup=2, loss="kl+tv")
TEXTS = [Text(torch.randint(264, (20 + i,), generator=torch.Generator().manual_seed(i)).tolist(), 4) for i in range(12)]


def model_learner(target: Transformer) -> Learner:
    return ModelLearner(make_student(target, [0, 5], torch.arange(288)), target, RECIPE)


def eagle_learner(target: Transformer) -> Learner:
    return EagleLearner(make_head(target, (2, 3, 5), torch.arange(288), seed=0), target, RECIPE)


KINDS = pytest.mark.parametrize("made", [model_learner, eagle_learner])


def learner_on(device: str, dtype: torch.dtype, folder: Path, made: Callable[[Transformer], Learner]) -> Learner:
    path = write_tiny(folder / device, "llama", num_hidden_layers=6)
    return made(load("target", path, torch.device(device), dtype).model)


@KINDS
def test_losses_are_near_those_of_the_cpu(made: Callable[[Transformer], Learner], tmp_path: Path) -> None:
    """With a bfloat16 target, and interrupted."""
    expected = train(learner_on("cpu", torch.float32, tmp_path, made), TEXTS, folder=tmp_path / "on_cpu")
    folder = tmp_path / "on_gpu"
    learner = learner_on("cuda", torch.bfloat16, tmp_path, made)
    with pytest.raises(KeyboardInterrupt):
        train(learner, TEXTS, folder=folder, save_every=2, progress=Interrupt(4))
    found = train(learner_on("cuda", torch.bfloat16, tmp_path, made), TEXTS, folder=folder, save_every=2)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in expected], rel=0.1)


@KINDS
def test_a_step_never_waits_for_the_device(made: Callable[[Transformer], Learner], tmp_path: Path) -> None:
    learner = learner_on("cuda", torch.bfloat16, tmp_path, made)
    for name, weight in learner.draft.named_parameters():
        weight.requires_grad_(name != "embedding")
    gradients, batches = Gradients(learner), Batches(TEXTS, RECIPE)
    gradients.add(batches.batch(0).on(learner.draft.device))  # what is built on first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients.add(batches.batch(1).on(learner.draft.device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
