"""Which speculated tokens stand (DESIGN section 5). Shared noise: the target's token at every position is fixed by
(logits, parameters, seed, position), so verification is comparison. The longest matching prefix is accepted."""

import torch
from torch import Tensor


def accept(
    targets: Tensor,  # [B, K+1] int64: the target's own token after each accepted prefix
    tokens: Tensor,  # [B, K] int64: the speculation
    length: Tensor,  # [B] int64: how many of the K are real
) -> tuple[Tensor, Tensor]:  # n_accepted [B], bonus [B]
    """Accept the longest prefix equal to the target's tokens; the bonus is the target's token after it.

    >>> accept(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[5, 9], [5, 6]]), torch.tensor([2, 2]))
    (tensor([1, 2]), tensor([6, 7]))
    >>> accept(torch.tensor([[5, 0]]), torch.tensor([[5]]), torch.tensor([0]))  # an empty speculation
    (tensor([0]), tensor([5]))
    """
    k = tokens.shape[1]
    real = torch.arange(k, device=tokens.device) < length[:, None]
    matches = (tokens == targets[:, :k]) & real
    n_accepted = matches.long().cumprod(1).sum(1)
    return n_accepted, targets.gather(1, n_accepted[:, None])[:, 0]
