"""Train a draft on its target's texts, with the target's distribution as labels.

Texts are the target's, not the draft's own continuations: a draft's token matters only if all tokens before it were
accepted, and these are the target's.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from saguaro.distill.batch import Batches, Texts
from saguaro.distill.checkpoint import Checkpoint, StepReport
from saguaro.distill.learner import Gradients, Learner
from saguaro.distill.recipe import Recipe
from saguaro.errors import ConfigError
from saguaro.model.transformer import Transformer
from saguaro.types import Progress

STAGE = "training the draft"
SAVE_SECONDS = 60.0  # most work lost by an interruption; writing takes seconds
LAG = 1  # steps that a GPU is ahead of what is reported, so that it never waits for the host


def train(
    learner: Learner,
    texts: Texts,
    *,
    folder: Path,
    progress: Progress = lambda *_: None,
    watch: Callable[[int, StepReport], None] = lambda *_: None,  # called after each step
    save_every: int | None = None,  # steps; without it, about once a minute
) -> list[StepReport]:
    """Train all weights of the draft except the shared embedding; return the reports of all steps.

    Checkpoints are in folder: the same call resumes an interrupted one, and on a CPU gives the same bits.
    """
    recipe, draft = learner.recipe, learner.draft
    batches = Batches(texts, recipe)
    origin = {"texts": batches.digest, "the draft at first": _digest(draft), **learner.about}
    checkpoint = Checkpoint(folder, {**asdict(recipe), **origin})
    with _trained(draft) as weights, _tensor_cores():
        optimizer, gradients, lag = _optimizer(weights, recipe), Gradients(learner), lag_on(draft.device)
        reports = checkpoint.restore(weights, optimizer)
        progress(STAGE, len(reports), recipe.steps)
        batch, saved = batches.batch(len(reports)).on(draft.device), time.monotonic()
        running: deque[Figures] = deque()  # of steps that the device may still compute
        for step in range(len(reports), recipe.steps):
            running.append(Figures(gradients.add(batch)))
            _descend(weights, optimizer, recipe, step)
            batch = batches.batch(step + 1).on(draft.device)  # while the GPU still computes
            is_due = time.monotonic() - saved > SAVE_SECONDS if save_every is None else (step + 1) % save_every == 0
            is_due |= step + 1 == recipe.steps
            n_before = len(reports)
            while len(running) > (0 if is_due else lag):
                reports.append(running.popleft().report())
                _check(reports, recipe)
            if is_due:
                checkpoint.save(weights, optimizer, reports)
                saved = time.monotonic()
            for done in range(n_before, len(reports)):
                watch(done, reports[done])
                progress(STAGE, done + 1, recipe.steps)
    return reports


def _descend(weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, recipe: Recipe, step: int) -> None:
    """Change the weights by their gradients, and drop these."""
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate(step)
    if recipe.clip:
        nn.utils.clip_grad_norm_(weights.values(), recipe.clip)
    optimizer.step()
    optimizer.zero_grad()


def lag_on(device: torch.device) -> int:
    """Steps that are launched before a step is reported."""
    return LAG if device.type == "cuda" else 0


class Figures:
    """A step's figures, on the way to the host: reading them waits for this step, not for later ones."""

    def __init__(self, figures: Tensor) -> None:  # [3]
        self._arrived: torch.cuda.Event | None = None
        self._values = figures
        if figures.device.type == "cuda":
            self._values = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._values.copy_(figures, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(figures.device))

    def report(self) -> StepReport:
        """Wait for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return StepReport(*self._values.tolist())


@contextmanager
def _trained(draft: Transformer) -> Iterator[dict[str, nn.Parameter]]:
    """The trainable weights by name: all except the embedding, which is the target's."""
    weights = {name: weight for name, weight in draft.named_parameters() if name != "embedding"}
    assert all(weight.dtype == torch.float32 for weight in weights.values()), "master weights"
    for weight in weights.values():
        weight.requires_grad_(True)
    try:
        yield weights
    finally:
        for weight in weights.values():
            weight.requires_grad_(False)
            weight.grad = None


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """float32 products on tensor cores (TF32): factors of 10 bits, with float32 sums, unlike half precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _digest(draft: Transformer) -> str:
    """Hash of the draft's token map and weights."""
    assert draft.token_map is not None
    digest = hashlib.sha256()
    for tensor in (draft.token_map, *(weight for name, weight in draft.named_parameters() if name != "embedding")):
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _optimizer(weights: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    vectors = [weight for weight in weights.values() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def _check(reports: list[StepReport], recipe: Recipe) -> None:
    last = reports[-1].loss
    if not abs(last) < float("inf"):
        raise ConfigError(
            f"the loss is {last} at step {len(reports)} with learning_rate {recipe.learning_rate}; use a lower one"
        )
