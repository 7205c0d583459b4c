"""Attention of trees: to the last bit, a node sees what the same token sees in a chain or decoded alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from saguaro.algo import tree
from saguaro.attention.sdpa import kv_indices

pytest.importorskip("triton")

from saguaro.kernels.attention import Nodes, counters, tile_of
from tests.kernels.test_attention import (
    BF16,
    DEVICE,
    FP32,
    SPLIT,
    Shape,
    Texts,
    _assert_close,
    _exact,
    _int32,
    _starts,
    attend,
    attend_plain,
)

SHAPES = [
    Shape(2, 1, 16, 4, FP32),
    Shape(1, 3, 16, 1, FP32),
    Shape(1, 4, 16, 16, FP32),
    Shape(1, 8, 16, 4, FP32),
    Shape(1, 1, 16, 4, BF16),
    Shape(1, 3, 16, 16, BF16),
    Shape(1, 4, 32, 16, BF16),
    Shape(1, 8, 24, 1, BF16),
]


@dataclass(frozen=True)
class Row:
    """Padding, then the last n_new tokens of a text, then the nodes of a tree."""

    n_text: int
    parents: Sequence[int] = ()
    n_new: int = 1
    n_padding: int = 0

    @property
    def n_queries(self) -> int:
        return self.n_padding + self.n_new + len(self.parents)

    def seen(self) -> list[list[int]]:
        """The places behind one another, text then nodes, whose keys each query sees."""
        texts = [list(range(end)) for end in range(self.n_text - self.n_new + 1, self.n_text + 1)]
        paths = [[*range(self.n_text), *(self.n_text + node for node in path)] for path in tree.paths(self.parents)]
        return [*([[]] * self.n_padding), *texts, *paths]


class Step:
    """A call with these rows."""

    def __init__(self, shape: Shape, rows: Sequence[Row], seed: int = 0) -> None:
        self.shape, self.rows = shape, rows
        self.lengths = [row.n_text + len(row.parents) for row in rows]
        self.texts = Texts(shape, self.lengths, seed)
        counts = [row.n_queries for row in rows]
        self.q, self.starts, self.most = self.texts.queries(sum(counts)), _starts(counts), max(counts)
        self.nodes = self._nodes()

    def _nodes(self) -> Nodes:
        seen = [(at, places) for at, row in enumerate(self.rows) for places in row.seen()]
        depth = max(1, *(len(places) - self.rows[at].n_text for at, places in seen))
        unused = int(self.texts.memory[:, 0, 0].isnan().nonzero()[0])  # NaN
        paths = torch.full((len(seen), depth), unused, dtype=torch.int32)
        for token, (at, places) in enumerate(seen):
            n_text, pages = self.rows[at].n_text, self.texts.pages[at].tolist()
            own = kv_indices(pages, self.lengths[at], self.shape.page_size)[places[n_text:]]
            paths[token, : len(own)] = own
        texts = _int32([row.n_text for row in self.rows])
        return texts, _int32([len(places) for _, places in seen]), paths.to(DEVICE)

    def attend(self, *, n_queries: int = 0, longest: int = 0, split: int = SPLIT, **options: object) -> Tensor:
        call = (self.q, self.texts.memory, self.texts.pages, self.starts, _int32(self.lengths), self.shape.page_size)
        bounds = (n_queries or self.most, longest or max(self.lengths))
        return attend(*call, *bounds, nodes=self.nodes, split=split, **options)

    def plain(self) -> Tensor:
        call = (self.q, self.texts.memory, self.texts.pages, self.starts, _int32(self.lengths), self.shape.page_size)
        return attend_plain(*call, self.most, max(self.lengths), nodes=self.nodes)

    def kv(self) -> list[Tensor]:
        """The keys and values that each query sees, written out."""
        rows = zip(self.rows, self.texts.kv, strict=True)
        return [kv[torch.tensor(places, dtype=torch.int64)] for row, kv in rows for places in row.seen()]

    def alone(self, **options: object) -> Tensor:
        """Every query decoded alone, behind a text of its own: a row for each."""
        kv = self.kv()
        texts = Texts(self.shape, [len(own) for own in kv])
        texts.kv = kv
        memory, pages = texts.place(seed=5)
        lengths = [len(own) for own in kv]
        call = (self.q, memory, pages, _starts([1] * len(kv)), _int32(lengths), self.shape.page_size, 1, max(lengths))
        return attend(*call, split=SPLIT, _n_programs=1, **options)


def grow(n: int, seed: int, most: int = 64) -> list[int]:
    """The parents of a random tree."""
    chance, parents, depths = random.Random(seed), list[int](), {-1: 0}
    for node in range(n):
        parents.append(chance.choice([at for at in range(-1, node) if depths[at] < most]))
        depths[node] = depths[parents[-1]] + 1
    return parents


CHAIN, STAR, FORK = [-1, 0, 1], [-1] * 3, [-1, 0, 0, 1, -1]
# Texts that end inside a block, at the edge of one, at the edge of a split, and one token around each.
ENDS = [1, 15, 16, 17, 40, 48, 63, 64, 65, 120, 128, 129]


@pytest.mark.parametrize(("at", "shape"), list(enumerate(SHAPES)), ids=str)
def test_a_node_is_a_token_decoded_alone(at: int, shape: Shape) -> None:
    """Each dtype meets every end."""
    rows = [Row(end, parents) for end, parents in zip(ENDS[at % 4 :: 4], (FORK, CHAIN, STAR), strict=True)]
    step = Step(shape, rows)
    alone = step.alone()
    assert alone.isfinite().all()
    assert torch.equal(step.attend(), alone)
    assert torch.equal(step.attend(_n_programs=1), alone)  # all splits in one program


@pytest.mark.parametrize("shape", [SHAPES[5], SHAPES[6]], ids=str)
def test_blocks_that_are_smaller_than_a_split(shape: Shape) -> None:
    tile = tile_of(shape.group, shape.d, shape.dtype, SPLIT)._replace(block_n=16)
    step = Step(shape, [Row(30, FORK), Row(47, grow(4, seed=2))])
    alone = step.alone(_tile=tile)
    assert torch.equal(step.attend(_tile=tile, longest=100), alone)
    assert torch.equal(step.attend(_tile=tile, longest=100, _n_programs=1), alone)


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6]], ids=str)
def test_rows_with_and_without_trees(shape: Shape) -> None:
    """A chunk of a prompt, a decoded token, trees behind padding and behind a chunk, and padding rows."""
    rows = [
        Row(70, n_new=5),
        Row(33),
        Row(61, grow(4, seed=4), n_padding=3),
        Row(0, n_new=0, n_padding=3),
        Row(50, FORK, n_new=6),
        Row(0, n_new=0),
    ]
    step = Step(shape, rows)
    alone, out = step.alone(), step.attend()
    assert torch.equal(out, alone)
    assert torch.equal(step.attend(longest=400, n_queries=40), alone)
    is_padding = torch.tensor([not places for row in rows for places in row.seen()])
    assert not out[is_padding.to(DEVICE)].any()


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[7]], ids=str)
def test_a_chain_is_verified_as_a_tree(shape: Shape) -> None:
    """Its nodes reach over the edges of blocks and splits."""
    n = 20
    step = Step(shape, [Row(50, range(-1, n - 1))])
    texts, lengths = step.texts, step.lengths
    call = (step.q, texts.memory, texts.pages, step.starts, _int32(lengths), shape.page_size, n + 1, max(lengths))
    assert torch.equal(attend(*call, split=SPLIT), step.attend())


@pytest.mark.parametrize("seed", range(8))
def test_random_trees(seed: int) -> None:
    chance, shape = random.Random(seed), SHAPES[seed]
    rows = [
        Row(chance.randint(1, 100), grow(chance.randint(0, 6), seed + n), n_padding=chance.randrange(3))
        for n in range(2)
    ]
    step = Step(shape, rows, seed)
    assert torch.equal(step.attend(_n_programs=chance.choice((1, 6, 512))), step.alone())


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5]], ids=str)
def test_the_twin(shape: Shape) -> None:
    step = Step(shape, [Row(70, FORK, n_padding=2), Row(20, n_new=3), Row(0, n_new=0, n_padding=2), Row(5, CHAIN)])
    plain = step.plain()
    _assert_close(step.attend(), plain, shape.dtype)
    for token, kv in enumerate(step.kv()):
        exact = _exact(step.q[token : token + 1], kv, torch.ones(1, len(kv), dtype=torch.bool))
        _assert_close(plain[token : token + 1], exact, shape.dtype)


def test_counters_are_left_as_they_were() -> None:
    arrived = counters(DEVICE)
    for rows in ([Row(120, FORK), Row(64, CHAIN)], [Row(10, CHAIN), Row(128)]):
        Step(SHAPES[6], rows).attend(arrived=arrived, longest=256)
        assert not arrived.any()
