"""The two verification rules: from a step's logits to n_accepted and bonus.

Logit 0 of a row is after its text, logit j + 1 after node j of its speculation; a row with n nodes has n + 1.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saguaro.algo import sampling, tree
from saguaro.algo.verification import BROKEN, accept, is_broken, reject
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
    """Accept with probability min(1, p/q), from sibling to sibling; q is the distribution they were drawn from."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, places: Sequence[Context], spec: Speculation) -> Decision:
        """See Rule."""
        device, n_known = logits.device, self._sampler.n_known
        each = rules(places, device)
        broken = _by_row(is_broken(logits[:, :n_known]), spec)  # [B, N+1]
        p = _by_row(sampling.probabilities(self._sampler.shape(logits, places), each)[:, :n_known], spec)
        p = p.masked_fill(broken[..., None], float("nan"))  # nothing stands with this probability
        b, width = len(p), p.shape[1] - 1
        parent = torch.arange(-1, width - 1).expand(b, width) if spec.parent is None else spec.parent[:, :width]
        most = 1 if spec.parent is None else _most_siblings(parent, spec.length)
        q = p.new_zeros(b, width, n_known) if spec.q is None else spec.q[:, :width].to(p)
        tokens, parent, length = (x.to(device) for x in (spec.tokens[:, :width], parent, spec.length))
        seeds, first = (_by_row(x, spec)[:, 0] for x in (each.seeds, each.positions))
        coins = partial(sampling.stand, parent=parent, seeds=seeds, positions=first)
        n_accepted, path, law = reject(p, q, tokens, parent, length, most, coins)
        bonus = sampling.pick(law.log(), seeds, first + n_accepted)
        last = torch.cat((path.new_full((b, 1), -1), path), 1).gather(1, n_accepted[:, None])
        bonus.masked_fill_(broken.gather(1, last + 1)[:, 0], BROKEN)
        return n_accepted, bonus, None if spec.parent is None else path


def _most_siblings(parent: Tensor, length: Tensor) -> int:
    """The most children of a node."""
    is_real = torch.arange(parent.shape[1]) < length[:, None]
    ranks = torch.where(is_real, tree.siblings(parent)[1], 0)
    return int(ranks.max()) + 1 if ranks.numel() else 1


def _by_row(flat: Tensor, spec: Speculation) -> Tensor:  # [L, ...] -> [B, K+1, ...]
    """Split values per position into rows, padded with 0."""
    return pad_sequence(flat.split((spec.length + 1).tolist()), batch_first=True)
