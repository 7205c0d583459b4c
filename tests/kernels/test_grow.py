"""The kernels of a growth step against their twin: the same trees, and the same nodes picked."""

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from saguaro.draft.chance import LEAST, MOST, Chances
from saguaro.draft.tree import (
    AT_PLACE,
    LINEAGES,
    NO_TREE,
    ROOT,
    SURE,
    Landing,
    Picked,
    Trees,
    best,
    expand,
    pick,
    reroot,
    start,
)
from saguaro.draft.tree import land as tree_land
from saguaro.kernels import grow, native_grow

Advance = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEPTH = 6
KERNELS = [grow.advance] if DEVICE.type == "cuda" else [grow.advance, native_grow.advance]
CASES = [  # a module, a width and a seed; each width and seed once in the interpreter, which takes seconds for each
    (module, n_children, seed)
    for module in ([grow] if DEVICE.type == "cuda" else [grow, native_grow])
    for n_children in (2, 5, 8)
    for seed in range(6)
    if DEVICE.type == "cuda" or module is native_grow or seed % 3 == n_children // 3
]
each_kernel = pytest.mark.parametrize("advance", KERNELS, ids=lambda each: str(each.__module__))


def on_kernel(
    advance: Advance, trees: Trees, before: tuple[Picked, tuple[torch.Tensor, torch.Tensor]] | None, chances: Chances,
    heat: torch.Tensor, scratch: torch.Tensor, n: int, is_chain: bool, falls: bool = False,
) -> Any:  # fmt: skip
    """`advance` with a tree's tensors."""
    nodes, ranked = None, None
    if before is not None:
        old, ranked = before
        nodes = (old.index, old.is_real, old.place, old.position, old.depth, old.path, old.score)
    limits = (LEAST, MOST, SURE)
    return advance(
        trees.without_root,
        nodes,
        ranked,
        chances.table,
        trees.root,
        torch.arange(len(heat), device=DEVICE),
        heat,
        scratch,
        limits,
        LINEAGES,
        n,
        DEPTH,
        is_chain,
        falls,
    )


def same(ours: Trees, theirs: Trees) -> None:
    """Whether two trees hold the same at every place but the unused one."""
    for field in fields(Trees):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine.dim() > 1:
            mine, other = mine[:, :-1], other[:, :-1]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, msg=field.name)


@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("falls", [False, True])
@pytest.mark.parametrize(("n", "n_children", "is_chain"), [(1, 2, True), (1, 8, False), (4, 8, False), (7, 5, False)])
@each_kernel
def test_growing_is_that_of_the_twin(
    advance: Advance, n_rows: int, n: int, n_children: int, is_chain: bool, falls: bool
) -> None:
    chance = torch.Generator().manual_seed(n_rows * 100 + n)
    chances = Chances(n_children, DEVICE)
    rates = chances.table[0]
    rates.copy_(rates[torch.randperm(len(rates), generator=chance)])  # a later sibling may be likelier
    heat = torch.tensor([0.0, 0.7, 1.0], device=DEVICE)[:n_rows]
    scratch = torch.arange(n_rows, device=DEVICE) * 65 + 1000
    text = torch.arange(n_rows, device=DEVICE) + 5
    ours, theirs = (Trees.empty(n_rows, 64, n_children, 13, DEVICE) for _ in range(2))
    rows = torch.arange(n_rows, device=DEVICE)
    picked, other = start(ours, rows, text), start(theirs, rows, text)
    for step in range(12):  # more than there are places, if n is large
        width = picked.place.shape[1]
        if width == 0:
            break
        scores = (torch.randn(n_rows * width, n_children, generator=chance) * 2).sort(-1, descending=True).values
        scores[:, n_children - step % 2 :] = float("-inf")
        tokens = torch.randint(0, 99, scores.shape, generator=chance)
        scores, tokens = scores.to(DEVICE), tokens.to(DEVICE)
        found = on_kernel(advance, ours, (picked, (tokens, scores)), chances, heat, scratch, n, is_chain, falls)
        assert found is not None
        logs, bins = chances(scores.view(n_rows, width, -1), (heat == 0)[:, None])
        logs = logs.cummin(-1).values if falls else logs
        expand(theirs, other, (tokens.view(n_rows, width, -1), logs, bins))
        same(ours, theirs)
        twin, picked = pick(theirs, n, DEPTH, is_chain), Picked(*found[:8])
        if advance is native_grow.advance:  # leaves out what is padding in every row
            twin = twin.without_padding()
        other = picked  # nodes of nearly the same score may change places
        assert picked.is_real.equal(twin.is_real)
        torch.testing.assert_close(picked.score, twin.score)
        is_real, row = picked.is_real, torch.arange(n_rows, device=DEVICE)[:, None]
        above = picked.index // n_children
        flat = theirs.score.flatten(1).gather(1, picked.index)
        torch.testing.assert_close(picked.score[is_real], flat[is_real])
        assert (theirs.place.flatten(1).gather(1, picked.index)[is_real] < 0).all()
        assert all(
            len(set(line[line >= 0].tolist())) == int((line >= 0).sum()) for line in picked.index.where(is_real, -1)
        )
        assert picked.place.equal(twin.place)
        assert picked.token[is_real].equal(theirs.token.flatten(1).gather(1, picked.index)[is_real])
        assert picked.position[is_real].equal((theirs.position[row, above] + 1)[is_real])
        assert picked.depth[is_real].equal((theirs.depth[row, above] + 1)[is_real])
        path = theirs.path[row, above].scatter(
            2, theirs.depth[row, above].clamp(max=12)[..., None], picked.place[..., None]
        )
        assert picked.path[is_real].equal(path[is_real])
        kv_index, seen, paths = found[8:]
        assert kv_index.equal(scratch[:, None] + picked.place)
        assert seen.equal((picked.position + 1).int())
        assert paths.equal((scratch[:, None, None] + picked.path.clamp(min=0)).int())


@each_kernel
def test_the_last_step_only_stores(advance: Advance) -> None:
    chances, text = Chances(3, DEVICE), torch.tensor([4], device=DEVICE)
    trees = Trees.empty(1, 8, 3, 5, DEVICE)
    root = start(trees, torch.zeros_like(text), text)
    scores = torch.tensor([[3.0, 2.0, 1.0]], device=DEVICE)
    tokens = torch.tensor([[7, 8, 9]], device=DEVICE)
    zero = torch.zeros(1, device=DEVICE)
    assert on_kernel(advance, trees, (root, (tokens, scores)), chances, zero, zero.long(), 0, is_chain=False) is None
    assert trees.token[0, 0].tolist() == [7, 8, 9]
    first = on_kernel(advance, trees, None, chances, zero, zero.long(), 2, is_chain=False)
    assert first is not None
    assert first[3].tolist() == [[7, 8]]


def grown(n_rows: int, n_children: int, n_steps: int, seed: int) -> Trees:
    """Trees that have grown for some steps, of which some have been re-rooted."""
    chance, rows = torch.Generator().manual_seed(seed), torch.arange(n_rows)
    trees, picked = Trees.empty(n_rows, 64, n_children, 13, torch.device("cpu")), None
    for step in range(n_steps):
        if step == n_steps // 2:
            child = trees.token[rows, trees.root, 0]
            reroot(trees, tree_land(trees, torch.where(rows % 2 == 0, ROOT, NO_TREE), child))
        picked = start(trees, rows, rows + 5) if step == 0 else pick(trees, 3, 12, is_chain=False)
        shape = (n_rows, picked.place.shape[1], n_children)
        tokens = torch.stack([torch.randperm(20, generator=chance)[:n_children] for _ in range(shape[0] * shape[1])])
        logs = -torch.rand(shape, generator=chance).mul(8).round().div(4).sort(-1).values  # ties too
        logs = logs.masked_fill(torch.rand(shape, generator=chance) < 0.1, float("-inf"))
        expand(trees, picked, (tokens.view(shape), logs, torch.zeros(shape, dtype=torch.int64)))
    return Trees(*(getattr(trees, field.name).to(DEVICE) for field in fields(Trees)))


def outcomes(trees: Trees, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A node of each tree in any of its names, and a token after it."""
    chance = random.Random(seed)
    nodes, tokens = [], []
    for row in range(len(trees.root)):
        places = trees.is_used[row, :-1].nonzero()[:, 0].tolist() or [0]
        place = chance.choice(places)
        cells = [place * trees.token.shape[2] + rank for rank in range(trees.token.shape[2])]
        if trees.node[row, place] >= 0 and chance.random() < 0.5:  # what leads to this place
            known, width = int(trees.node[row, place]), trees.token.shape[2]
            holder = known // width
            nodes.append(ROOT if holder == int(trees.root[row]) else int(trees.node[row, holder]))
            tokens.append(int(trees.token[row, holder, known % width]))
            continue
        node = chance.choice([ROOT, NO_TREE, AT_PLACE - place, int(trees.node[row, place]), *cells])
        own = int(trees.place[row].flatten()[node]) if node >= 0 else int(trees.root[row])
        own = place if node <= AT_PLACE else own
        children = trees.token[row, own].tolist() if own >= 0 else [0]
        nodes.append(node)
        tokens.append(chance.choice([*children, *children, 999]))
    return torch.tensor(nodes, device=DEVICE), torch.tensor(tokens, device=DEVICE)


@pytest.mark.parametrize(("module", "n_children", "seed"), CASES)
def test_an_outcome_leads_where_the_twin_says(module: Any, n_children: int, seed: int) -> None:
    """And what is shown below it is what the re-rooted tree has, of rows in any order of a larger set."""
    trees = grown(7, n_children, 4 + 2 * seed, seed)
    which = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:5].to(DEVICE)
    before = trees.rows(torch.arange(7, device=DEVICE))
    n_hits = 0
    for again in range(8):
        node, bonus = outcomes(trees.rows(which), 10 * seed + again)
        mine = trees.rows(which)
        wanted = tree_land(mine, node, bonus)
        found = Landing(*module.land(trees.without_root, trees.root, which, node, bonus, (NO_TREE, AT_PLACE)))
        assert found.is_tree.equal(wanted.is_tree)
        assert found.is_hit.equal(wanted.is_hit)
        assert found.root.equal(wanted.root)
        is_tree = wanted.is_tree
        assert found.last[is_tree].equal(wanted.last[is_tree])
        assert found.chosen[is_tree].equal(wanted.chosen[is_tree])
        reroot(mine, wanted)
        n_hits += int(wanted.is_hit.sum())
        for n, depth, is_chain in ((1, 1, True), (4, 4, True), (9, 3, False), (31, 12, False)):
            out = torch.full((5, 4 * n + 3), 77, device=DEVICE)
            module.show(trees.without_root, found.root, which, found.is_hit, n, depth, is_chain, out[:, 1:])
            assert out[:, 0].eq(77).all()
            index, token, parent, score = best(mine, n, depth, is_chain)
            is_real = score > float("-inf")
            shown = out[:, 1 : 1 + 4 * n].view(5, n, 4)
            assert shown[..., 0].equal(torch.where(is_real, index, -1))
            assert shown[..., 1][is_real].equal(token[is_real])
            assert shown[..., 2][is_real].equal(parent[is_real])
            assert shown[..., 3][is_real].equal(score[is_real].view(torch.int32).long())
    assert n_hits > 3
    for field in fields(Trees):
        assert getattr(trees, field.name).equal(getattr(before, field.name)), field.name
