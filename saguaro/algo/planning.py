"""Choose the outcomes to prepare while a chain is verified: pairs (k accepted, bonus token) for each row.

Invariant: planned outcomes are possible and distinct. k is at most length, and after k < length accepted tokens the
bonus is never the in-flight token itself, which would have been accepted. At k = length every candidate is possible.
All functions are a fixed sequence of tensor operations, independent of values. Paper: Definition 11, Theorem 18.

tokens         s_0   s_1   s_2                K = 3, length = 3
k            0     1     2     3              the bonus after k accepted tokens replaces s_k
candidates  [C]   [C]   [C]   [C]             without s_k, except at the last k
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ahead:
    """B chains in flight, with the draft's candidates at each position."""

    slots: Tensor  # [B] int64: slot of each row
    tokens: Tensor  # [B, K] int64: tokens in flight; 0 beyond length
    length: Tensor  # [B] int64: 0..K
    candidates: Tensor  # [B, K+1, C] int64: for the token after the first j in flight, best first; all different
    is_known: Tensor  # [B, K+1, C] bool: False: no candidate
    is_primary: Tensor  # [B] bool: the speculation came from the cache


@dataclass(frozen=True)
class Planned:
    """Outcomes to prepare, first ones first: M entries for each of B rows."""

    slots: Tensor  # [B] int64
    k: Tensor  # [B, M] int64; -1: unused entry
    token: Tensor  # [B, M] int64; 0 in unused entries


def alternatives(ahead: Ahead) -> Tensor:  # [B, K+1, C] bool
    """The candidates that may be the bonus: not the in-flight token at k < length, and none at k > length.

    >>> one = Ahead(
    ...     slots=torch.tensor([0]),
    ...     tokens=torch.tensor([[7, 0]]),
    ...     length=torch.tensor([1]),
    ...     candidates=torch.tensor([[[7, 8], [0, 6], [1, 2]]]),
    ...     is_known=torch.ones(1, 3, 2, dtype=torch.bool),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> alternatives(one).tolist()
    [[[False, True], [True, True], [False, False]]]
    """
    k, length = torch.arange(ahead.candidates.shape[1], device=ahead.candidates.device), ahead.length[:, None]
    in_flight = torch.cat([ahead.tokens, torch.zeros_like(length)], dim=1)  # [B, K+1]
    is_taken = (ahead.candidates == in_flight[..., None]) & (k < length)[..., None]
    return ahead.is_known & ~is_taken & (k <= length)[..., None]


def chance_of_length(accept: Tensor, length: Tensor) -> Tensor:  # [B, K], [B] -> [B, K+1]
    """P(exactly the first k of `length` tokens are accepted). accept[i] is P(token i is accepted | all before were).

    >>> chance_of_length(torch.tensor([[0.75, 0.5]]), torch.tensor([2])).flatten()
    tensor([0.2500, 0.3750, 0.3750])
    >>> chance_of_length(torch.tensor([[0.75, 0.5]]), torch.tensor([1])).flatten()
    tensor([0.2500, 0.7500, 0.0000])
    """
    k = torch.arange(accept.shape[1] + 1, device=accept.device)
    one = accept.new_ones(len(accept), 1)
    reached = torch.cat([one, accept.cumprod(1)], dim=1)
    rejected = torch.where(k < length[:, None], torch.cat([1 - accept, one], dim=1), 1)
    return reached * rejected * (k <= length[:, None])


def by_fan_out(ahead: Ahead, fan_out: Tensor, M: int) -> Planned:  # [B, K+1] int64
    """The F_k best alternatives at each k: all the first ones, then all the second ones, until M are found.

    >>> one = Ahead(
    ...     slots=torch.tensor([3]),
    ...     tokens=torch.tensor([[7]]),
    ...     length=torch.tensor([1]),
    ...     candidates=torch.tensor([[[7, 8], [5, 6]]]),
    ...     is_known=torch.ones(1, 2, 2, dtype=torch.bool),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> planned = by_fan_out(one, torch.tensor([[1, 2]]), M=4)
    >>> planned.k, planned.token
    (tensor([[ 0,  1,  1, -1]]), tensor([[8, 5, 6, 0]]))
    """
    is_left = alternatives(ahead)
    rank = is_left.long().cumsum(-1) - 1
    is_chosen = is_left & (rank < fan_out[..., None])
    n = rank.shape[-1]
    order = torch.where(is_chosen, rank, n).flatten(1).sort(dim=-1, stable=True)  # ties to the smallest k
    rank, at = order.values[:, :M], order.indices[:, :M]
    is_planned = rank < n
    k = torch.where(is_planned, at // n, -1)
    token = torch.where(is_planned, ahead.candidates.flatten(1).gather(1, at), 0)
    n_left = M - at.shape[1]  # more entries than outcomes
    pad = torch.nn.functional.pad
    return Planned(ahead.slots, pad(k, (0, n_left), value=-1), pad(token, (0, n_left)))
