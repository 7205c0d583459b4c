"""Choose the outcomes to prepare while a speculation is verified: pairs (k accepted, bonus token) for each row.

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

NEVER = float("-inf")


@dataclass(frozen=True)
class Ahead:
    """B speculations in flight, with the draft's candidates at each position."""

    slots: Tensor  # [B] int64: slot of each row
    tokens: Tensor  # [B, K] int64: tokens in flight; 0 beyond length
    length: Tensor  # [B] int64: 0..K
    candidates: Tensor  # [B, K+1, C] int64: for the token after the first j in flight, best first; all different
    scores: Tensor  # [B, K+1, C] float, descending: log q + shared noise, or log q under rejection; -inf: no candidate
    is_primary: Tensor  # [B] bool: the speculation came from the cache


@dataclass(frozen=True)
class Planned:
    """Outcomes to prepare, likeliest first: M entries for each of B rows."""

    slots: Tensor  # [B] int64
    k: Tensor  # [B, M] int64; -1: unused entry
    token: Tensor  # [B, M] int64; 0 in unused entries

    @staticmethod
    def nothing() -> "Planned":
        """An empty plan, without rows."""
        none = torch.zeros(0, dtype=torch.int64)
        return Planned(none, none.view(0, 0), none.view(0, 0))

    def branches(self) -> dict[tuple[int, int, int], int]:
        """Map from outcome to branch: its index in `outcomes`."""
        return {outcome: branch for branch, outcome in enumerate(self.outcomes())}

    def seconds(self) -> float | None:
        """None: the work ran synchronously, so the host measures its time."""
        return None

    def outcomes(self) -> list[tuple[int, int, int]]:
        """(slot, k, token) of every used entry, row by row; an outcome's index in this list is its branch.

        >>> Planned(torch.tensor([4]), torch.tensor([[0, -1, 2]]), torch.tensor([[7, 0, 8]])).outcomes()
        [(4, 0, 7), (4, 2, 8)]
        """
        rows = zip(self.slots.tolist(), self.k.tolist(), self.token.tolist(), strict=True)
        return [(slot, k, token) for slot, *row in rows for k, token in zip(*row, strict=True) if k >= 0]


def leads(scores: Tensor) -> Tensor:  # [..., C] -> [..., C]
    """Each candidate's score minus the best other score: at least 0 for the best, at most 0 for the rest.

    inf for an only candidate, -inf where the score is -inf.

    >>> leads(torch.tensor([[3.0, 2.5, 1.0], [3.0, NEVER, NEVER]]))
    tensor([[ 0.5000, -0.5000, -2.0000],
            [    inf,    -inf,    -inf]])
    """
    best = scores.amax(-1, keepdim=True)
    is_best = ranks(scores) == 0
    second = scores.masked_fill(is_best, NEVER).amax(-1, keepdim=True)
    return torch.where(is_best, best - second, scores - best).masked_fill(scores == NEVER, NEVER)


def ranks(scores: Tensor) -> Tensor:  # [..., C] descending, with -inf anywhere -> [..., C] int64
    """The rank of each candidate among those with a finite score, from 0; C for the others.

    >>> ranks(torch.tensor([3.0, NEVER, 2.5, 1.0]))
    tensor([0, 4, 1, 2])
    """
    is_left = scores > NEVER
    return torch.where(is_left, is_left.long().cumsum(-1) - 1, scores.shape[-1])


def trust(ahead: Ahead) -> Tensor:  # [B, K]
    """The lead of each in-flight token over the draft's best other candidate at its position; 0 beyond length.

    Negative where the draft prefers another token; inf where there is no other candidate. A token that is not among the
    candidates is scored 1 below the last of them.

    >>> two = Ahead(
    ...     slots=torch.tensor([0]),
    ...     tokens=torch.tensor([[7, 9]]),
    ...     length=torch.tensor([2]),
    ...     candidates=torch.tensor([[[7, 8], [5, 6], [1, 2]]]),
    ...     scores=torch.tensor([[[4.0, 3.0], [4.0, 3.5], [4.0, 2.0]]]),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> trust(two)
    tensor([[ 1.0000, -1.5000]])
    """
    n = ahead.tokens.shape[1]
    scores = ahead.scores[:, :n]
    is_it = (ahead.candidates[:, :n] == ahead.tokens[..., None]) & (scores > NEVER)
    lead = leads(scores).masked_fill(~is_it, NEVER).amax(-1)
    span = scores.amax(-1) - scores.masked_fill(scores == NEVER, float("inf")).amin(-1)
    unknown = -1 - torch.where(span >= 0, span, 0)
    lead = torch.where(is_it.any(-1), lead, unknown)
    return torch.where(_steps(ahead)[:n] < ahead.length[:, None], lead, 0)


def alternatives(ahead: Ahead) -> Tensor:  # [B, K+1, C]
    """The scores, with -inf where an outcome is impossible: the in-flight token at k < length, and all at k > length.

    >>> one = Ahead(
    ...     slots=torch.tensor([0]),
    ...     tokens=torch.tensor([[7, 0]]),
    ...     length=torch.tensor([1]),
    ...     candidates=torch.tensor([[[7, 8], [0, 6], [1, 2]]]),
    ...     scores=torch.tensor([[[4.0, 3.0], [4.0, 3.5], [4.0, 2.0]]]),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> alternatives(one)
    tensor([[[  -inf, 3.0000],
             [4.0000, 3.5000],
             [  -inf,   -inf]]])
    """
    k, length = _steps(ahead), ahead.length[:, None]
    in_flight = torch.cat([ahead.tokens, torch.zeros_like(length)], dim=1)  # [B, K+1]
    is_taken = (ahead.candidates == in_flight[..., None]) & (k < length)[..., None]
    return ahead.scores.masked_fill(is_taken | (k > length)[..., None], NEVER)


def outcome_chance(accept: Tensor, bonus: Tensor, length: Tensor) -> Tensor:  # [B, K], [B, K+1, C], [B]
    """P(first k accepted) x P(the next one rejected, if k < length) x P(bonus | k), [B, K+1, C]; 0 beyond length.

    accept[i] is P(token i is accepted | all before it were).

    >>> outcome_chance(torch.tensor([[0.75, 0.5]]), torch.ones(1, 3, 1), torch.tensor([2])).flatten()
    tensor([0.2500, 0.3750, 0.3750])
    >>> outcome_chance(torch.tensor([[0.75, 0.5]]), torch.ones(1, 3, 1), torch.tensor([1])).flatten()
    tensor([0.2500, 0.7500, 0.0000])
    """
    k = torch.arange(bonus.shape[1], device=bonus.device)
    one = accept.new_ones(len(accept), 1)
    reached = torch.cat([one, accept.cumprod(1)], dim=1)
    rejected = torch.where(k < length[:, None], torch.cat([1 - accept, one], dim=1), 1)
    return (reached * rejected * (k <= length[:, None]))[..., None] * bonus


def by_chance(ahead: Ahead, chance: Tensor, M: int) -> Planned:  # [B, K+1, C]
    """The M likeliest outcomes over all k and tokens of a row; outcomes with probability 0 are left out.

    >>> one = Ahead(
    ...     slots=torch.tensor([3]),
    ...     tokens=torch.tensor([[7]]),
    ...     length=torch.tensor([1]),
    ...     candidates=torch.tensor([[[7, 8], [5, 6]]]),
    ...     scores=torch.tensor([[[4.0, 3.0], [4.0, 3.5]]]),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> planned = by_chance(one, torch.tensor([[[0.9, 0.2], [0.1, 0.3]]]), M=2)
    >>> planned.k, planned.token
    (tensor([[1, 0]]), tensor([[6, 8]]))
    """
    return _best(ahead, chance.masked_fill(alternatives(ahead) == NEVER, 0), M)


def by_fan_out(ahead: Ahead, fan_out: Tensor, M: int) -> Planned:  # [B, K+1] int64
    """The F_k best alternatives at each k: all the first ones, then all the second ones, until M are found.

    >>> one = Ahead(
    ...     slots=torch.tensor([3]),
    ...     tokens=torch.tensor([[7]]),
    ...     length=torch.tensor([1]),
    ...     candidates=torch.tensor([[[7, 8], [5, 6]]]),
    ...     scores=torch.tensor([[[4.0, 3.0], [4.0, 3.5]]]),
    ...     is_primary=torch.tensor([True]),
    ... )
    >>> planned = by_fan_out(one, torch.tensor([[1, 2]]), M=4)
    >>> planned.k, planned.token
    (tensor([[ 0,  1,  1, -1]]), tensor([[8, 5, 6, 0]]))
    """
    scores = alternatives(ahead)
    rank = ranks(scores)
    is_chosen = (scores > NEVER) & (rank < fan_out[..., None])
    return _best(ahead, torch.where(is_chosen, 1 / (1.0 + rank), 0), M)


def _best(ahead: Ahead, worth: Tensor, M: int) -> Planned:  # [B, K+1, C], at least 0
    """The M outcomes with the largest worth; ties to the smallest k, then rank; none where the worth is 0."""
    n = worth.shape[-1]
    worth, at = worth.flatten(1).sort(dim=-1, descending=True, stable=True)
    worth, at = worth[:, :M], at[:, :M]
    is_planned = worth > 0
    k = torch.where(is_planned, at // n, -1)
    token = torch.where(is_planned, ahead.candidates.flatten(1).gather(1, at), 0)
    n_left = M - at.shape[1]  # more entries than outcomes
    pad = torch.nn.functional.pad
    return Planned(ahead.slots, pad(k, (0, n_left), value=-1), pad(token, (0, n_left)))


def _steps(ahead: Ahead) -> Tensor:  # [K+1] int64: 0..K
    return torch.arange(ahead.candidates.shape[1], device=ahead.candidates.device)
