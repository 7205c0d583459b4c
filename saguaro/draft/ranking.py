"""From the draft's logits to a token and ranked candidates, for each verification rule.

Under shared noise the draft ranks by log q plus the target's own noise, and its token is the best candidate.
Under rejection its token is sampled from q with separate noise, and q is sent to the target. This noise must be new for
every draft of a position. Otherwise the choice of prepared outcomes would depend on the tokens drafted after them, and
the tokens that are used would no longer be distributed as q.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import sampling
from saguaro.target.sampler import Context, Sampler, rules

FIRST_DRAFT_SEED = 2**32  # smaller indices belong to a request's n outputs


@dataclass(frozen=True)
class Ranking:
    """R tokens and their candidates."""

    token: Tensor  # [R] int64
    candidates: Tensor  # [R, C] int64, best first
    scores: Tensor  # [R, C] descending
    q: Tensor | None  # [R, V] the token's distribution; None: it was not sampled

    def leads(self) -> Tensor:  # [R]
        """The lead of each token over the best other candidate; inf without another, -inf if it is no candidate.

        >>> candidates, scores = torch.tensor([[5, 6], [5, 6], [5, 6]]), torch.tensor([[3.0, 2.5]] * 3)
        >>> Ranking(torch.tensor([5, 6, 7]), candidates, scores, None).leads()
        tensor([ 0.5000, -0.5000,    -inf])
        """
        is_it, never = self.candidates == self.token[:, None], float("-inf")
        own = self.scores.masked_fill(~is_it, never).amax(1)
        other = self.scores.masked_fill(is_it, never).amax(1)
        return (own - other).nan_to_num(never, float("inf"), never)


class Ranker(Protocol):
    """Predicts the target's next token."""

    n_candidates: int

    def start(self) -> int:
        """Start a draft. Returns the number from which its noise is derived."""

    def __call__(self, logits: Tensor, places: Sequence[Context], drafts: Sequence[int] | None) -> Ranking:
        """Rank at every position, [R, V] -> [R]; drafts: the draft of each position; None: rank without sampling."""


class SharedRanker:
    """Ranks with the target's noise, by the draft's logits."""

    def __init__(self, sampler: Sampler, n_candidates: int) -> None:
        self._sampler, self.n_candidates = sampler, n_candidates

    def start(self) -> int:
        """Always 0: all drafts share the target's noise."""
        return 0

    def __call__(self, logits: Tensor, places: Sequence[Context], drafts: Sequence[int] | None) -> Ranking:
        """See Ranker."""
        candidates, scores = self._sampler.rank(logits, places, self.n_candidates)
        return Ranking(candidates[:, 0], candidates, scores, None)


class SampledRanker:
    """Samples from q. Candidates are the most likely tokens; with c < 1 by Saguaro sampling (Definition 14)."""

    def __init__(self, sampler: Sampler, n_candidates: int, fan_out: int, c: float, generation: int = 0) -> None:
        self._sampler, self.n_candidates = sampler, n_candidates
        self._fan_out, self._c, self._n_drafts = fan_out, c, generation << 40

    def start(self) -> int:
        """Return a new number for every draft."""
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
