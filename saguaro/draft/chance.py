"""How likely a draft's candidate is the target's next token, learnt while decoding.

The softmax of a node's scores says how sure the draft is of each candidate: its share. How often the target chose a
candidate of such a share and rank is counted, and that rate is its probability. Rows with noise are counted apart:
there, scores mean something else. Counts decay slowly and start from the share itself.
"""

from typing import Any

import torch
from torch import Tensor

from saguaro.draft.policy.kept import numbers

ODDS = (-8, -7, -6, -5, -4.5, -4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6)  # log-odds
RANKS = (1, 2, 4)  # bin edges, like the log-odds of a share
KEPT = 0.999  # of the counts, per row learnt
STRENGTH = 12.0  # weight of the share itself in each bin, in trials
LEAST, MOST = 1e-6, 0.999  # of a probability


class Chances:
    """The counts. All tensors keep their addresses."""

    def __init__(self, width: int, device: torch.device) -> None:
        """For nodes of W candidates."""
        edges = torch.tensor(ODDS, dtype=torch.float32)
        middle = torch.cat([edges[:1] - 1, (edges[1:] + edges[:-1]) / 2, edges[-1:] + 1]).sigmoid()
        n_ranks = len(RANKS) + 1
        self._edges, self._n_bins = edges.to(device), n_ranks * len(middle)
        rank = torch.bucketize(torch.arange(width), torch.tensor(RANKS), right=True)
        self._base = (rank * len(middle)).to(device)  # [W]: a candidate's first bin
        self._prior = middle.repeat(2 * n_ranks).to(device)
        self.counts = torch.stack([self._prior * 0, self._prior * 0])  # hits and trials
        self._rate = self._prior.clone()

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Rates, edges of log-odds, and each rank's first bin; bins of rows with noise, before those of greedy rows."""
        return self._rate, self._edges, self._base, self._n_bins

    @property
    def rates(self) -> tuple[Tensor, Tensor]:
        """Each bin's rate, and what it is before any trial."""
        return self._rate, self._prior

    def __call__(self, scores: Tensor, is_greedy: Tensor) -> tuple[Tensor, Tensor]:  # [..., W] descending, [...]
        """The log-probability of each candidate, -inf where there is none, and its bin: [..., W] each."""
        bins = torch.bucketize(scores.softmax(-1).logit(LEAST), self._edges, right=True) + self._base
        bins = bins + is_greedy[..., None] * self._n_bins
        chance = self._rate[bins].clamp(LEAST, MOST).log()
        return chance.masked_fill(~scores.isfinite(), float("-inf")), bins

    def state(self) -> list[list[float]]:
        """To be kept (policy/kept.py)."""
        found: list[list[float]] = self.counts.tolist()
        return found

    def restore(self, state: Any) -> None:
        """Continue from kept counts."""
        kept = [numbers(each, self.counts.shape[1]) for each in state]
        hits, trials = torch.tensor(kept, dtype=torch.float32)
        if bool((hits < 0).any()) or bool((hits > trials).any()):
            raise ValueError("more hits than trials")
        self.counts.copy_(torch.stack((hits, trials)))
        self._refresh()

    def _refresh(self) -> None:
        hits, trials = self.counts
        self._rate.copy_((hits + STRENGTH * self._prior) / (trials + STRENGTH))

    def learn(self, bins: Tensor, chosen: Tensor, is_trial: Tensor) -> None:  # [B, n, W], [B, n], [B, n, W]
        """Add these candidates of nodes, and which of a node's was the target's token; -1: none of them."""
        is_hit = torch.arange(bins.shape[2], device=bins.device) == chosen[..., None]
        counts = torch.stack((is_hit & is_trial, is_trial)).flatten(1).float()
        self.counts *= KEPT ** is_trial.flatten(1).any(1).sum()
        self.counts.index_add_(1, bins.flatten(), counts)
        self._refresh()
