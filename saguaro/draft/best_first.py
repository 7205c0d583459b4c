"""The likeliest nodes of one or two sources of children, on the host: best first, a parent before its children.

The sources are what followed earlier runs of the text (draft/suffix.py), and a tree that was drafted already. A child
that both know has the larger probability of the two, and so have the nodes below it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

At = TypeVar("At")  # where the first source is: what its children depend on

ROOT, NOT_DRAFTED = -1, -2


@dataclass(frozen=True)
class Nodes:
    """Nodes of a tree (algo/tree.py), a parent before its children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # that the text runs through the node
    drafted: list[int] = field(default_factory=list)  # which node of the drafted tree each is; or NOT_DRAFTED

    def first(self, n: int) -> "Nodes":
        """The first n nodes."""
        return Nodes(self.tokens[:n], self.parents[:n], self.chances[:n], self.drafted[:n])


@dataclass(frozen=True)
class Source(Generic[At]):
    """Children after a place, and the place after a child."""

    children: Callable[[At], list[tuple[int, float]]]  # token, and probability after the place
    step: Callable[[At, int], At]


def best_nodes(
    source: Source[At], start: At, most: int, depth: int, *, is_chain: bool = False, drafted: Nodes | None = None
) -> Nodes:
    """At most this many nodes, as deep as `depth`, the likeliest first; a chain follows the likeliest child of each.

    >>> after = {(): [(5, 0.6), (6, 0.4)], (5,): [(7, 0.5)]}
    >>> source = Source(lambda at: after.get(at, []), lambda at, token: (*at, token))
    >>> found = best_nodes(source, (), 3, 4)
    >>> found.tokens, found.parents, found.chances
    ([5, 6, 7], [-1, -1, 0], [0.6, 0.4, 0.3])
    >>> found = best_nodes(source, (), 3, 4, drafted=Nodes([6, 8], [-1, 0], [0.9, 0.8]))
    >>> found.tokens, found.parents, found.drafted
    ([6, 8, 5], [-1, 0, -1], [0, 1, -2])
    """
    found, below = Nodes(), _by_parent(drafted)
    open_: list[tuple[float, int, int, int, int, int, At]] = []
    n_seen = 0
    where, chance, parent, deep, node = start, 1.0, -1, 0, ROOT
    while True:
        if deep < depth:
            children = {token: (own * chance, NOT_DRAFTED) for token, own in source.children(where)}
            for child, token, own in below.get(node, ()):
                children[token] = max(own * chance, children.get(token, (0.0, 0))[0]), child
            kept = [max(children, key=lambda token: children[token][0])] if is_chain and children else children
            for token in kept:
                n_seen += 1  # of equals, the first comes first
                heappush(open_, (-children[token][0], n_seen, token, parent, deep + 1, children[token][1], where))
        if not open_ or len(found.tokens) == most:
            return found
        cost, _, token, above, deep, node, where = heappop(open_)
        chance, parent = -cost, len(found.tokens)
        found.tokens.append(token)
        found.parents.append(above)
        found.chances.append(chance)
        found.drafted.append(node)
        where = source.step(where, token)


def _by_parent(drafted: Nodes | None) -> dict[int, list[tuple[int, int, float]]]:
    """The children of each node: node, token, and probability after its parent."""
    found: dict[int, list[tuple[int, int, float]]] = {}
    if drafted is not None:
        for node, (token, parent, chance) in enumerate(
            zip(drafted.tokens, drafted.parents, drafted.chances, strict=True)
        ):
            above = drafted.chances[parent] if parent >= 0 else 1.0
            found.setdefault(parent, []).append((node, token, chance / above))
    return found
