"""Verification: decide which speculated tokens are accepted. Two rules, both exact.

Shared noise: the target's token at every position is fixed by (logits, parameters, seed, position), so verification is
a comparison. The draft's probabilities are not needed, and the output does not depend on the draft.

Rejection (the paper's, section 2.1): a token drawn from q is accepted with probability min(1, p/q); the first rejected
one is replaced by a sample of the residual. The output has the target's distribution if and only if q is exactly the
distribution that the token was drawn from; for a token that was not sampled, q is one-hot.
"""

import torch
from torch import Tensor

BROKEN = -1  # replaces the target's token where its logits are not finite


def is_broken(logits: Tensor) -> Tensor:  # [..., V] -> [...] bool
    """Whether no token can be chosen: a logit is NaN or +inf. (-inf is valid: a token that is excluded.)

    >>> is_broken(torch.tensor([[0.0, float("-inf")], [0.0, float("inf")], [float("nan"), 0.0]]))
    tensor([False,  True,  True])
    """
    return ~(logits.amax(-1) < float("inf"))


def accept(
    targets: Tensor,  # [B, K+1] int64: the target's own token after each accepted prefix
    tokens: Tensor,  # [B, K] int64: the speculation
    length: Tensor,  # [B] int64: number of real tokens among the K
) -> tuple[Tensor, Tensor]:  # n_accepted [B], bonus [B]
    """Shared noise: accept the longest prefix equal to the target's tokens; the bonus is the target's token after it.

    BROKEN equals no token: tokens before it can be accepted, and it becomes the bonus.

    >>> accept(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[5, 9], [5, 6]]), torch.tensor([2, 2]))
    (tensor([1, 2]), tensor([6, 7]))
    >>> accept(torch.tensor([[5, 0]]), torch.tensor([[5]]), torch.tensor([0]))  # an empty speculation
    (tensor([0]), tensor([5]))
    """
    k = tokens.shape[1]
    n_accepted = _prefix(tokens == targets[:, :k], length)
    return n_accepted, targets.gather(1, n_accepted[:, None])[:, 0]


def reject(
    p: Tensor,  # [B, K+1, V]: the target's distribution after each prefix
    q: Tensor,  # [B, K, V]: the distribution each token was drawn from
    length: Tensor,  # [B] int64: number of real tokens among the K
    stands: Tensor,  # [B, K] bool: true with the probability acceptance(p, q, tokens)
) -> tuple[Tensor, Tensor]:  # n_accepted [B], distribution of the bonus [B, V]
    """Rejection: accept until the first false `stands`. The bonus comes from the residual there, or from p at the end.

    >>> p, q = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    >>> reject(p, q, torch.tensor([1]), torch.tensor([[True]]))
    (tensor([1]), tensor([[1., 0.]]))
    >>> reject(p, q, torch.tensor([1]), torch.tensor([[False]]))  # token 0 was drawn too often, so it is token 1
    (tensor([0]), tensor([[0., 1.]]))
    """
    b, k, v = q.shape
    n_accepted = _prefix(stands, length)
    last = n_accepted[:, None, None].expand(b, 1, v)
    law = p.gather(1, last)[:, 0]  # [B, V]
    if k:
        drawn = q.gather(1, last.clamp(max=k - 1))[:, 0]
        law = torch.where((n_accepted < length)[:, None], residual(law, drawn), law)
    return n_accepted, law


def acceptance(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:  # [..., V], [..., V], [...] -> [...]
    """Probability that a token drawn from q is accepted: min(1, p/q).

    >>> acceptance(torch.tensor([0.2, 0.8]), torch.tensor([0.4, 0.6]), torch.tensor(0))
    tensor(0.5000)
    """
    at = tokens[..., None]
    return (p.gather(-1, at) / q.gather(-1, at))[..., 0].clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:  # [..., V], [..., V] -> [..., V]
    """The residual distribution: max(p - q, 0), normalised; p itself where it is all zero.

    >>> residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.7, 0.1, 0.2]))
    tensor([0., 1., 0.])
    """
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def _prefix(matches: Tensor, length: Tensor) -> Tensor:  # [B, K] bool, [B] -> [B]
    """The number of leading true values among a row's first `length` matches."""
    real = torch.arange(matches.shape[1], device=matches.device) < length[:, None]
    return (matches & real).long().cumprod(1).sum(1)
