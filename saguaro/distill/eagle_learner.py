"""Trains an EAGLE-3 head: several steps of drafting in a row (saguaro.distill.unroll), on features that the target
computes again for every batch.

Stored features would take 6 * D bytes per token: 24 KiB for a model of 8B, 6000 times its text. The target runs anyway:
the labels are its distributions, which are larger still.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saguaro.distill import loss
from saguaro.distill.batch import Batch
from saguaro.distill.learner import Pass
from saguaro.distill.loss import Lesson
from saguaro.distill.parallel import hidden_states
from saguaro.distill.recipe import Recipe
from saguaro.distill.unroll import places_before, unroll
from saguaro.model.eagle import Eagle
from saguaro.model.transformer import Taps, Transformer

UNROLL, DECAY = 7, 0.8


class EagleLearner:
    """See saguaro.distill.learner.Learner."""

    def __init__(self, draft: Eagle, target: Transformer, recipe: Recipe) -> None:
        self.draft, self.target, self.recipe = draft, target, recipe
        n_steps = UNROLL if recipe.unroll is None else recipe.unroll
        decay = DECAY if recipe.unroll_decay is None else recipe.unroll_decay
        share = decay ** torch.arange(n_steps, dtype=torch.float32, device=draft.device)
        self._share = share / share.sum()  # [S]: of each step in the loss
        self.about: Mapping[str, Any] = {"kind": "eagle3", "feature layers": list(draft.reads.taps)}
        assert draft.token_map is not None, "a head of its own is trained"
        can_say = torch.zeros(target.spec.n_vocab, dtype=torch.bool, device=draft.device)
        self._can_say = can_say.index_fill_(0, draft.token_map, True)  # [V]

    def run(self, batch: Batch) -> Pass:
        """See Learner."""
        theirs, features = self._features(batch)
        place, is_there = places_before(batch.at, batch.tokens.shape[1], len(self._share))
        steps = unroll(self.draft, batch.tokens, features, len(self._share))
        ours = [hidden.index_select(0, own) for hidden, own in zip(steps, place, strict=True)]
        weight = self._share[:, None] * is_there * (batch.weight / batch.weight.sum())
        judged = batch.is_said & is_there[0]
        return Pass(theirs, ours, weight, judged / judged.sum().clamp(min=1))

    def lost(self, taught: Lesson, log_q: Tensor) -> Tensor:
        """See Learner. Nothing is learnt where the target's first choice is a token that the head lacks."""
        lost = loss.weighed(self.recipe.loss, self.recipe.tv_weight, loss.kl_within, taught, log_q)
        return lost * self._can_say[taught.best]

    @torch.no_grad()
    def _features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's hidden states at the batch's positions [n, D], and the features of its tokens [B, L - 1, F]."""
        width = self.draft.reads.n_features
        kept = torch.empty(batch.tokens.numel(), width, device=self.target.device, dtype=self.target.dtype)
        theirs = hidden_states(self.target, batch.tokens, Taps(self.draft.reads.taps, kept))
        return theirs.index_select(0, batch.at), kept.view(*batch.tokens.shape, width)[:, :-1]
