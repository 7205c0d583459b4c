"""What one pass of a block drafter says: candidates for every position after a text. Host code, without a model.

    text     ... a b c                    the candidates of a position are for that token, whatever is chosen before it
    block            [6 2 9]              so every node of a tree has the children of its depth, and the likeliest nodes
    positions         1 2 3               are found best first from products of probabilities (draft/best_first.py)

Under rejection the children of a node are draws of its position. Nodes of one depth share them, which is exact: a
verification walks through one node of every depth at most, so it uses each position's draws once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

import torch
from torch import Tensor

from saguaro.draft.best_first import Nodes, Source, best_nodes
from saguaro.draft.growth import Shape
from saguaro.draft.rows import DraftRow
from saguaro.draft.tree import UNLIKELY


class Candidate(NamedTuple):
    """A token that may come at a position."""

    token: int
    chance: float  # that it does, as estimated
    bin: int  # of the table of chances that said so


@dataclass(frozen=True)
class Block:
    """Candidates after a text."""

    n_text: int  # tokens of the text
    positions: list[list[Candidate]]  # [P] best first; under rejection the draws first
    laws: Sequence[Tensor] = ()  # [K] of [V]: what each position's draws were drawn from; empty: shared noise
    is_prepared: bool = False  # without the features of the last tokens

    def nodes(self, shape: Shape, room: int, least: float = 0.0, cut: float = 0.0) -> Nodes:
        """The likeliest nodes, as many as there is room for: at least one, of the others those with this probability,
        up to the first that is less likely than the cut where its parent is right."""
        source = Source(lambda depth: self._children(depth, is_chain=shape.is_chain), lambda depth, _: depth + 1)
        found = best_nodes(source, 0, min(shape.nodes, room), min(shape.lookahead, room, len(self.positions)))
        for node, (chance, parent) in enumerate(zip(found.chances, found.parents, strict=True)):
            above = found.chances[parent] if parent >= 0 else 1.0
            if node and (chance < least or chance < cut * above):
                return found.first(node)
        return found

    def families(self, nodes: Nodes) -> Tensor | None:  # [F, V]
        """What the families of these nodes (algo/tree.py) were drawn from; None: shared noise."""
        if not self.laws or not nodes.parents:
            return None
        depths = depths_of(nodes.parents)
        first = {parent: node for node, parent in reversed(list(enumerate(nodes.parents)))}
        return torch.stack([self.laws[depths[node]] for node in sorted(first.values())])

    def chance(self, depth: int, token: int) -> float:
        """The probability of a token at a position, also of one that is no candidate."""
        known = self.positions[depth] if depth < len(self.positions) else []
        return next((each.chance for each in known if each.token == token), math.exp(UNLIKELY))

    def _children(self, depth: int, *, is_chain: bool) -> list[tuple[int, float]]:
        known = self.positions[depth]
        return [(each.token, each.chance) for each in (known[:1] if is_chain else known)]


class Expected(NamedTuple):
    """An outcome: the tokens that it adds to a text, and its probability as estimated."""

    tokens: tuple[int, ...]  # accepted ones, then the bonus
    chance: float


def likeliest_outcomes(row: DraftRow, block: Block, n: int) -> list[Expected]:
    """The likeliest outcomes of what is in flight after a text, best first.

    The bonus after a node is no child of the node: that one would have been accepted.

    >>> row = DraftRow(0, None, speculation=[5, 7])
    >>> six, nine = Candidate(6, 0.25, 0), Candidate(9, 0.5, 0)
    >>> block = Block(3, [[Candidate(5, 0.75, 0), six], [Candidate(7, 0.5, 0)], [nine]])
    >>> likeliest_outcomes(row, block, 2)
    [Expected(tokens=(6,), chance=0.25), Expected(tokens=(5, 7, 9), chance=0.1875)]
    """
    tokens, parents = row.speculation, chain_of(row.parents, row.speculation)
    paths: list[tuple[int, ...]] = [()]
    chances = [1.0]
    for token, parent in zip(tokens, parents, strict=True):
        above, depth = chances[parent + 1], len(paths[parent + 1])
        paths.append((*paths[parent + 1], token))
        chances.append(above * block.chance(depth, token))
    taken = {(parent, token) for token, parent in zip(tokens, parents, strict=True)}
    found = [
        Expected((*path, each.token), chance * each.chance)
        for node, (path, chance) in enumerate(zip(paths, chances, strict=True), -1)
        for each in (block.positions[len(path)] if len(path) < len(block.positions) else ())
        if (node, each.token) not in taken
    ]
    return nlargest(n, found, key=lambda each: each.chance)


def chain_of(parents: Sequence[int] | None, tokens: Sequence[int]) -> list[int]:
    """The parents of nodes; None: of a chain."""
    return list(range(-1, len(tokens) - 1)) if parents is None else list(parents)


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of each node, of the root's children 0.

    >>> depths_of([-1, 0, -1, 1])
    [0, 1, 0, 2]
    """
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found
