"""Trees of tokens: which nodes stand, against a walk node by node."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.algo import tree, verification

QUICK = settings(max_examples=300, deadline=None, derandomize=True, database=None)
V = 3
MOST_NODES = 70


def chain(n_rows: int, n_nodes: int) -> torch.Tensor:  # [B, N] int64
    """The parents of chains."""
    return torch.arange(-1, n_nodes - 1).repeat(n_rows, 1)


@st.composite
def trees(draw: st.DrawFn, most: int = MOST_NODES) -> tuple[list[int], list[int], list[int], int]:
    """Parents, tokens, the target's tokens after the root and each node, and how many nodes are real."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        free = [token for token in range(V) if token not in taken]
        if not free:
            break
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
    n = len(parents)
    targets = draw(st.lists(st.integers(0, V - 1), min_size=n + 1, max_size=n + 1))
    return parents, tokens, targets, draw(st.integers(0, n))


def walk(parents: list[int], tokens: list[int], targets: list[int], n_real: int) -> tuple[list[int], int]:
    """The accepted nodes and the bonus, by going down one node at a time."""
    path: list[int] = []
    at = -1
    while True:
        below = [node for node in range(n_real) if parents[node] == at and tokens[node] == targets[at + 1]]
        if not below:
            return path, targets[at + 1]
        (at,) = below
        path.append(at)


@QUICK
@given(trees())
def test_the_path_of_a_walk_is_accepted(given_tree: tuple[list[int], list[int], list[int], int]) -> None:
    parents, tokens, targets, n_real = given_tree
    path, bonus = walk(parents, tokens, targets, n_real)
    one, two, three = (torch.tensor([each], dtype=torch.int64) for each in (targets, tokens, parents))
    n_accepted, found, last = tree.accept(one, two, three, torch.tensor([n_real]))
    assert n_accepted.tolist() == [len(path)]
    assert found[0, : len(path)].tolist() == path
    assert found[0, len(path) :].eq(-1).all()
    assert last.tolist() == [bonus]


@QUICK
@given(st.lists(st.lists(st.integers(0, 1), min_size=9, max_size=9), min_size=1, max_size=4), st.data())
def test_a_chain_is_verified_as_a_chain(rows: list[list[int]], data: st.DataObject) -> None:
    facts = torch.tensor(rows)
    targets, tokens = facts[:, :5], facts[:, 5:]
    length = torch.tensor([data.draw(st.integers(0, 4)) for _ in rows])
    n_accepted, path, bonus = tree.accept(targets, tokens, chain(len(rows), 4), length)
    expected = verification.accept(targets, tokens, length)
    assert torch.equal(n_accepted, expected[0])
    assert torch.equal(bonus, expected[1])
    assert all(nodes[:n].tolist() == list(range(n)) for nodes, n in zip(path, n_accepted.tolist(), strict=True))


@QUICK
@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, MOST_NODES))
def test_paths_are_those_of_a_walk_up(
    given_trees: list[tuple[list[int], list[int], list[int], int]], most: int
) -> None:
    """Of several rows, padded; a node deeper than `most` has none."""
    n = max(len(parents) for parents, *_ in given_trees)
    parent = torch.tensor([[*parents, *[-1] * (n - len(parents))] for parents, *_ in given_trees], dtype=torch.int64)
    paths, depth = tree.paths_of(parent, most)
    assert paths.shape == (len(given_trees), n, most)
    assert paths.dtype == depth.dtype == torch.int64
    for row, parents in enumerate(parent.tolist()):
        for node, path in enumerate(tree.paths(parents)):
            kept = path if len(path) <= most else []
            assert paths[row, node].tolist() == [*kept, *[-1] * (most - len(kept))]
            assert depth[row, node] == len(kept)


@QUICK
@given(trees(), st.integers(1, 5))
def test_the_path_of_a_walk_is_accepted_up_to_the_depth(
    given_tree: tuple[list[int], list[int], list[int], int], most: int
) -> None:
    """Nodes that are too deep are as if they were not there."""
    parents, tokens, targets, n_real = given_tree
    whole, _ = walk(parents, tokens, targets, n_real)
    path = whole[:most]
    one, two, three = (torch.tensor([each], dtype=torch.int64) for each in (targets, tokens, parents))
    found = tree.accept_along(one, two, three, torch.tensor([n_real]), *tree.paths_of(three, most))
    bonus = targets[path[-1] + 1 if path else 0]
    assert [each.tolist() for each in found] == [[len(path)], [[*path, *[-1] * (most - len(path))]], [bonus]]


@QUICK
@given(st.lists(trees(most=12), min_size=2, max_size=5))
def test_rows_do_not_change_one_another(given_trees: list[tuple[list[int], list[int], list[int], int]]) -> None:
    n = max(len(parents) for parents, *_ in given_trees)
    rows = [
        ([*targets, *[0] * (n - len(parents))], *([*each, *[0] * (n - len(each))] for each in (tokens, parents)))
        for parents, tokens, targets, _ in given_trees
    ]
    targets, tokens, parent = (torch.tensor(each, dtype=torch.int64) for each in zip(*rows, strict=True))
    parent = parent.minimum(torch.arange(-1, n - 1))  # padding, too, has its parent before it
    n_accepted, path, bonus = tree.accept(targets, tokens, parent, torch.tensor([each[3] for each in given_trees]))
    for row, (parents, mine, theirs, n_real) in enumerate(given_trees):
        expected, last = walk(parents, mine, theirs, n_real)
        assert path[row, : n_accepted[row]].tolist() == expected
        assert int(bonus[row]) == last


def test_a_broken_target_ends_the_path() -> None:
    targets = torch.tensor([[5, verification.BROKEN, 0]])
    found = tree.accept(targets, torch.tensor([[5, 6]]), torch.tensor([[-1, 0]]), torch.tensor([2]))
    assert [each.tolist() for each in found] == [[1], [[0, -1]], [verification.BROKEN]]
