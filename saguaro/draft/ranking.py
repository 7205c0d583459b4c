"""From the draft's logits to a token and candidates for it: one guess for each rule of verification.

Under shared noise the draft ranks by log q plus the target's own noise, and its token is the first of the ranking.
Under rejection its token is drawn from q, with noise of its own, and q goes along to the target. That noise must be new
for every draft of a position: were it the same, then which outcomes get prepared would tell something about the tokens
that are drafted after them, and given that they are used they would no longer be drawn from q.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import sampling
from saguaro.target.sampler import Context, Sampler, rules

FIRST_DRAFT_SEED = 2**32  # derived seeds below it belong to a request's n outputs


@dataclass(frozen=True)
class Ranking:
    """R guesses."""

    token: Tensor  # [R] int64
    candidates: Tensor  # [R, C] int64, best first
    scores: Tensor  # [R, C] descending
    q: Tensor | None  # [R, V] what the token was drawn from; None: it was not drawn

    def leads(self) -> Tensor:  # [R]
        """How far each token is ahead of the best other candidate; inf where there is none, -inf for one that is none.

        >>> candidates, scores = torch.tensor([[5, 6], [5, 6], [5, 6]]), torch.tensor([[3.0, 2.5]] * 3)
        >>> Ranking(torch.tensor([5, 6, 7]), candidates, scores, None).leads()
        tensor([ 0.5000, -0.5000,    -inf])
        """
        is_it, never = self.candidates == self.token[:, None], float("-inf")
        own = self.scores.masked_fill(~is_it, never).amax(1)
        other = self.scores.masked_fill(is_it, never).amax(1)
        return (own - other).nan_to_num(never, float("inf"), never)


class Ranker(Protocol):
    """Guesses what the target will say."""

    n_candidates: int

    def start(self) -> int:
        """Begin a draft; the name under which its tokens are drawn."""

    def __call__(self, logits: Tensor, places: Sequence[Context], drafts: Sequence[int] | None) -> Ranking:
        """Guess at every place, [R, V] -> [R]; drafts: of which draft each is a part, or None to rank and not draw."""


class SharedRanker:
    """What the target would say with these logits and its own noise."""

    def __init__(self, sampler: Sampler, n_candidates: int) -> None:
        self._sampler, self.n_candidates = sampler, n_candidates

    def start(self) -> int:
        """All drafts share the target's noise."""
        return 0

    def __call__(self, logits: Tensor, places: Sequence[Context], drafts: Sequence[int] | None) -> Ranking:
        """See Ranker."""
        candidates, scores = self._sampler.rank(logits, places, self.n_candidates)
        return Ranking(candidates[:, 0], candidates, scores, None)


class SampledRanker:
    """A sample of q, and the likeliest tokens as candidates; with c < 1 by Saguaro sampling (Definition 14)."""

    def __init__(self, sampler: Sampler, n_candidates: int, fan_out: int, c: float, generation: int = 0) -> None:
        self._sampler, self.n_candidates = sampler, n_candidates
        self._fan_out, self._c, self._n_drafts = fan_out, c, generation << 40

    def start(self) -> int:
        """A draft of its own."""
        self._n_drafts += 1
        return self._n_drafts

    def __call__(self, logits: Tensor, places: Sequence[Context], drafts: Sequence[int] | None) -> Ranking:
        """See Ranker."""
        logits = self._sampler.shape(logits, places)[:, : self._sampler.n_known]
        each = rules(places, logits.device)
        scores = logits.log_softmax(-1)
        best = scores.topk(min(self.n_candidates, scores.shape[1]), dim=-1)
        if drafts is None:
            return Ranking(best.indices[:, 0], best.indices, best.values, None)
        q = sampling.probabilities(logits, each)
        if self._c < 1:
            q = sampling.saguaro_logits(q.log(), self._fan_out, self._c).softmax(-1)
        seeds = [
            rng.derive_seed(request.seed, FIRST_DRAFT_SEED + draft)
            for (request, _), draft in zip(places, drafts, strict=True)
        ]
        own = torch.tensor(seeds, dtype=torch.int64, device=logits.device)
        return Ranking(sampling.pick(q.log(), own, each.positions), best.indices, best.values, q)
