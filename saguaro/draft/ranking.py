"""From the draft's logits to the children of a node, best first, for each verification rule.

Under shared noise children are ranked by log q plus the target's own noise; the first is the draft's token. Under
rejection the first child is sampled from q with separate noise, the others are the likeliest tokens, and q is sent to
the target. This noise must be new for every draw. Otherwise the choice of prepared outcomes would depend on the tokens
drafted after them, and the tokens that are used would no longer be distributed as q.
"""

import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import sampling

FIRST_DRAFT_SEED = 2**32  # smaller indices belong to a request's n outputs

Ranked = tuple[Tensor, Tensor]  # [R, W] each: tokens and scores of children, best first


class Draws:
    """Samples the first child of each node; with c < 1 by Saguaro sampling (Definition 14)."""

    def __init__(self, c: float, generation: int, device: torch.device) -> None:
        """generation: number of drafts started before this one; it keeps their noise apart."""
        self._c = c
        self._n_drawn = torch.tensor([(generation << 40) + FIRST_DRAFT_SEED], dtype=torch.int64, device=device)

    def __call__(
        self,
        logits: Tensor,  # [R, V]
        q: Tensor,  # [R, V]: their distribution, with the request's temperature and rules
        noise: tuple[Tensor, Tensor],  # [R] each: seeds of requests, and positions
        n: int,
        fan_out: Tensor,  # [1] int64: how many tokens of this position are prepared as a bonus
    ) -> tuple[Ranked, Tensor]:
        """The children, and the distribution of the first [R, V].

        The score of a child depends on its rank only, so the first child's score does not depend on which token it is:
        a speculation may end where scores are low, and its tokens are still distributed as q.
        """
        seeds, positions = noise
        if self._c < 1:
            q = sampling.saguaro_logits(q.log(), fan_out, self._c, n).softmax(-1)
        own = rng.derive_seeds(seeds, self._n_drawn + torch.arange(len(seeds), device=seeds.device))
        self._n_drawn += len(seeds)
        first = sampling.pick(q.log(), own, positions)[:, None]
        tokens, scores = likeliest(logits, n)
        return (with_first(tokens, first), scores), q


def likeliest(logits: Tensor, n: int) -> Ranked:  # [R, V]
    """The n likeliest tokens, and their log-probabilities; no more than there are tokens."""
    scores, tokens = logits.log_softmax(-1).topk(min(n, logits.shape[1]), dim=-1)
    return tokens, scores


def with_first(tokens: Tensor, first: Tensor) -> Tensor:  # [R, n] distinct, [R, 1] -> [R, n]
    """Put a token first; the others keep their order. It takes the last one's place if it was not there.

    >>> with_first(torch.tensor([[7, 8, 9], [7, 8, 9]]), torch.tensor([[8], [5]]))
    tensor([[8, 7, 9],
            [5, 7, 8]])
    """
    n = tokens.shape[1]
    is_it = tokens == first
    at = torch.where(is_it.any(1), is_it.long().argmax(1), n - 1)[:, None]  # the place that becomes free
    order = torch.arange(n, device=tokens.device).expand_as(tokens)
    moved = tokens.gather(1, torch.where(order <= at, order - 1, order).clamp(min=0))
    return torch.where(order == 0, first, moved)
