"""Verification: decide which speculated tokens are accepted. Two rules, both exact.

Shared noise: the target's token at every position is fixed by (logits, parameters, seed, position), so verification is
a comparison. The draft's probabilities are not needed, and the output does not depend on the draft.

Rejection (the paper's, section 2.1): a token drawn from q is accepted with probability min(1, p/q); the first rejected
one is replaced by a sample of the residual. On a tree the children of a node are drawn from one q without replacement
and tried in the order of the draws:

    p_1, q_1 = p, q          accept child i with probability min(1, p_i(x_i) / q_i(x_i))
    after a rejection        p_(i+1) = max(p_i - q_i, 0), normalised; q_(i+1) = q_i without x_i, normalised
    all children rejected    the bonus is a sample of the last p

A chain is the case of one child. The output has the target's distribution if and only if each child is distributed as
its q_i, given the children before it and that it is tried. A token that q gives no probability was not sampled: its own
q_i is one-hot. So at temperature 0 the children after the first are accepted if they equal the target's token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saguaro.algo.tree import descend, paths_of, siblings

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
    p: Tensor,  # [B, N+1, V]: the target's distribution after the root and after each node
    q: Tensor,  # [B, F, V]: the distribution that the children of each family were drawn from (algo/tree.py)
    tokens: Tensor,  # [B, N] int64
    parent: Tensor,  # [B, N] int64
    length: Tensor,  # [B] int64: number of real nodes among the N
    most: int,  # most children of a node
    stand: Callable[[Tensor], Tensor],  # [B, N] -> [B, N] bool: true with these probabilities
) -> tuple[Tensor, Tensor, Tensor]:  # n_accepted [B], path [B, N], distribution of the bonus [B, V]
    """Rejection: walk down from the root while a child is accepted. The path is as in algo/tree.py's `accept`.

    >>> p, q = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    >>> one = torch.tensor([[0]]), torch.tensor([[-1]]), torch.tensor([1]), 1
    >>> reject(p, q, *one, lambda chance: chance > 0.4)
    (tensor([1]), tensor([[0]]), tensor([[1., 0.]]))
    >>> reject(p, q, *one, lambda chance: chance > 0.6)  # token 0 was drawn too often, so it is token 1
    (tensor([0]), tensor([[-1]]), tensor([[0., 1.]]))
    """
    b, n, v = *tokens.shape, p.shape[2]
    if n == 0:
        return length.new_zeros(b), tokens, p[:, 0]
    family, rank = siblings(parent)
    nodes = torch.arange(n, device=tokens.device)
    is_real = nodes < length[:, None]
    size = q.shape[1]
    entry = torch.where(is_real, family * most + rank, size * most)  # the last entry is for nodes that are not real
    member = torch.full((b, size * most + 1), -1, device=tokens.device).scatter(1, entry, nodes.expand(b, n))
    member = member[:, :-1].view(b, size, most)  # [B, F, S]: nodes in the order of the draws; -1: no more
    above = parent.gather(1, member[..., 0].clamp(min=0)) + 1  # [B, F]: whose children they are, in the order of p
    left = p.gather(1, above[..., None].expand(b, size, v))
    chances = []
    for each in member.unbind(2):  # [B, F]: one child of every family
        token, is_there = tokens.gather(1, each.clamp(min=0)), (each >= 0)[..., None]
        drawn = or_certain(q, token)
        chances.append(acceptance(left, drawn, token))
        left = torch.where(is_there, residual(left, drawn), left)
        q = torch.where(is_there, without(q, token), q)
    chance = torch.stack(chances, 2).flatten(1).gather(1, torch.where(is_real, entry, 0))
    stands = stand(torch.where(is_real, chance, 0.0)) & is_real
    is_before = (parent[:, :, None] == parent[:, None]) & (nodes[:, None] > nodes)
    is_first = stands & ~(is_before & stands[:, None]).any(2)
    n_accepted, path, last = descend(is_first, *paths_of(parent, n))
    own = torch.where((member[..., 0] >= 0) & (above == last[:, None] + 1), 1, 0)  # the family that was tried last
    tried = left.gather(1, own.argmax(1)[:, None, None].expand(b, 1, v))[:, 0]
    law = p.gather(1, (last + 1)[:, None, None].expand(b, 1, v))[:, 0]
    return n_accepted, path, torch.where(own.any(1)[:, None], tried, law)


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


def or_certain(q: Tensor, tokens: Tensor) -> Tensor:  # [..., V], [...] -> [..., V]
    """The distribution of these tokens: q, or one-hot where q gives the token no probability.

    >>> or_certain(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]), torch.tensor([1, 2]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 1.0000]])
    """
    at = tokens[..., None]
    own = q.gather(-1, at)
    return torch.where(own > 0, q, 0.0).scatter(-1, at, torch.where(own > 0, own, 1.0))


def without(q: Tensor, tokens: Tensor) -> Tensor:  # [..., V], [...] -> [..., V]
    """q without a token, normalised; zero if nothing is left.

    >>> without(torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]), torch.tensor([0, 1]))
    tensor([[0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    left = q.scatter(-1, tokens[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def _prefix(matches: Tensor, length: Tensor) -> Tensor:  # [B, K] bool, [B] -> [B]
    """The number of leading true values among a row's first `length` matches."""
    real = torch.arange(matches.shape[1], device=matches.device) < length[:, None]
    return (matches & real).long().cumprod(1).sum(1)
