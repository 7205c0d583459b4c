"""From the draft's logits to the children of a node, best first, for each verification rule.

Under shared noise children are ranked by log q plus the target's own noise; the first is the draft's token. Under
rejection the children that may be verified are drawn from q without replacement, with separate noise, and q is sent to
the target: one child of a chain, all children of a tree. The others are the likeliest tokens. Every node needs new
noise: if a position had the same noise in every branch, which outcomes are prepared would depend on tokens drafted from
it, and the tokens that are used would no longer be distributed as q (docs/log.md, "Fresh noise").
"""

import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import sampling
from saguaro.kernels.bundle import Kernels

FIRST_DRAFT_SEED = 2**32  # smaller indices belong to a request's n outputs

Ranked = tuple[Tensor, Tensor]  # [R, W] each: tokens and scores of children, best first


class Draws:
    """Draws the children of each node; with c < 1 by Saguaro sampling (Definition 14)."""

    def __init__(
        self, c: float, generation: int, device: torch.device, *, n: int = 1, kernels: Kernels | None = None
    ) -> None:
        """generation: number of drafts started before this one; it keeps their noise apart. n: children drawn."""
        self._c, self._n, self._kernels = c, n, kernels
        self._n_drawn = torch.tensor([(generation << 40) + FIRST_DRAFT_SEED], dtype=torch.int64, device=device)

    def __call__(
        self,
        logits: Tensor,  # [R, V]
        q: Tensor,  # [R, V]: their distribution, with the request's temperature and rules
        noise: tuple[Tensor, Tensor],  # [R] each: seeds of requests, and positions
        n: int,
        fan_out: Tensor,  # [1] int64: how many tokens of this position are prepared as a bonus
    ) -> tuple[Ranked, Tensor]:
        """The children, and the distribution that they were drawn from [R, V].

        The score of a child depends on its rank only, not on which token it is: a speculation may end where scores are
        low, and its tokens are still distributed as q. If q has too few tokens, the likeliest others follow.
        """
        seeds, positions = noise
        if self._c < 1:
            q = sampling.saguaro_logits(q.log(), fan_out, self._c, n).softmax(-1)
        own = rng.derive_seeds(seeds, self._n_drawn + torch.arange(len(seeds), device=seeds.device))
        self._n_drawn += len(seeds)
        tokens, scores = likeliest(logits, n)
        return (with_first(tokens, *self._drawn(q, own, positions, min(self._n, tokens.shape[1]))), scores), q

    def _drawn(self, q: Tensor, seeds: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """sampling.draw, by a kernel if there is one."""
        if self._kernels is None:
            return sampling.draw(q, seeds, positions, n)
        temperature = torch.ones_like(seeds, dtype=torch.float32)
        tokens, scores = self._kernels.rank(q.log(), temperature, seeds, positions, q.shape[1], n)
        return tokens, scores > sampling.NEVER


def likeliest(logits: Tensor, n: int) -> Ranked:  # [R, V]
    """The n likeliest tokens, and their log-probabilities; no more than there are tokens."""
    scores, tokens = logits.log_softmax(-1).topk(min(n, logits.shape[1]), dim=-1)
    return tokens, scores


def with_first(tokens: Tensor, first: Tensor, is_real: Tensor) -> Tensor:  # [R, n] distinct, [R, m] twice -> [R, n]
    """Put the real ones of the first before the others, which keep their order. The last ones are left out.

    >>> with_first(torch.tensor([[7, 8, 9], [7, 8, 9]]), torch.tensor([[8], [5]]), torch.tensor([[True], [True]]))
    tensor([[8, 7, 9],
            [5, 7, 8]])
    >>> with_first(torch.tensor([[7, 8, 9]]), torch.tensor([[9, 8]]), torch.tensor([[True, False]]))
    tensor([[9, 7, 8]])
    """
    is_new = ~((tokens[..., None] == first[:, None]) & is_real[:, None]).any(2)
    order = torch.cat((is_real, is_new), 1).long().argsort(dim=1, descending=True, stable=True)
    return torch.cat((first, tokens), 1).gather(1, order[:, : tokens.shape[1]])
