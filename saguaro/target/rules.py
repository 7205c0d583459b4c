"""The two verification rules: from a step's logits to n_accepted and bonus.

Logit 0 of a row is after its text, logit j + 1 after node j of its speculation; a row with n nodes has n + 1.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saguaro.algo import sampling, tree
from saguaro.algo.verification import BROKEN, accept, acceptance, is_broken, reject
from saguaro.target.sampler import Context, Sampler, rules
from saguaro.types import Speculation

Decision = tuple[Tensor, Tensor, Tensor | None]  # n_accepted [B], bonus [B], and of trees the path [B, N]


class Rule(Protocol):
    """Decides which speculated tokens are accepted."""

    def __call__(self, logits: Tensor, places: Sequence[Context], spec: Speculation) -> Decision:  # [L, V]
        """Decide a step; spec has B >= 1 rows. The bonus is BROKEN if logits are not finite."""


class SharedNoise:
    """Accept tokens that equal the target's own. The draft uses the same noise."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, places: Sequence[Context], spec: Speculation) -> Decision:
        """See Rule."""
        targets = _by_row(self._sampler(logits, places), spec)  # [B, N+1]
        width, device = targets.shape[1] - 1, logits.device
        tokens, length = spec.tokens[:, :width].to(device), spec.length.to(device)
        if spec.parent is None:
            return *accept(targets, tokens, length), None
        n_accepted, path, bonus = tree.accept(targets, tokens, spec.parent[:, :width].to(device), length)
        return n_accepted, bonus, path


class Rejection:
    """Accept with probability min(1, p/q), where q is the distribution each token was sampled from."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, places: Sequence[Context], spec: Speculation) -> Decision:
        """See Rule."""
        assert spec.parent is None, "rejection is for chains"
        device, n_known = logits.device, self._sampler.n_known
        each = rules(places, device)
        broken = _by_row(is_broken(logits[:, :n_known]), spec)  # [B, K+1]
        p = _by_row(sampling.probabilities(self._sampler.shape(logits, places), each)[:, :n_known], spec)
        width = p.shape[1] - 1
        tokens, length = spec.tokens[:, :width].to(device), spec.length.to(device)
        q = F.one_hot(tokens, n_known).to(p) if spec.q is None else spec.q[:, :width].to(p)
        seeds = _by_row(each.seeds, spec)[:, :1]  # [B, 1]: a row has one seed and consecutive positions
        first = _by_row(each.positions, spec)[:, :1]
        positions = first + torch.arange(width, device=device)
        chance = acceptance(p[:, :width], q, tokens)  # [B, K]
        stands = sampling.flip(chance.flatten(), seeds.expand_as(positions).flatten(), positions.flatten())
        n_accepted, law = reject(p, q, length, stands.view_as(chance) & ~broken[:, :width])
        bonus = sampling.pick(law.log(), seeds[:, 0], first[:, 0] + n_accepted)
        return n_accepted, bonus.masked_fill_(broken.gather(1, n_accepted[:, None])[:, 0], BROKEN), None


def _by_row(flat: Tensor, spec: Speculation) -> Tensor:  # [L, ...] -> [B, K+1, ...]
    """Split values per position into rows, padded with 0."""
    return pad_sequence(flat.split((spec.length + 1).tolist()), batch_first=True)
