"""What is trained: a forward pass over a batch, and a loss. The gradients of any of them are accumulated here.

A learner's pass ends at hidden states. Heads run forward and backward on a few positions at a time, so that logits of
all positions are never allocated; the target's are computed once, whatever the number of steps that learn from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from saguaro.distill import loss
from saguaro.distill.batch import Batch
from saguaro.distill.loss import Lesson
from saguaro.distill.parallel import Parallel, hidden_states
from saguaro.distill.recipe import Recipe
from saguaro.model.transformer import Transformer

CHUNK = 2**26  # most target logits at a time


@dataclass(frozen=True)
class Pass:
    """Hidden states at the n positions of a batch, of the target and of each of S steps of the draft."""

    theirs: Tensor  # [n, D]
    ours: list[Tensor]  # S times [n, D], with gradients
    weight: Tensor  # [S, n] float32: in the loss
    judged: Tensor  # [n] float32: in agreement and acceptance, which are of the first step; their sum is 1


class Learner(Protocol):
    """A draft, its target and how it learns."""

    @property
    def draft(self) -> Transformer:
        """What is trained: all weights but the embedding."""

    @property
    def target(self) -> Transformer:
        """What it learns from."""

    @property
    def recipe(self) -> Recipe:
        """How it learns."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What a training depends on beside the recipe, the texts and the draft's weights at first."""

    def run(self, batch: Batch) -> Pass:
        """The pass over a batch, which is on the draft's device."""

    def lost(self, taught: Lesson, log_q: Tensor) -> Tensor:  # [n, R] -> [n]
        """The loss of each position."""


class ModelLearner:
    """A language model: one step, at every position."""

    about: Mapping[str, Any] = {}

    def __init__(self, draft: Transformer, target: Transformer, recipe: Recipe) -> None:
        self.draft, self.target, self.recipe = draft, target, recipe

    def run(self, batch: Batch) -> Pass:
        """See Learner."""
        with torch.no_grad():
            theirs = hidden_states(self.target, batch.tokens).index_select(0, batch.at)
        ours = hidden_states(self.draft, batch.tokens).index_select(0, batch.at)
        weight, judged = batch.weight / batch.weight.sum(), batch.is_said / batch.is_said.sum()
        return Pass(theirs, [ours], weight[None], judged)

    def lost(self, taught: Lesson, log_q: Tensor) -> Tensor:
        """See Learner."""
        return loss.weighed(self.recipe.loss, self.recipe.tv_weight, loss.kl, taught, log_q)


class Gradients:
    """Accumulates a learner's gradients."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._their_head = Parallel(1, learner.target.spec.softmax_scale)  # one, since it converts the head once

    def add(self, batch: Batch) -> Tensor:  # [3] float32
        """Add those of a batch, which is on the draft's device; return a StepReport's figures. The host waits for
        nothing here."""
        learner, device = self._learner, self._learner.draft.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            passed = learner.run(batch)
        n, slopes = len(passed.theirs), [torch.empty_like(one) for one in passed.ours]
        totals = torch.zeros(3, device=device)
        n_rows = max(1, CHUNK // learner.target.spec.n_vocab)
        for first in range(0, n, n_rows):
            rows = slice(first, min(n, first + n_rows))
            taught = self._taught(passed.theirs[rows])
            for step, ours in enumerate(passed.ours):
                slopes[step][rows], value, log_q = self._compare(
                    ours[rows], taught, passed.weight[step, rows], batch.share
                )
                totals[0] += value
                if step == 0:
                    totals[1:] += (self._figures(taught, log_q) * passed.judged[rows]).sum(1)
        torch.autograd.backward(passed.ours, slopes)
        return totals

    @torch.no_grad()
    def _taught(self, theirs: Tensor) -> Lesson:  # [n, D]
        target, ids = self._learner.target, self._learner.draft.token_map
        assert ids is not None
        return loss.lesson(target.logits(theirs, self._their_head), ids)

    def _compare(
        self, ours: Tensor, taught: Lesson, weight: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # [n, D], [n]
        """The gradient [n, D] of these hidden states, the loss, and log q [n, R]."""
        draft, ours = self._learner.draft, ours.detach().requires_grad_()
        log_q = draft.head_logits(ours, Parallel(1, draft.spec.softmax_scale)).log_softmax(1)
        value = (weight * self._learner.lost(taught, log_q)).sum()
        (share * value).backward()
        assert ours.grad is not None
        return ours.grad, value.detach(), log_q.detach()

    @torch.no_grad()
    def _figures(self, taught: Lesson, log_q: Tensor) -> Tensor:  # [n, R] -> [2, n]
        """Agreement and acceptance."""
        ids = self._learner.draft.token_map
        assert ids is not None
        return torch.stack((loss.agreement(taught, log_q, ids), loss.acceptance(taught, log_q)))
