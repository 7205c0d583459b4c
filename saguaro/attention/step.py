"""A step: the tokens of one forward pass as flat arrays, one row after the other. All of it is tensors, so that a
step whose tensors keep their addresses can be captured.

row              0            1         2
tokens     | t t t t t | t s s s | t s s s |      t: text, s: speculated
starts     0           5         9         13     half-open
kv_index   page * page_size + offset, one per token: where its key and value are written. The nodes of a tree lie
           one after the other behind the text, because several of them may have the same position
logits_at  flat positions whose logits are needed: the last text token of a sampling row and each speculated one
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saguaro.algo import tree


class Segment(NamedTuple):
    """One row's share of a step."""

    tokens: Sequence[int]  # to compute: text, then speculated
    start: int  # position of the first token
    pages: Sequence[int]  # of the sequence, at least up to the last token
    n_wanted: int  # number of last tokens whose logits are needed
    parents: Sequence[int] | None = None  # of the last tokens, the nodes of a tree (algo/tree.py); None: a chain
    slot: int = -1  # of the request, for captured steps
    # For what follows a captured step:
    facts: Sequence[int] = ()  # in the row's line; those that are not given are 0
    told: Sequence[int] = ()  # to be written to tables first
    masks: Sequence[Any] = ()  # tokens allowed at each position (target.grammar.Mask); None: all; empty: no masks

    @property
    def paths(self) -> list[list[int]]:  # [nodes]
        """The nodes on the way to each node of the tree, itself last."""
        return tree.paths(self.parents or ())

    @property
    def depth(self) -> int:
        """Nodes on the longest path, if one token is text and the others are nodes."""
        return len(self.tokens) - 1 if self.parents is None else max(map(len, self.paths), default=0)


@dataclass(frozen=True)
class Nodes:
    """What the tokens of a step see if some are nodes of trees: the text on its row's pages, then its path's keys.

    A query of a row without a tree sees text only: `texts` is not below its `seen`.
    """

    texts: Tensor  # [R] int32: keys before this position are on the row's pages
    seen: Tensor  # [T] int32: keys that a token sees, itself included
    paths: Tensor  # [T, D] int32: KV indices of the keys from `texts` on: the token's ancestors, then itself


@dataclass(frozen=True)
class Step:
    """The input of a forward pass: T tokens of R rows, logits at L of the tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_index: Tensor  # [T] int64; -1: not written
    logits_at: Tensor  # [L] int64
    pages: Tensor  # [R, P] int32
    starts: Tensor  # [R + 1] int32: row r's tokens are starts[r] : starts[r + 1], the last of its text
    lengths: Tensor  # [R] int32: position after a row's last token if all its tokens were a chain
    n_queries: int  # upper bound of a row's tokens
    longest: int  # upper bound of lengths
    nodes: Nodes | None = None  # None: every row is a chain
    features: Tensor | None = None  # [T, D]: what a model reads beside tokens (draft/inputs.py); None: nothing


def make_step(segments: Sequence[Segment], page_size: int, device: torch.device) -> Step:
    """Flatten rows into a step.

    >>> row = Segment(tokens=[7, 8, 9], start=3, pages=[5, 2], n_wanted=2)
    >>> step = make_step([row], page_size=4, device=torch.device("cpu"))
    >>> step.positions.tolist(), step.kv_index.tolist(), step.logits_at.tolist(), step.lengths.tolist()
    ([3, 4, 5], [23, 8, 9], [1, 2], [6])
    """
    tokens: list[int] = []
    positions: list[int] = []
    kv_index: list[int] = []
    logits_at: list[int] = []
    starts, lengths = [0], []
    for segment in segments:
        end, own = segment.start + len(segment.tokens), segment.paths
        where = range(segment.start, end)
        tokens.extend(segment.tokens)
        positions.extend(where[: len(where) - len(own)])
        positions.extend(end - len(own) + len(path) - 1 for path in own)
        kv_index.extend(segment.pages[at // page_size] * page_size + at % page_size for at in where)
        starts.append(len(tokens))
        logits_at.extend(range(starts[-1] - segment.n_wanted, starts[-1]))
        lengths.append(end)
    # One transfer for each dtype.
    sizes = [len(tokens), len(positions), len(kv_index), len(logits_at)]
    parts = torch.tensor([*tokens, *positions, *kv_index, *logits_at], dtype=torch.int64).to(device).split(sizes)
    n_pages = max(len(segment.pages) for segment in segments)
    pages = [page for segment in segments for page in (*segment.pages, *[0] * (n_pages - len(segment.pages)))]
    small = torch.tensor([*pages, *starts, *lengths], dtype=torch.int32).to(device)
    table, begin, end_at = small.split([len(pages), len(starts), len(lengths)])
    return Step(
        tokens=parts[0],
        positions=parts[1],
        kv_index=parts[2],
        logits_at=parts[3],
        pages=table.view(len(segments), n_pages),
        starts=begin,
        lengths=end_at,
        n_queries=max(len(segment.tokens) for segment in segments),
        longest=max(lengths),
        nodes=_nodes(segments, kv_index, starts, device) if any(segment.parents for segment in segments) else None,
    )


def _nodes(segments: Sequence[Segment], kv_index: list[int], starts: list[int], device: torch.device) -> Nodes:
    texts: list[int] = []
    seen: list[int] = []
    paths: list[list[int]] = []
    for segment, stop in zip(segments, starts[1:], strict=True):
        own = segment.paths
        text, first = segment.start + len(segment.tokens) - len(own), stop - len(own)
        texts.append(text)
        seen += [*range(segment.start + 1, text + 1), *(text + len(path) for path in own)]
        paths += [[]] * (len(segment.tokens) - len(own))
        paths += [[kv_index[first + node] for node in path] for path in own]
    depth = max(map(len, paths))
    padded = [[*path, *[0] * (depth - len(path))] for path in paths]
    small = [torch.tensor(each, dtype=torch.int32).to(device) for each in (texts, seen, padded)]
    return Nodes(*small)
