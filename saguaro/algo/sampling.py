"""Sampling: logits to tokens. Pure functions of tensors, row by row: R rows, V tokens.

The token of a row is argmax(log p'(v) + g(seed, position, v)) with Gumbel noise g: a sample of p', the distribution
after penalties, bias, temperature, top-k, top-p and min-p, in that order. At temperature 0 it is the plain argmax.
Removed tokens have score -inf. Ties at a threshold are kept, so no result depends on the order of a sort.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import tree

NEVER = float("-inf")
MOST = torch.finfo(torch.float32).max  # of a factor: a larger one is no float32
REMOVED = 8.0  # subtracted by `rank` from the score of tokens that a rule removes


@dataclass(frozen=True)
class Rules:
    """Sampling parameters of each row; a neutral value switches its rule off."""

    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, <= 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64: of the next token

    def select(self, rows: Tensor) -> "Rules":
        """The rules of some rows."""
        return Rules(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def choose(logits: Tensor, rules: Rules) -> Tensor:  # [R, V] float32 -> [R] int64
    """The token of every row.

    >>> one = torch.ones(1)
    >>> rules = Rules(0 * one, one.long(), one, 0 * one, one.long(), one.long())
    >>> choose(torch.tensor([[0.0, 3.0, 1.0]]), rules)
    tensor([1])
    """
    tokens = logits.argmax(-1)
    warm = rules.temperature.nonzero()[:, 0]
    if len(warm):
        rules = rules.select(warm)
        tokens[warm] = pick(restrict(logits[warm], rules), rules.seeds, rules.positions)
    return tokens


def restrict(logits: Tensor, rules: Rules) -> Tensor:  # [R, V] -> [R, V] scores
    """Temperature, then top-k, top-p and min-p; removed tokens score -inf."""
    # Relative to the best logit: the best token survives even if a tiny temperature overflows the others.
    scores = (logits - logits.amax(-1, keepdim=True)).div_(rules.temperature[:, None])
    if bool((rules.top_k > 0).any()):
        scores = keep_top_k(scores, rules.top_k)
    if bool((rules.top_p < 1).any()):
        scores = keep_top_p(scores, rules.top_p)
    if bool((rules.min_p > 0).any()):
        scores = keep_min_p(scores, rules.min_p)
    return scores


def probabilities(logits: Tensor, rules: Rules) -> Tensor:  # [R, V] -> [R, V]
    """The distribution of each row's token; one-hot on the best token at temperature 0.

    >>> zero = torch.zeros(1)
    >>> rules = Rules(zero, zero.long(), zero + 1, zero, zero.long(), zero.long())
    >>> probabilities(torch.tensor([[0.0, 3.0, 1.0]]), rules)
    tensor([[0., 1., 0.]])
    """
    law = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    warm = rules.temperature.nonzero()[:, 0]
    if len(warm):
        law[warm] = restrict(logits[warm], rules.select(warm)).softmax(-1)
    return law


def at_temperature(logits: Tensor, temperature: Tensor) -> Tensor:  # [R, V], [R] -> [R, V]
    """`probabilities` of requests without other rules, as a fixed sequence of operations.

    >>> at_temperature(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([0.0, 1.0]))
    tensor([[0.0000, 1.0000],
            [0.0474, 0.9526]])
    """
    is_warm = (temperature > 0)[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)) / torch.where(is_warm, temperature[:, None], 1.0)
    best = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(is_warm, scores.softmax(-1), best)


def keep_top_k(scores: Tensor, k: Tensor) -> Tensor:  # [R, V], [R] int64
    """Keep the k best of each row.

    >>> keep_top_k(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]))
    tensor([[-inf, 3., 2.]])
    """
    n_vocab = scores.shape[1]
    k = torch.where(k > 0, k, n_vocab).clamp(max=n_vocab)
    best = scores.topk(int(k.max()), dim=-1).values  # [R, k_max], descending
    return scores.masked_fill(scores < best.gather(1, k[:, None] - 1), NEVER)


def keep_top_p(scores: Tensor, p: Tensor, width: int = 1024) -> Tensor:  # [R, V], [R]
    """Keep the smallest set of best tokens with total probability at least p.

    >>> keep_top_p(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.6])).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    n_vocab = scores.shape[1]
    total = scores.logsumexp(-1, keepdim=True)
    best = scores.topk(min(width, n_vocab), dim=-1).values  # [R, W], descending
    held = (best - total).exp().cumsum(-1)
    if width < n_vocab and bool(((held[:, -1] < p) & (p < 1)).any()):  # the mass extends beyond the width
        return keep_top_p(scores, p, width=n_vocab)
    n_kept = (held < p[:, None]).sum(-1, keepdim=True).clamp(max=best.shape[1] - 1)  # index of the last kept
    floor = torch.where(p[:, None] < 1, best.gather(1, n_kept), NEVER)
    return scores.masked_fill(scores < floor, NEVER)


def keep_min_p(scores: Tensor, p: Tensor) -> Tensor:  # [R, V], [R]
    """Keep tokens at least p times as likely as the likeliest.

    >>> keep_min_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([0.4])).exp()
    tensor([[0.6000, 0.3000, 0.0000]])
    """
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + p.log()[:, None], NEVER)


def pick(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:  # [R, V], [R], [R] -> [R]
    """Argmax of scores plus noise: a sample of softmax(scores), a function of (scores, seed, position) only.

    >>> scores = torch.zeros(1, 5)
    >>> pick(scores, torch.tensor([1]), torch.tensor([2])).equal(
    ...     (scores + rng.gumbel_all(torch.tensor([1]), torch.tensor([2]), 5)).argmax(-1))
    True
    """
    if scores.device.type == "cpu":
        return _noisy_pruned(scores, seeds, positions, 1).argmax(-1)
    return (scores + rng.gumbel_all(seeds, positions, scores.shape[1])).argmax(-1)


def stand(chance: Tensor, parent: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:  # [B, N] twice, [B] twice
    """True with these probabilities, for the nodes of trees (algo/tree.py) whose roots are before these positions.

    The coin of a node is a function of (seed, position, rank among its siblings). Nodes of one position and rank share
    a coin: no walk from the root down passes two of them.

    >>> parent = torch.tensor([[-1, -1, 1]])
    >>> stand(torch.tensor([[0.0, 1.0, 1.0]]), parent, torch.tensor([1]), torch.tensor([2]))
    tensor([[False,  True,  True]])
    """
    _, depth = tree.paths_of(parent, parent.shape[1])
    _, rank = tree.siblings(parent)
    at = positions[:, None] + depth - 1
    coins = rng.uniform(seeds[:, None].expand_as(at).flatten(), at.flatten(), rank.flatten())
    return coins.view_as(chance) < chance


def draw(q: Tensor, seeds: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:  # [R, V], [R], [R] -> [R, n]
    """n tokens of q drawn without replacement, in the order of the draws, and which of them are tokens of q.

    The best of log q plus noise is a sample of q, the next one a sample of q without it, and so on. If q has fewer than
    n tokens, the last are none of them.

    >>> draw(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([1]), torch.tensor([2]), 2)[1]
    tensor([[ True, False]])
    """
    scores = q.log()
    if scores.device.type == "cpu":
        scores = _noisy_pruned(scores, seeds, positions, n)
    else:
        scores = scores + rng.gumbel_all(seeds, positions, scores.shape[1])
    best = scores.topk(n, dim=-1)
    return best.indices, best.values > NEVER


def rank(logits: Tensor, rules: Rules, n: int, width: int = 2048) -> tuple[Tensor, Tensor]:  # [R, V] -> [R, n], [R, n]
    """The n best tokens of every row by noisy score, with the target's noise: the first is `choose`'s.

    The draft ranks candidates with it, so it may approximate: noise is drawn for the `width` likeliest tokens only.
    Tokens that top-k, top-p or min-p would remove keep a low score, since the target may not remove them.

    >>> one = torch.ones(1)
    >>> rules = Rules(0 * one, one.long(), one, 0 * one, one.long(), one.long())
    >>> rank(torch.tensor([[0.0, 3.0, 1.0]]), rules, 2)
    (tensor([[1, 2]]), tensor([[ 0., -2.]]))
    """
    is_warm = rules.temperature > 0
    soft = (logits - logits.amax(-1, keepdim=True)) / torch.where(is_warm, rules.temperature, 1.0)[:, None]
    if bool((is_warm & ((rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0))).any()):
        kept = restrict(logits, replace(rules, temperature=torch.where(is_warm, rules.temperature, 1.0)))
        soft = torch.where(is_warm[:, None] & kept.isneginf(), soft - REMOVED, soft)
    best = soft.topk(min(width, soft.shape[1]), dim=-1)  # [R, W]
    noise = rng.gumbel(*_pairs(rules.seeds, rules.positions, best.indices)).view_as(best.values)
    noisy = torch.where(is_warm[:, None], best.values + noise, best.values)
    found = noisy.topk(min(n, noisy.shape[1]), dim=-1)
    return best.indices.gather(1, found.indices), found.values


def _noisy_pruned(scores: Tensor, seeds: Tensor, positions: Tensor, n: int) -> Tensor:  # [R, V]
    """Scores plus noise, -inf for tokens that cannot be among the n best: noise never exceeds GUMBEL_MAX."""
    n_vocab = scores.shape[1]
    best = scores.topk(min(8 * n, n_vocab), dim=-1)  # [R, 8 * n]
    noise = rng.gumbel(*_pairs(seeds, positions, best.indices)).view_as(best.values)
    bar = (best.values + noise).topk(n, dim=-1).values[:, -1:]  # [R, 1]: lower bound of the n-th best
    rows, tokens = (scores + rng.GUMBEL_MAX >= bar).nonzero(as_tuple=True)
    if 4 * len(rows) > scores.numel():  # a block of noise serves four tokens
        return scores + rng.gumbel_all(seeds, positions, n_vocab)
    noisy = torch.full_like(scores, NEVER)
    noisy[rows, tokens] = scores[rows, tokens] + rng.gumbel(seeds[rows], positions[rows], tokens)
    return noisy


def _pairs(seeds: Tensor, positions: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R], [R], [R, C] -> three of [R * C]."""
    n = tokens.shape[1]
    return seeds.repeat_interleave(n), positions.repeat_interleave(n), tokens.flatten()


def saguaro_logits(logits: Tensor, fan_out: Tensor, c: float, most: int) -> Tensor:  # [R, V], [R] or [1] -> [R, V]
    """Saguaro sampling (Definition 14): the draft weights its fan_out best tokens by c < 1, so that the bonus after a
    rejection is more likely one of them. Where nothing else is possible, c has no effect. No fan_out exceeds `most`.

    >>> q = torch.tensor([[0.41, 0.41, 0.09, 0.09]])
    >>> saguaro_logits(q.log(), torch.tensor([2]), 0.7783, 4).softmax(-1)
    tensor([[0.3900, 0.3900, 0.1100, 0.1100]])
    >>> saguaro_logits(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1]), 0.0, 2).softmax(-1)
    tensor([[1., 0.]])
    """
    best = logits.topk(min(most, logits.shape[1]), dim=-1).indices  # [R, most]
    is_held = torch.arange(best.shape[1], device=best.device) < fan_out[:, None]
    weight = torch.where(is_held, math.log(c) if c > 0 else NEVER, 0.0).to(logits.dtype)
    held = logits.scatter_add(1, best, weight.expand_as(best))
    return torch.where((held > NEVER).any(-1, keepdim=True), held, logits)


def penalise(
    logits: Tensor,  # [V] float32, changed in place
    seen: Tensor,  # [S] int64: distinct tokens of prompt and output
    written: Tensor,  # [O] int64: distinct tokens of the output
    counts: Tensor,  # [O] float32: number of occurrences of each
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Repetition (over prompt and output), presence and frequency penalties (over the output) of one row.

    >>> row = torch.tensor([2.0, -2.0, 1.0])
    >>> penalise(row, torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([3.0]), 2.0, 0.5, 0.1)
    >>> row
    tensor([ 1.0000, -4.8000,  1.0000])
    """
    if repetition != 1:
        old = logits[seen]
        by = torch.full_like(old, min(repetition, MOST))  # CUDA divides by a number as it multiplies by its reciprocal
        logits[seen] = torch.where(old > 0, old / by, old * by)
    if presence != 0 or frequency != 0:
        logits[written] -= presence + frequency * counts
