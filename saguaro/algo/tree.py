"""Token trees: what a speculation of more than one path looks like, and which of its nodes stand.

A row's tree has up to 64 nodes below its root, the last token of the text. A parent has a smaller number than its
children; -1 is the root. No two children of one node have the same token. A chain is the tree in which every node's
parent is the node before.

    root ── 0 ── 1          parent     -1  0  0  1
             └── 2          token       a  b  c  d
    1 ── 3                  ancestors  0001  0011  0101  1011   one bit for each node on the path, the node included
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_NODES = 64  # of a row: the bits of an int64


def paths(parents: Sequence[int]) -> list[list[int]]:  # [N][depth]
    """The nodes on the path to each node of one tree, itself last.

    >>> paths([-1, 0, 0, 1])
    [[0], [0, 1], [0, 2], [0, 1, 3]]
    """
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found


def ancestors(parent: Tensor) -> Tensor:  # [B, N] int64 -> [B, N] int64
    """The nodes on the path to each node, itself included, as bits.

    >>> [f"{bits:04b}" for bits in ancestors(torch.tensor([[-1, 0, 0, 1]]))[0].tolist()]
    ['0001', '0011', '0101', '1011']
    """
    b, n = parent.shape
    assert n <= MAX_NODES, f"{n} nodes, of at most {MAX_NODES}"
    bits = torch.zeros(b, n + 1, dtype=torch.int64, device=parent.device)  # the last column is the root's: no bit
    for node in range(n):
        at = parent[:, node].masked_fill(parent[:, node] < 0, n)
        bits[:, node] = bits.gather(1, at[:, None])[:, 0] | (1 << node if node < 63 else -(2**63))
    return bits[:, :n]


def accept(
    targets: Tensor,  # [B, N+1] int64: the target's token after the root, then after each node
    tokens: Tensor,  # [B, N] int64
    parent: Tensor,  # [B, N] int64
    length: Tensor,  # [B] int64: how many of the N nodes are real
) -> tuple[Tensor, Tensor, Tensor]:  # n_accepted [B], path [B, N], bonus [B]
    """Shared noise: walk down from the root while a child has the target's token.

    The path is the accepted nodes from the root down, then -1; the bonus is the target's token after the last of them.

    >>> targets = torch.tensor([[5, 7, 0, 9, 0]])
    >>> accept(targets, torch.tensor([[5, 6, 7, 1]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([4]))
    (tensor([2]), tensor([[ 0,  2, -1, -1]]), tensor([9]))
    """
    n = tokens.shape[1]
    real = torch.arange(n, device=tokens.device) < length[:, None]
    agrees = real & (tokens == targets.gather(1, parent + 1))
    wrong = _bits(~agrees)  # [B]
    stands = (ancestors(parent) & wrong[:, None]) == 0
    n_accepted = stands.sum(1)
    order = torch.where(stands, torch.arange(n, device=tokens.device), n).sort(1).values
    path = order.masked_fill(order == n, -1)
    last = torch.where(stands, torch.arange(1, n + 1, device=tokens.device), 0).amax(1) if n else n_accepted
    return n_accepted, path, targets.gather(1, last[:, None])[:, 0]


def _bits(flags: Tensor) -> Tensor:  # [B, N] bool -> [B] int64
    """Each row's flags as bits, the first the lowest."""
    weights = torch.ones(flags.shape[1], dtype=torch.int64, device=flags.device)
    weights = weights << torch.arange(flags.shape[1], device=flags.device)
    return (flags * weights).sum(1)
