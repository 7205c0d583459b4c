"""Paged attention: kernels read keys and values through page tables held in tensors.

Invariant: a row's result does not depend on other rows, bit for bit (saguaro.kernels.attention). A step whose tensors
keep their addresses can be captured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.algo import tree
from saguaro.attention.step import Nodes, Step
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.model.products import KVWrite

MAX_SPLITS = 32
LEAST_SPLIT = 128  # keys


class PagedAttention:
    """The attention backend with paged kernels."""

    def __init__(self, cache: KVCache, kernels: Kernels, longest: int, scale: float) -> None:
        """scale: of query-key products."""
        self._cache, self._kernels, self._split, self._scale = cache, kernels, split_of(longest), scale
        self._at: Step  # the next one

    def plan(self, step: Step) -> None:
        """See AttentionBackend."""
        self._at = step

    def place(self, layer: int) -> KVWrite:
        """See AttentionBackend."""
        return KVWrite(self._cache.layers[layer], self._at.kv_index)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionBackend."""
        at = self._at
        nodes = None if at.nodes is None else (at.nodes.texts, at.nodes.seen, at.nodes.paths)
        return self._kernels.attend(
            q, self._cache.layers[layer], at.pages, at.starts, at.lengths, self._cache.page_size,
            at.n_queries, at.longest, self._scale, nodes=nodes, split=self._split,
        )  # fmt: skip


def left_padded(
    tokens: Tensor,  # [R, K+1] int64
    text: Tensor,  # [R] int64: tokens of each text; 0: padding row
    n: Tensor,  # [R] int64: tokens after it; -1: padding row
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: where each row's tokens begin
    page_size: int,
    longest: int,
) -> Step:
    """A step of rows of K + 1 tokens, left-padded; keys and values of padding are not written.

    n = 2 of K = 4    tokens   . . t s s        t: the text's last token, s: the n tokens after it, .: padding
    positions                  2 3 4 5 6        0 for padding before the text
    """
    k = tokens.shape[1] - 1
    column = torch.arange(k + 1, device=tokens.device)
    positions = (text + n - 1 - k)[:, None] + column
    kv_index = kv_indices_at(pages, positions, column >= k - n[:, None], page_size).flatten()
    lengths = (text + n).clamp(min=0).int()
    where = torch.arange(tokens.numel(), device=tokens.device)
    flat = positions.clamp(min=0).flatten()
    return Step(tokens.flatten(), flat, kv_index, where, pages, starts, lengths, k + 1, longest)


@dataclass(frozen=True)
class StepTrees:
    """The trees of a step's rows, node 0 in the first column."""

    parent: Tensor  # [R, N] int64
    paths: Tensor  # [R, N, D] int64: see tree.paths_of
    depth: Tensor  # [R, N] int64
    root: Tensor  # [R, 1] int64: KV index of the text's last token
    kv_index: Tensor  # [R, N] int64: of the nodes; -1 for padding


def left_padded_trees(
    tokens: Tensor,  # [R, N+1] int64: left-padded
    parent: Tensor,  # [R, N] int64: node 0 in the first column
    text: Tensor,  # [R] int64: tokens of each text; 0: padding row
    n: Tensor,  # [R] int64: nodes after it; -1: padding row
    pages: Tensor,  # [R, P] int32
    starts: Tensor,  # [R + 1] int32: where each row's tokens begin
    page_size: int,
    longest: int,
    most: int,  # D: nodes deeper than it see no path, and are not accepted
) -> tuple[Step, StepTrees]:
    """A step of rows of N + 1 tokens, left-padded: the text's last token and the n nodes of a tree after it.

    n = 3 of N = 4    tokens   . t 0 1 2        t: the text's last token, then the nodes, .: padding
    parent                         t 0 0
    positions                  4 4 5 6 6
    kv_index of position       - 4 5 6 7        consecutive behind the text
    """
    width = parent.shape[1]
    paths, depth = tree.paths_of(parent, most)
    node = torch.arange(-1, width, device=tokens.device)  # -1: the root
    is_real = node < n[:, None]
    kv_index = kv_indices_at(pages, text[:, None] + node, is_real, page_size)  # [R, N+1]: root, then nodes
    root, own = kv_index[:, :1], kv_index[:, 1:]
    places = own.gather(1, paths.clamp(min=0).flatten(1)).view_as(paths)
    # From the order of nodes to the order of the step. Padding reads the root's column.
    at = torch.arange(-width, 1, device=tokens.device) + n[:, None]  # [R, N+1]: column of the root and each node
    is_token, at = at >= 0, at.clamp(min=0)
    depth_at = F.pad(depth, (1, 0)).gather(1, at)
    places_at = F.pad(places, (0, 0, 1, 0)).gather(1, at[..., None].expand(-1, -1, most))
    step = Step(
        tokens=tokens.flatten(),
        positions=(text[:, None] - 1 + depth_at).clamp(min=0).flatten(),
        kv_index=torch.where(is_token, kv_index.gather(1, at), -1).flatten(),
        logits_at=torch.arange(tokens.numel(), device=tokens.device),
        pages=pages,
        starts=starts,
        lengths=(text + n).clamp(min=0).int(),
        n_queries=width + 1,
        longest=longest,
        nodes=Nodes(
            texts=text.int(),
            seen=torch.where(is_token, text[:, None] + depth_at, 0).int().flatten(),
            paths=places_at.int().flatten(0, 1),
        ),
    )
    return step, StepTrees(parent, paths, depth, root, own)


def from_left(n: Tensor, steps: Tensor) -> Tensor:  # [R], [K+1] -> [R, K+1] int64
    """Column indices that left-align such rows: of t and of the n tokens after it, then the last column repeated.

    >>> from_left(torch.tensor([1, 2]), torch.arange(3))
    tensor([[1, 2, 2],
            [0, 1, 2]])
    """
    k = len(steps) - 1
    return (k - n[:, None] + steps).clamp(max=k)


def split_of(longest: int) -> int:
    """Keys of a split, for texts up to this length: such that there are at most MAX_SPLITS splits.

    >>> split_of(8192), split_of(131072)
    (256, 4096)
    """
    return max(LEAST_SPLIT, 1 << (-(-longest // MAX_SPLITS) - 1).bit_length())


def kv_indices_at(
    pages: Tensor, positions: Tensor, is_real: Tensor, page_size: int
) -> Tensor:  # [R, P], [R, n], [R, n]
    """KV indices of these positions, [R, n] int64; -1 for padding.

    >>> kv_indices_at(torch.tensor([[3, 1]]), torch.tensor([[3, 4]]), torch.tensor([[True, True]]), page_size=4)
    tensor([[15,  4]])
    """
    page = pages.gather(1, (positions // page_size).clamp(0, pages.shape[1] - 1)).long()
    return torch.where(is_real, page * page_size + positions % page_size, -1)
