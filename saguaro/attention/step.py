"""A step: the tokens of one forward pass as flat arrays, one row after the other.

row              0            1         2
tokens     | t t t t t | t s s s | t s s s |      t: text, s: speculated
starts     0           5         9         13     half-open
kv_index   page * page_size + offset, one per token: where its key and value are written; nodes of a tree, of
           which several may have one position, lie one after the other behind the text
logits_at  flat positions whose logits are needed: the last text token of a sampling row and each speculated one
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from saguaro.algo import tree


@dataclass(frozen=True)
class Segment:
    """One row's share of a step."""

    tokens: Sequence[int]  # to compute: text, then speculated
    start: int  # position of the first token
    pages: Sequence[int]  # of the sequence, at least up to the last token
    n_wanted: int  # number of last tokens whose logits are needed
    parents: Sequence[int] | None = None  # of the last tokens, the nodes of a tree (algo/tree.py); None: a chain

    @property
    def paths(self) -> list[list[int]]:  # [nodes]
        """The nodes on the way to each node of the tree, itself last."""
        return tree.paths(self.parents or ())


@dataclass(frozen=True)
class Step:
    """The input of a forward pass: T tokens, R rows, logits at L of the tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_index: Tensor  # [T] int64
    logits_at: Tensor  # [L] int64
    starts: list[int]  # [R + 1]
    lengths: list[int]  # [R] keys that a row's last token sees, itself included
    pages: list[Sequence[int]]  # [R]
    paths: list[list[list[int]]]  # [R][nodes][depth]: of the row's last tokens, if they are a tree; else empty

    @property
    def sizes(self) -> list[int]:  # [R]
        """Tokens of each row."""
        return [stop - start for start, stop in pairwise(self.starts)]


def make_step(segments: Sequence[Segment], page_size: int, device: torch.device) -> Step:
    """Flatten rows into a step.

    >>> row = Segment(tokens=[7, 8, 9], start=3, pages=[5, 2], n_wanted=2)
    >>> step = make_step([row], page_size=4, device=torch.device("cpu"))
    >>> step.positions.tolist(), step.kv_index.tolist(), step.logits_at.tolist(), step.lengths
    ([3, 4, 5], [23, 8, 9], [1, 2], [6])
    """
    tokens: list[int] = []
    positions: list[int] = []
    kv_index: list[int] = []
    logits_at: list[int] = []
    starts, lengths = [0], []
    paths: list[list[list[int]]] = []
    for segment in segments:
        end = segment.start + len(segment.tokens)
        where, own = range(segment.start, end), segment.paths
        tokens.extend(segment.tokens)
        positions.extend(where[: len(where) - len(own)])
        positions.extend(end - len(own) + len(path) - 1 for path in own)
        paths.append(own)
        kv_index.extend(segment.pages[at // page_size] * page_size + at % page_size for at in where)
        starts.append(len(tokens))
        logits_at.extend(range(starts[-1] - segment.n_wanted, starts[-1]))
        lengths.append(end)
    # One transfer for all four.
    sizes = [len(tokens), len(positions), len(kv_index), len(logits_at)]
    packed = torch.tensor([*tokens, *positions, *kv_index, *logits_at], dtype=torch.int64).to(device)
    parts = packed.split(sizes)
    pages = [segment.pages for segment in segments]
    return Step(parts[0], parts[1], parts[2], parts[3], starts, lengths, pages, paths)
