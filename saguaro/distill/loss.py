"""Loss of a draft against its target, and its acceptance rate, per position.

p is the target's distribution over all tokens, q the draft's over the tokens of its head. Speculation accepts a token
with probability sum(min(p, q)) (Leviathan et al., 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lesson:
    """The target's distribution at some positions, on the draft's tokens."""

    log_p: Tensor  # [n, R] float32: not renormalised
    best: Tensor  # [n] int64: the target's argmax over all tokens


def lesson(logits: Tensor, ids: Tensor) -> Lesson:  # [n, V] float32, [R] int64
    """The target's distribution on the draft's tokens, from its logits.

    >>> lesson(torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([0, 2])).log_p.exp().sum() < 0.3
    tensor(True)
    """
    return Lesson(logits.index_select(1, ids) - logits.logsumexp(1, keepdim=True), logits.argmax(1))


def kl(taught: Lesson, log_q: Tensor) -> Tensor:  # [n, R] -> [n]
    """KL(p', q), weighted by p's mass on the draft's tokens; p' is p restricted to these tokens and renormalised.

    >>> half = torch.tensor([[0.25, 0.25]]).log()  # the other half is elsewhere
    >>> kl(Lesson(half, torch.tensor([0])), torch.tensor([[0.5, 0.5]]).log())
    tensor([0.])
    """
    log_mass = taught.log_p.logsumexp(1, keepdim=True)
    return (taught.log_p.exp() * (taught.log_p - log_mass - log_q)).sum(1)


def kl_within(taught: Lesson, log_q: Tensor) -> Tensor:  # [n, R] -> [n]
    """KL(p', q) without that weight. Its gradient is that of the cross entropy of q against p'.

    >>> half = torch.tensor([[0.25, 0.25]]).log()
    >>> round(float(kl_within(Lesson(half, torch.tensor([0])), torch.tensor([[0.75, 0.25]]).log())), 4)
    0.1438
    """
    log_p = taught.log_p.log_softmax(1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def weighed(
    name: str, tv_weight: float, divergence: Callable[[Lesson, Tensor], Tensor], taught: Lesson, log_q: Tensor
) -> Tensor:  # [n, R] -> [n]
    """The loss of this name (recipe.LOSSES), with this divergence as kl; no other part is computed."""
    if name == "kl":
        return divergence(taught, log_q)
    tv = 1 - acceptance(taught, log_q)
    return tv if name == "tv" else divergence(taught, log_q) + tv_weight * tv


def acceptance(taught: Lesson, log_q: Tensor) -> Tensor:  # [n, R] -> [n]
    """sum(min(p, q)), which is 1 minus the total variation distance.

    >>> taught = Lesson(torch.tensor([[0.2, 0.5]]).log(), torch.tensor([1]))
    >>> acceptance(taught, torch.tensor([[0.6, 0.4]]).log())
    tensor([0.6000])
    """
    return torch.minimum(taught.log_p, log_q).exp().sum(1)


def agreement(taught: Lesson, log_q: Tensor, ids: Tensor) -> Tensor:  # [n, R], [R] -> [n] float32
    """1 where both have the same argmax."""
    return (ids[log_q.argmax(1)] == taught.best).float()
