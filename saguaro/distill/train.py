"""Train a draft on its target's texts, with the target's distribution as labels.

Texts are the target's, not the draft's own continuations: a draft's token matters only if all tokens before it were
accepted, and these are the target's.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from saguaro.distill import loss
from saguaro.distill.batch import Batch, Batches, Texts
from saguaro.distill.checkpoint import Checkpoint, StepReport
from saguaro.distill.parallel import Parallel, hidden_states
from saguaro.distill.recipe import Recipe
from saguaro.errors import ConfigError
from saguaro.model.transformer import Transformer
from saguaro.types import Progress

STAGE = "training the draft"
SAVE_SECONDS = 60.0  # most work lost by an interruption; writing takes seconds
CHUNK = 2**26  # most target logits at a time


def train(
    student: Transformer,
    target: Transformer,
    texts: Texts,
    recipe: Recipe,
    *,
    folder: Path,
    progress: Progress = lambda *_: None,
    watch: Callable[[int, StepReport], None] = lambda *_: None,  # called after each step
    save_every: int | None = None,  # steps; without it, about once a minute
) -> list[StepReport]:
    """Train all weights of the student except the shared embedding; return the reports of all steps.

    Checkpoints are in folder: the same call resumes an interrupted one, and on a CPU gives the same bits.
    """
    batches = Batches(texts, recipe)
    origin = {"texts": batches.digest, "the draft at first": _digest(student)}
    checkpoint = Checkpoint(folder, {**asdict(recipe), **origin})
    with _trained(student) as weights, _tensor_cores():
        optimizer = _optimizer(weights, recipe)
        reports = checkpoint.restore(weights, optimizer)
        progress(STAGE, len(reports), recipe.steps)
        batch, saved = batches.batch(len(reports)), time.monotonic()
        for step in range(len(reports), recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            figures = _gradients(student, target, batch, recipe)
            if recipe.clip:
                nn.utils.clip_grad_norm_(weights.values(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            batch = batches.batch(step + 1)  # while the GPU still computes
            reports.append(StepReport(*figures.tolist()))
            _check(reports, recipe)
            is_due = time.monotonic() - saved > SAVE_SECONDS if save_every is None else (step + 1) % save_every == 0
            if is_due or step + 1 == recipe.steps:
                checkpoint.save(weights, optimizer, reports)
                saved = time.monotonic()
            watch(step, reports[-1])
            progress(STAGE, step + 1, recipe.steps)
    return reports


@contextmanager
def _trained(student: Transformer) -> Iterator[dict[str, nn.Parameter]]:
    """The trainable weights by name: all except the embedding, which is the target's."""
    weights = {name: weight for name, weight in student.named_parameters() if name != "embedding"}
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


def _digest(student: Transformer) -> str:
    """Hash of the student's token map and weights."""
    assert student.token_map is not None
    digest = hashlib.sha256()
    for tensor in (student.token_map, *(weight for name, weight in student.named_parameters() if name != "embedding")):
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


def _gradients(student: Transformer, target: Transformer, batch: Batch, recipe: Recipe) -> Tensor:
    """Accumulate the gradients of a batch; return a StepReport's figures [3]."""
    device = student.device
    tokens, at = batch.tokens.to(device), batch.at.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        with torch.no_grad():
            theirs = hidden_states(target, tokens).index_select(0, at)  # [n, D]
        ours = hidden_states(student, tokens).index_select(0, at)  # [n, D]
    # Heads run forward and backward on a few positions at a time, so that [n, V] and [n, R] are never allocated.
    cut = ours.detach().requires_grad_()
    weight, is_said = batch.weight.to(device) / batch.weight.sum(), batch.is_said.to(device)
    totals = torch.zeros(3, device=device)
    for rows in torch.arange(len(at), device=device).split(max(1, CHUNK // target.spec.n_vocab)):
        lost, said = _compare(student, target, cut[rows], theirs[rows], recipe)
        value = (weight[rows] * lost).sum()
        (batch.share * value).backward()
        totals += torch.stack((value.detach(), *(said * is_said[rows]).sum(1)))
    ours.backward(cut.grad)
    n_said = int(batch.is_said.sum())
    return totals / totals.new_tensor([1, n_said, n_said])


def _compare(
    student: Transformer, target: Transformer, ours: Tensor, theirs: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Hidden states [n, D] of both -> the loss [n], and agreement and acceptance [2, n]."""
    by, ids = Parallel(1, student.spec.softmax_scale), student.token_map
    assert ids is not None
    with torch.no_grad():
        taught = loss.lesson(target.logits(theirs, by), ids)
    log_q = student.head_logits(ours, by).log_softmax(1)
    accepted = loss.acceptance(taught, log_q)
    divergence = loss.kl(taught, log_q)
    lost = {"kl": divergence, "tv": 1 - accepted, "kl+tv": divergence + recipe.tv_weight * (1 - accepted)}[recipe.loss]
    return lost, torch.stack((loss.agreement(taught, log_q, ids), accepted.detach()))


def _check(reports: list[StepReport], recipe: Recipe) -> None:
    last = reports[-1].loss
    if not abs(last) < float("inf"):
        raise ConfigError(
            f"the loss is {last} at step {len(reports)} with learning_rate {recipe.learning_rate}; use a lower one"
        )
