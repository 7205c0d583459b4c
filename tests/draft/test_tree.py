"""Drafted trees against a plain picture of them: a mapping from the tokens that lead to a node to its score."""

import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.draft.tree import (
    NO_TREE,
    ROOT,
    SURE,
    Trees,
    best,
    expand,
    land,
    pick,
    reroot,
    start,
)
from tests.draft.trees import Path, entries, expanded

CPU = torch.device("cpu")
PLACES = UNUSED = 64
FOREIGN = 99  # a token that no draft has
Ranked = tuple[Tensor, Tensor, Tensor]


@dataclass
class Picture:
    """One row: every listed node's score, and which nodes are expanded."""

    text: int
    score: dict[Path, float] = field(default_factory=dict)
    expanded: set[Path] = field(default_factory=set)

    def put(self, path: Path, own: float, tokens: list[int], chances: list[float]) -> None:
        """The children of a node."""
        for token, chance in zip(tokens, chances, strict=True):
            if chance > -math.inf:
                self.score[*path, token] = own + min(chance, SURE)

    def picked(self, n: int, depth: int) -> list[Path]:
        """The nodes that grow next, as far as there are places."""
        is_open = [path for path in self.score if path not in self.expanded and len(path) <= depth]
        room = PLACES - 1 - len(self.expanded)
        return sorted(is_open, key=lambda path: -self.score[path])[: min(n, room)]

    def below(self, root: Path, n_more: int) -> "Picture":
        """What is left if this node becomes the root of a text that is so much longer."""
        n, own = len(root), self.score[root]
        return Picture(
            self.text + n_more,
            {path[n:]: score - own for path, score in self.score.items() if path[:n] == root and path != root},
            {path[n:] for path in self.expanded if path[:n] == root and path != root},
        )


class Grove:
    """Trees and the pictures of them, grown alike."""

    def __init__(self, n_rows: int, width: int, depth: int, seed: int) -> None:
        self.chance, self.width, self.depth = random.Random(seed), width, depth
        self.trees = Trees.empty(n_rows, PLACES, width, depth, CPU)
        self.pictures = [Picture(0) for _ in range(n_rows)]
        self.begin(list(range(n_rows)))

    def begin(self, rows: list[int]) -> None:
        """New trees for these rows, after texts of any length."""
        texts = [self.chance.randint(1, 50) for _ in rows]
        mine, ranked = self.trees.rows(torch.tensor(rows)), self.ranked(len(rows), 1)
        expand(mine, start(mine, torch.arange(len(rows)), torch.tensor(texts)), ranked)
        self.trees.put(torch.tensor(rows), mine)
        for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
            self.pictures[row] = Picture(text)
            self.pictures[row].put((), 0.0, ranked[0][at, 0].tolist(), ranked[1][at, 0].tolist())

    def grow(self, n: int, depth: int) -> None:
        """Expand n nodes of every row."""
        picked = pick(self.trees, n, depth, is_chain=False)
        ranked = self.ranked(len(self.pictures), n)
        wanted = [picture.picked(n, depth) for picture in self.pictures]
        before = [entries(self.trees, row) for row in range(len(self.pictures))]
        expand(self.trees, picked, ranked)
        for row, (picture, paths) in enumerate(zip(self.pictures, wanted, strict=True)):
            nodes = [before[row][path].node for path in paths]
            assert picked.index[row][picked.is_real[row]].tolist() == nodes
            assert picked.token[row].tolist() == [*(path[-1] for path in paths), *[0] * (n - len(paths))]
            assert picked.place[row, len(paths) :].eq(UNUSED).all()
            assert picked.position[row, len(paths) :].eq(picture.text).all(), "padding hangs below the root"
            for at, path in enumerate(paths):
                own = picture.score[path]
                picture.expanded.add(path)
                picture.put(path, own, ranked[0][row, at].tolist(), ranked[1][row, at].tolist())
        self.check()

    def ranked(self, b: int, r: int) -> Ranked:
        """Children of nodes: different tokens, scores that fall, some missing."""
        tokens = [[self.chance.sample(range(50), self.width) for _ in range(r)] for _ in range(b)]
        chances = torch.tensor(
            [[[-4 * self.chance.random() for _ in range(self.width)] for _ in range(r)] for _ in tokens]
        )
        chances = chances.sort(-1, descending=True).values
        n_real = torch.tensor([[self.chance.randint(0, self.width) for _ in range(r)] for _ in tokens])
        chances = chances.masked_fill(torch.arange(self.width) >= n_real[..., None], -math.inf)
        return torch.tensor(tokens), chances, torch.zeros(b, r, self.width, dtype=torch.int64)

    def check(self) -> None:
        """Trees and pictures agree, and every invariant holds."""
        for row, picture in enumerate(self.pictures):
            found = entries(self.trees, row)
            assert {path: entry.score for path, entry in found.items()} == pytest.approx(picture.score, abs=1e-4)
            assert set(expanded(found)) == picture.expanded
            assert int(self.trees.position[row, self.trees.root[row]]) == picture.text - 1


def outcome_of(grove: Grove, row: int, n: int, depth: int) -> tuple[int, int, Path]:
    """Any outcome of verifying the n best nodes: the node, the bonus, and the accepted tokens."""
    found = entries(grove.trees, row)
    node, token, parent, score = (each[row].tolist() for each in best(grove.trees, n, depth, is_chain=False))
    n_real = sum(one > -math.inf for one in score)
    wanted = sorted((path for path in found if len(path) <= depth), key=lambda path: -found[path].score)[:n]
    assert n_real == len(wanted)
    assert score[:n_real] == sorted(score[:n_real], reverse=True)
    paths: list[Path] = []
    for at in range(n_real):
        assert parent[at] < at, "a parent after its child"
        paths.append((*(paths[parent[at]] if parent[at] >= 0 else ()), token[at]))
        assert found[paths[-1]].node == node[at]
    assert paths == wanted
    path = grove.chance.choice([(), *paths])
    bonuses = [known[-1] for known in found if known[:-1] == path and len(known) == len(path) + 1]
    taken = {one[-1] for one in paths if one[:-1] == path}
    bonus = grove.chance.choice([FOREIGN, *(token for token in bonuses if token not in taken)])
    return (found[path].node if path else ROOT), bonus, path


def settle(grove: Grove, n: int, depth: int) -> None:
    """An outcome of every row; rows that miss, or were not verified, begin again."""
    n_rows = len(grove.pictures)
    before = [entries(grove.trees, row) for row in range(n_rows)]
    roots = grove.trees.root.tolist()
    outcomes = [outcome_of(grove, row, n, depth) for row in range(n_rows)]
    is_tree = [grove.chance.random() < 0.8 for _ in outcomes]
    node = torch.tensor([one[0] if verified else NO_TREE for one, verified in zip(outcomes, is_tree, strict=True)])
    landing = land(grove.trees, node, torch.tensor([bonus for _, bonus, _ in outcomes]))
    assert landing.is_tree.tolist() == is_tree
    lost = []
    for row, (_, bonus, path) in enumerate(outcomes):
        places, end = expanded(before[row]) | {(): roots[row]}, (*path, bonus)
        is_hit = is_tree[row] and end in places
        assert bool(landing.is_hit[row]) == is_hit
        if is_tree[row]:
            assert int(landing.last[row]) == places.get(path, places[path[:-1]])
            ranks = [before[row][path[: i + 1]].node % grove.width for i in range(len(path))]
            if path in places:
                ranks.append(before[row][end].node % grove.width if end in before[row] else -1)
            assert landing.chosen[row].tolist() == [*ranks, *[-1] * (grove.depth + 1 - len(ranks))]
        if is_hit:
            assert int(landing.root[row]) == places[end]
            grove.pictures[row] = grove.pictures[row].below(end, len(end))
        else:
            lost.append(row)
    reroot(grove.trees, landing)
    for row in lost:
        assert bool((grove.trees.score[row] == -math.inf).all())
        assert grove.trees.is_used[row].nonzero().flatten().tolist() == [UNUSED]
        assert not land(grove.trees, torch.full((n_rows,), NO_TREE), torch.zeros(n_rows).long()).is_hit[row]
    if lost:
        grove.begin(lost)
    grove.check()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_trees_are_what_they_are_pictured(data: st.DataObject) -> None:
    """Random growth, outcomes and re-roots of a few rows: node by node, nothing above or beside the root survives."""
    width, lookahead = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    grove = Grove(data.draw(st.integers(1, 3)), width, 2 * lookahead + 1, data.draw(st.integers(0, 10**6)))
    grove.check()
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 4))):
            grove.grow(data.draw(st.integers(1, 7)), grove.depth if data.draw(st.booleans()) else lookahead)
        settle(grove, data.draw(st.integers(1, 8)), lookahead)


def test_a_full_tree_stops_growing() -> None:
    """All 64 places are taken; further steps change nothing, and re-rooting makes room again."""
    grove = Grove(1, 5, 9, seed=3)
    for _ in range(40):
        grove.grow(7, 9)
    assert len(grove.pictures[0].expanded) == PLACES - 1
    kept = grove.trees.rows(torch.tensor([0]))
    for _ in range(5):
        grove.grow(7, 9)
    for name in ("token", "score", "place", "node", "position", "depth", "path"):
        assert getattr(grove.trees, name)[0, :UNUSED].equal(getattr(kept, name)[0, :UNUSED]), name
    end = max(grove.pictures[0].expanded, key=lambda path: -len(path))
    landing = land(grove.trees, torch.tensor([ROOT]), torch.tensor([end[0]]))
    reroot(grove.trees, landing)
    grove.pictures[0] = grove.pictures[0].below(end[:1], 1)
    grove.check()
    n_before = len(grove.pictures[0].expanded)
    grove.grow(7, 9)
    assert len(grove.pictures[0].expanded) > n_before


def test_padding_sees_no_more_than_a_path() -> None:
    """A slot is used again for a shorter text, and there is less to expand than there could be: the places of the old
    tree are not looked at."""
    grove = Grove(1, 3, 5, seed=1)
    expand(grove.trees, start(grove.trees, torch.tensor([0]), torch.tensor([40])), grove.ranked(1, 1))
    for _ in range(20):
        expand(grove.trees, pick(grove.trees, 12, 5, is_chain=False), grove.ranked(1, 12))
    root = start(grove.trees, torch.tensor([0]), torch.tensor([3]))
    tokens, chances = torch.tensor([[[7, 8, 9]]]), torch.tensor([[[-0.1, -math.inf, -math.inf]]])
    one = tokens, chances, torch.zeros_like(tokens)
    expand(grove.trees, root, one)
    for depth in range(1, 4):
        picked = pick(grove.trees, 12, 5, is_chain=False)
        assert picked.is_real.tolist() == [[True, *[False] * 11]]
        assert picked.position[0, 0] == 2 + depth
        assert picked.position[0, 1:].eq(3).all(), "padding hangs below the root"
        assert picked.place[0, 1:].eq(UNUSED).all()
        expand(grove.trees, picked, tuple(part.expand(1, 12, 3) for part in one))  # type: ignore[arg-type]
        entries(grove.trees, 0)


def first_path(grove: Grove, depth: int) -> Path:
    """The best child of the root, its best child, and so on."""
    found = entries(grove.trees, 0)
    path: Path = ()
    while len(path) < depth:
        children = {one: entry for one, entry in found.items() if one[:-1] == path and len(one) == len(path) + 1}
        first = [one for one, entry in children.items() if entry.node % grove.width == 0]
        if not first:
            break
        path = first[0]
    return path


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), steps=st.integers(0, 6))
def test_a_chain_is_one_path_whatever_was_grown(seed: int, n: int, steps: int) -> None:
    """A tree may be asked for a chain: where there is no room for more. It gets first children of first children."""
    grove = Grove(1, 3, 9, seed)
    for _ in range(steps):
        grove.grow(3, 9)
    _, token, parent, score = (each[0].tolist() for each in best(grove.trees, n, n, is_chain=True))
    n_real = sum(one > -math.inf for one in score)
    assert tuple(token[:n_real]) == first_path(grove, n)
    assert parent[:n_real] == list(range(-1, n_real - 1))
