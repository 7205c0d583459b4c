"""Token trees: what a speculation of more than one path looks like, and which of its nodes are accepted.

The root is the last token of the text. A parent has a smaller number than its children; -1 is the root. No two children
of one node have the same token. A chain is the tree in which every node's parent is the node before.

    root ── 0 ── 1 ── 3     parent   -1    0    0    1
            └─── 2          token     a    b    c    d
                            path      0   0 1  0 2  0 1 3
                            family    0    1    1    2

The children of one node are a family. Families are numbered by their first children, so a tree that is cut after some
node keeps its numbers.

The functions of tensors are a fixed number of operations for a given depth, without a synchronisation: a step that
calls them can be captured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_TOKENS = 64  # of a batch, about: as many as a GPU verifies in little more than the time of one


def nodes_at(n_rows: int, nodes: int, depth: int) -> int:
    """Nodes verified per row in a batch of this size: fewer in a large batch, down to a chain of this depth.

    >>> [nodes_at(n_rows, nodes=32, depth=8) for n_rows in (1, 2, 3, 4, 8, 64)]
    [32, 32, 16, 16, 8, 8]
    """
    return max(depth, min(nodes, MOST_TOKENS >> max(0, n_rows - 1).bit_length()))


def most_positions(n_rows: int, nodes: int, depth: int) -> int:
    """The most positions, of roots and nodes, of a batch that is padded to a power of two up to this one, or to this.

    >>> most_positions(64, nodes=31, depth=4), most_positions(2, nodes=31, depth=4)
    (320, 64)
    """
    sizes = {n_rows, *(1 << i for i in range(n_rows.bit_length()))}
    return max(size * (nodes_at(size, nodes, depth) + 1) for size in sizes)


def paths(parents: Sequence[int]) -> list[list[int]]:  # [N][depth]
    """The nodes on the path to each node of one tree, itself last.

    >>> paths([-1, 0, 0, 1])
    [[0], [0, 1], [0, 2], [0, 1, 3]]
    """
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found


def ranks(parents: Sequence[int]) -> list[int]:  # [N]
    """The rank of each node of one tree among its siblings, from 1: the order in which they were offered.

    >>> ranks([-1, 0, 0, 1])
    [1, 1, 2, 1]
    """
    n_children = [0] * (len(parents) + 1)  # of each node; of the root last
    found = []
    for parent in parents:
        n_children[parent] += 1
        found.append(n_children[parent])
    return found


def paths_of(parent: Tensor, most: int) -> tuple[Tensor, Tensor]:  # [B, N] int64 -> [B, N, most], [B, N] int64
    """The nodes on the path to each node, itself last, then -1; and its depth, the number of nodes on the path.

    A node deeper than `most` has no path: its depth is 0.

    >>> paths_of(torch.tensor([[-1, 0, 0, 1]]), 2)
    (tensor([[[ 0, -1],
             [ 0,  1],
             [ 0,  2],
             [-1, -1]]]), tensor([[1, 2, 2, 0]]))
    """
    b, n = parent.shape
    # While climbing, the root is number n, and its own parent.
    above = torch.cat((parent.masked_fill(parent < 0, n), parent.new_full((b, 1), n)), 1)  # [B, N+1]
    climbed = [torch.arange(n, device=parent.device).expand(b, n)]
    for _ in range(most):
        climbed.append(above.gather(1, climbed[-1]))
    is_too_deep = climbed.pop() < n
    up = torch.stack([*climbed, torch.full_like(above[:, :n], n)], 2)  # [B, N, most + 1]: a node, its parent, ..., root
    depth = (up < n).sum(2).masked_fill(is_too_deep, 0)
    order = (
        depth[..., None] - 1 - torch.arange(most, device=parent.device)
    )  # from the root down; below 0: after the node
    found = up.gather(2, order.clamp(min=-1) % (most + 1))
    return found.masked_fill(found == n, -1), depth


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
    return accept_along(targets, tokens, parent, length, *paths_of(parent, parent.shape[1]))


def accept_along(
    targets: Tensor,  # [B, N+1] int64
    tokens: Tensor,  # [B, N] int64
    parent: Tensor,  # [B, N] int64
    length: Tensor,  # [B] int64
    paths: Tensor,  # [B, N, D] int64: of paths_of
    depth: Tensor,  # [B, N] int64: of paths_of
) -> tuple[Tensor, Tensor, Tensor]:  # n_accepted [B], path [B, D], bonus [B]
    """See `accept`, for paths that are known; a node without a path is not accepted.

    >>> tree = torch.tensor([[-1, 0, 0, 1]])
    >>> given = (torch.tensor([[5, 6, 0, 1, 0]]), torch.tensor([[5, 6, 7, 1]]), tree, torch.tensor([4]))
    >>> accept_along(*given, *paths_of(tree, 2))
    (tensor([2]), tensor([[0, 1]]), tensor([0]))
    """
    b, n, most = paths.shape
    if n == 0:
        return length.new_zeros(b), paths.new_full((b, most), -1), targets[:, 0]
    is_real = torch.arange(n, device=tokens.device) < length[:, None]
    agrees = is_real & (tokens == targets.gather(1, parent + 1))
    n_accepted, path, last = descend(agrees, paths, depth)
    return n_accepted, path, targets.gather(1, last[:, None] + 1)[:, 0]


def descend(
    stands: Tensor,  # [B, N] bool: at most one child of a node
    paths: Tensor,  # [B, N, D] int64: of paths_of
    depth: Tensor,  # [B, N] int64: of paths_of
) -> tuple[Tensor, Tensor, Tensor]:  # n_accepted [B], path [B, D], the last of its nodes [B]; -1: the root
    """Walk down from the root while a child stands.

    >>> descend(torch.tensor([[True, False, True, True]]), *paths_of(torch.tensor([[-1, 0, 0, 1]]), 3))
    (tensor([2]), tensor([[ 0,  2, -1]]), tensor([2]))
    """
    b, _, most = paths.shape
    on_path = stands.gather(1, paths.clamp(min=0).flatten(1)).view_as(paths) | (paths < 0)
    n_accepted, last = torch.where(on_path.all(2), depth, 0).max(1)  # the deepest node whose whole path stands
    is_any = n_accepted > 0
    path = paths.gather(1, last[:, None, None].expand(b, 1, most))[:, 0].masked_fill(~is_any[:, None], -1)
    return n_accepted, path, torch.where(is_any, last, -1)


def siblings(parent: Tensor) -> tuple[Tensor, Tensor]:  # [B, N] int64 -> [B, N] twice
    """The family of each node, and its rank among its siblings, from 0: the order in which they were offered.

    >>> siblings(torch.tensor([[-1, 0, 0, 1]]))
    (tensor([[0, 1, 1, 2]]), tensor([[0, 0, 1, 0]]))
    """
    is_same = parent[:, :, None] == parent[:, None]  # [B, N, N]
    first = is_same.long().argmax(2)
    nodes = torch.arange(parent.shape[1], device=parent.device)
    number = (first == nodes).long().cumsum(1) - 1
    return number.gather(1, first), (is_same & (nodes[:, None] > nodes)).sum(2)
