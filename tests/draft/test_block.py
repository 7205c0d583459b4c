"""What one pass of a block drafter says: the likeliest nodes, the families that were drawn, the outcomes to prepare."""

from itertools import product
from typing import Any

import pytest
import torch

from saguaro.draft.best_first import Nodes
from saguaro.draft.block import Block, Candidate, likeliest_outcomes
from saguaro.draft.block_pass import MOST_TOKENS, Asked, BlockPass
from saguaro.draft.growth import Shape
from saguaro.draft.rows import DraftRow, DraftRows
from saguaro.types import DRAFT, Joined

CHANCES = [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.35]]
BLOCK = Block(5, [[Candidate(10 * at + rank, p, 0) for rank, p in enumerate(row)] for at, row in enumerate(CHANCES)])
TREE, CHAIN = Shape(3, 8, 2), Shape(3, 3, 1)


def path_of(nodes: Nodes, node: int) -> tuple[int, ...]:
    """Ranks on the way to a node."""
    parent = nodes.parents[node]
    return (*(path_of(nodes, parent) if parent >= 0 else ()), nodes.tokens[node] % 10)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_the_likeliest_nodes_are_those_of_all_paths(n: int) -> None:
    every = {}
    for depth in (1, 2, 3):
        for path in product(*(range(len(row)) for row in CHANCES[:depth])):
            chance = 1.0
            for at, rank in enumerate(path):
                chance *= CHANCES[at][rank]
            every[path] = chance
    found = BLOCK.nodes(Shape(3, n, 2), 8)
    assert sorted(found.chances, reverse=True) == found.chances
    wanted = sorted(every.values(), reverse=True)[:n]
    assert found.chances == pytest.approx(wanted)
    for node in range(n):
        assert every[path_of(found, node)] == pytest.approx(found.chances[node])


def test_a_chain_is_of_first_candidates() -> None:
    """Also where a later one was more often right."""
    odd = Block(5, [[Candidate(1, 0.2, 0), Candidate(2, 0.6, 0)], [Candidate(3, 0.9, 0)]])
    assert odd.nodes(CHAIN, 3).tokens == [1, 3]
    assert BLOCK.nodes(CHAIN, 2).tokens == [0, 10]
    assert BLOCK.nodes(CHAIN, 3, least=0.3).tokens == [0, 10]
    assert BLOCK.nodes(CHAIN, 3, cut=0.55).tokens == [0, 10]
    assert BLOCK.nodes(CHAIN, 3, least=0.9).tokens == [0], "at least one"
    assert Block(5, []).nodes(CHAIN, 3).tokens == []


def test_each_family_has_the_law_of_its_depth() -> None:
    drawn = Block(5, BLOCK.positions, [torch.full((4,), float(depth)) for depth in range(3)])
    nodes = drawn.nodes(TREE, 8)
    laws = drawn.families(nodes)
    assert laws is not None
    order = list(dict.fromkeys(nodes.parents))  # families are numbered by their first children
    assert laws[:, 0].tolist() == [0.0 if parent < 0 else len(path_of(nodes, parent)) for parent in order]
    assert BLOCK.families(nodes) is None
    assert drawn.families(Nodes()) is None


def a_row(tokens: list[int], parents: list[int] | None) -> DraftRow:
    (row,) = DraftRows().admit([Joined(0, [1, 2, 3, 4, 5])])
    row.propose(tokens, DRAFT, parents=parents)
    return row


def test_outcomes_of_a_tree_are_possible_and_the_likeliest() -> None:
    row = a_row([0, 1, 10], [-1, -1, 0])
    found = likeliest_outcomes(row, BLOCK, 100)
    chances = {each.tokens: each.chance for each in found}
    assert chances == pytest.approx(
        {
            (2,): 0.1,
            (0, 11): 0.5 * 0.2,
            (1, 10): 0.3 * 0.6,
            (1, 11): 0.3 * 0.2,
            (0, 10, 20): 0.5 * 0.6 * 0.4,
            (0, 10, 21): 0.5 * 0.6 * 0.35,
        }
    )
    assert [each.chance for each in found] == sorted(chances.values(), reverse=True)
    assert likeliest_outcomes(row, BLOCK, 2) == found[:2]
    assert {each.tokens for each in likeliest_outcomes(a_row([], None), BLOCK, 9)} == {(0,), (1,), (2,)}


def test_a_token_of_another_proposer_is_unlikely_but_possible() -> None:
    found = likeliest_outcomes(a_row([7], None), BLOCK, 100)
    after = [each for each in found if each.tokens[0] == 7]
    assert [each.tokens for each in after] == [(7, 10), (7, 11)]
    assert 0 < after[0].chance < 0.05


def test_blocks_are_run_in_parts() -> None:
    row: Any = a_row([], None)
    asked = [Asked(row, (), n) for n in (5, 7, 9, 5, 6)]
    sizes = [[1 + each.n for each in part] for part in BlockPass.parts(asked, 14)]
    assert sizes == [[6, 8], [10], [6, 7]]
    assert [len(part) for part in BlockPass.parts(asked, 1)] == [1] * 5
    assert list(BlockPass.parts([], MOST_TOKENS)) == []
