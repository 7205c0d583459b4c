"""Logits adjusted within a captured step, by the kernel and by its twin, against the definition, to the bit."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saguaro.algo import tree
from saguaro.attention.step import Segment
from saguaro.config import SamplingParams
from saguaro.kernels.adjust import BLOCK, adjust, adjust_plain
from saguaro.kernels.limits import limits
from saguaro.kernels.row_rules import CHANGED, Texts
from saguaro.kernels.sample import choose
from saguaro.target.grammar import Mask
from saguaro.target.graphed import RULES
from saguaro.target.request import Request
from saguaro.target.sampler import Context, Sampler, rules
from saguaro.target.step_rules import StepRules
from saguaro.target.tables import RuleTables, room_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = tuple[Request, Sequence[int], Sequence[int] | None]  # and its speculation: tokens, and parents of a tree
BY = {"kernel": adjust, "twin": adjust_plain}
REST: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.3},
    "less": {"repetition_penalty": 0.7, "presence_penalty": -0.1},
    "presence": {"presence_penalty": 0.4},
    "frequency": {"frequency_penalty": 0.3},
    "all": {"repetition_penalty": 1.1, "presence_penalty": -1.3, "frequency_penalty": 1.7},
    "bias": {"logit_bias": {3: 2.5, 0: -100.0, 40: 0.1, 96: 1e-3}},
    "both": {"repetition_penalty": 3.3, "frequency_penalty": -0.7, "logit_bias": {3: 2.5, 7: -1.1, 50: 7.3}},
    "allowed": {"allowed_token_ids": (3, 7, 8, 96)},
    "long": {"min_tokens": 37, "stop_token_ids": (3, 50, 7, 98)},
    "all of it": {"allowed_token_ids": tuple(range(0, 90, 3)), "presence_penalty": 0.5, "logit_bias": {3: 1.5, 4: 9.0}},
    "bound": {"structured": {"json": True}},
    "bound and more": {"structured": {"json": True}, "repetition_penalty": 1.4, "logit_bias": {3: 1.5, 4: 9.0}},
}


class Every:
    """A grammar that allows few tokens or many, depending on the output."""

    is_slow = False

    def __init__(self, n_known: int) -> None:
        self._n_known = n_known

    def mask(self, output: Sequence[int]) -> Mask:
        chance = np.random.default_rng([1, *output])
        share = (0.02, 0.3, 0.9)[len(output) % 3]
        return np.packbits(chance.random(self._n_known) < share, bitorder="little")

    def accepts(self, output: Sequence[int]) -> bool:
        return False


class Steps:
    """A captured step's rules for a vocabulary of V tokens, with the line of each row as it would travel."""

    def __init__(self, n_known: int, by: str, n_seats: int = 8, n_changes: int = 4) -> None:
        room = room_for(n_seats, n_changes, 256)
        self.tables = RuleTables(room, n_known, 256, DEVICE)
        self.rules, self.n_known, self.by = StepRules(room, n_known), n_known, by
        self.is_whole: list[bool] = []  # of each row so far, whether it told everything, or what has changed

    def lines(self, rows: Sequence[Row], width: int, n_padding: int = 1) -> Tensor:
        """Tell the tables what they need, and return the rows' rules."""
        segments = [Segment([0, *tokens], 0, (), 1 + len(tokens), parents) for _, tokens, parents in rows]
        told = self.rules.told(segments, [request for request, _, _ in rows])
        self.is_whole += [bool(row.told) for row in told]
        self.tables.write(told, width)
        self.rules.launched()
        n = RULES + CHANGED + self.tables.room.changes
        lines = [[*row.facts, *[0] * (n - len(row.facts))] for row in told] + [[0] * n] * n_padding
        return torch.tensor(lines, device=DEVICE)[:, RULES:]

    def adjusted(self, logits: Tensor, rows: Sequence[Row], width: int, depth: int = 0) -> Tensor:
        """The logits [R * width, V] of these rows, and of a padding row; depth: of trees."""
        rules = self.lines(rows, width)
        n = torch.tensor([*(len(tokens) for _, tokens, _ in rows), -1], device=DEVICE)
        tokens = [at for _, drafted, _ in rows for at in ([5] * (width - len(drafted)) + list(drafted))] + [5] * width
        paths = None
        if depth:
            parents = [[*(p or range(-1, len(t) - 1)), *[-1] * (width - 1 - len(t))] for _, t, p in rows]
            paths = tree.paths_of(torch.tensor([*parents, [-1] * (width - 1)], device=DEVICE), depth)[0]
        found = logits.clone()
        texts = Texts(n, torch.tensor(tokens, device=DEVICE), paths)
        BY[self.by](found, rules, texts, self.tables.on_device, self.n_known)
        return found


def expected(logits: Tensor, rows: Sequence[Row], width: int, n_known: int) -> Tensor:
    """The definition, of each position after a text or a node; the others are left as they are."""
    found = logits.cpu().clone()
    for index, (request, tokens, parents) in enumerate(rows):
        before: list[list[int]] = [[], *tree.paths(parents if parents is not None else range(-1, len(tokens) - 1))]
        first = (index + 1) * width - len(before)
        for at, path in enumerate(before, first):
            own = Sampler(n_known).shape(found[at : at + 1].clone(), [(request, [tokens[node] for node in path])])
            found[at, :n_known] = own[0, :n_known]
    return found


def new_request(n_known: int, seed: int, **params: Any) -> Request:
    """A text whose tokens repeat, some of them beyond the known ones, of which a part is output."""
    chance = random.Random(seed)
    text = [chance.randrange(min(n_known, 40) if chance.random() < 0.8 else n_known + 2) for _ in range(60)]
    request = Request(f"r{seed}", text[:25], SamplingParams(**params), seed)
    request.tokens = text
    request.grammar = Every(n_known) if request.params.structured is not None else None
    return request


def new_logits(n_rows: int, n_columns: int) -> Tensor:
    """Random ones with ties, zeros of both signs, and tokens that cannot be said."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(n_rows, n_columns, generator=generator)
    logits[torch.rand(n_rows, n_columns, generator=generator) < 0.1] = 1.5
    logits[torch.rand(n_rows, n_columns, generator=generator) < 0.05] = -math.inf
    logits[torch.rand(n_rows, n_columns, generator=generator) < 0.05] = 0.0
    logits[torch.rand(n_rows, n_columns, generator=generator) < 0.05] = -0.0
    return logits.to(DEVICE)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """The same bits."""
    assert torch.equal(found.cpu().view(torch.int32), wanted.view(torch.int32))


Speculated = tuple[list[int], list[int] | None]
CHAIN: Speculated = ([7, 7, 3], None)
SHORT: Speculated = ([12], None)
NONE: Speculated = ([], None)
TREE: Speculated = ([7, 3, 7, 39], [-1, 0, 0, 2])
WIDE: Speculated = ([1, 2, 3, 4], [-1, -1, -1, -1])


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("shape", ["chains", "trees"])
def test_every_rule_is_the_definitions(by: str, shape: str) -> None:
    """Rows with different rules in one step, of one node and more, with columns that are no tokens."""
    offered = [CHAIN, SHORT, NONE] if shape == "chains" else [TREE, CHAIN, WIDE, SHORT, NONE]
    rows = [
        (new_request(97, seed, **params), *offered[seed % len(offered)]) for seed, params in enumerate(REST.values())
    ]
    logits = new_logits(5 * (len(rows) + 1), 101)
    found = Steps(97, by, n_seats=20).adjusted(logits, rows, 5, depth=4 if shape == "trees" else 0)
    assert_same(found, expected(logits, rows, 5, 97))
    assert not torch.equal(found, logits)


def test_many_blocks_and_biases() -> None:
    """The first and the last token of each block, and as many biases as there is room for."""
    n_known = 2 * BLOCK + 3
    edges = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, n_known - 1]
    chance = random.Random(0)
    bias = dict.fromkeys(edges, 1.25) | {chance.randrange(n_known): chance.uniform(-3, 3) for _ in range(900)}
    request = new_request(n_known, 1, repetition_penalty=1.7, presence_penalty=0.3, logit_bias=bias)
    request.tokens += edges
    rows = [(request, [edges[1], edges[2]], None)]
    logits = new_logits(6, n_known + 2)
    found = Steps(n_known, "kernel").adjusted(logits, rows, 3)
    assert_same(found, expected(logits, rows, 3, n_known))


@pytest.mark.parametrize("by", BY)
def test_rows_of_padding_and_without_rules_stay_as_they_are(by: str) -> None:
    rows = [(new_request(97, 0), *CHAIN), (new_request(97, 1, **REST["both"]), *SHORT)]
    logits = new_logits(15, 99)
    logits[:] = torch.where(torch.rand_like(logits) < 0.3, math.nan, logits)
    found = Steps(97, by).adjusted(logits, rows, 5).view(torch.int32)
    is_same = (found == logits.view(torch.int32)).all(1).tolist()
    assert is_same == [True] * 5 + [True] * 3 + [False] * 2 + [True] * 5


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_broken_logits_stay_broken(by: str, odd: float) -> None:
    rows = [(new_request(97, seed, **params), *NONE) for seed, params in enumerate(REST.values())]
    logits = new_logits(len(rows) + 1, 99)
    logits[:, 3] = odd
    found = Steps(97, by, n_seats=20).adjusted(logits, rows, 1)
    assert not bool((found[:, 3] < math.inf).any())


def test_tokens_are_the_definitions() -> None:
    """Every rule together with those that follow it: top-k, top-p and min-p of what is left, at some temperatures."""
    then: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"top_k": 5, "top_p": 0.9},
        {"min_p": 0.05},
    ]
    params = [first | more for first in REST.values() for more in then]
    rows: list[Row] = [(new_request(97, seed, **each), [7], None) for seed, each in enumerate(params)]
    width, logits = 2, new_logits(2 * (len(rows) + 1), 101)
    found = Steps(97, "kernel", n_seats=64).adjusted(logits, rows, width)
    places: list[Context] = [(request, tokens[:n]) for request, tokens, _ in rows for n in range(width)]
    each_rules = rules(places, DEVICE)
    own = (each_rules.temperature, each_rules.top_k, each_rules.top_p, each_rules.min_p.log())
    least = limits(found[: len(places)], *own, 97)
    chosen = choose(found[: len(places)], own[0], each_rules.seeds, each_rules.positions, 97, least)
    assert chosen.tolist() == Sampler(97)(logits[: len(places)].cpu().clone(), places).tolist()


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", ["bound", "allowed"])
@pytest.mark.parametrize("at", [5, 2 * BLOCK])
def test_a_mask_that_leaves_no_token(by: str, name: str, at: int) -> None:
    """A grammar then allows everything; of allowed tokens none is better than another. One good token is enough."""
    n_known = 2 * BLOCK + 1
    request = new_request(n_known, 0, **REST[name])
    may = np.zeros(n_known, bool)
    may[[at, 7]] = True
    request.grammar = (
        SimpleNamespace(mask=lambda output: np.packbits(may, bitorder="little")) if name == "bound" else None
    )
    if request.grammar is None:
        object.__setattr__(request.params, "allowed_token_ids", (at, 7))
    logits = new_logits(4, n_known + 1)
    logits[:, [at, 7]] = -math.inf
    logits[1, at] = 0.25
    found = Steps(n_known, by).adjusted(logits, [(request, [3], None)], 2)[:2]
    assert_same(found, expected(logits[:2], [(request, [3], None)], 2, n_known))
    n_left = (found[:, :n_known] > -math.inf).sum(1).tolist()
    assert (n_left[0] > 2) == (name == "bound")
    assert n_left[1] == 1


@pytest.mark.parametrize("by", BY)
def test_texts_that_grow_are_counted_as_they_grow(by: str) -> None:
    """Round by round, with more requests than seats, rounds that the host decides, and one whose launch failed."""
    chance = random.Random(4)
    steps = Steps(97, by, n_seats=3, n_changes=4)
    requests = [
        new_request(97, seed, **REST[name])
        for seed, name in enumerate(["all", "both", "less", "bound and more", "bias"])
    ]
    for n_round in range(24):
        batch = chance.sample(requests, 3)
        rows = [(request, [chance.randrange(20) for _ in range(chance.randrange(4))], None) for request in batch]
        if n_round % 5 == 3:
            before = [Segment([0], 0, (), 1) for _ in batch]
            steps.tables.write(steps.rules.told(before, batch), 4)  # and no step
        logits = new_logits(4 * 4, 99)
        assert_same(steps.adjusted(logits, rows, 4), expected(logits, rows, 4, 97))
        for request in requests:  # the others are decided elsewhere, some by more tokens than a step accepts
            request.tokens += [chance.randrange(20) for _ in range(chance.randrange(1, 5 if request in batch else 7))]
    assert 0.2 < sum(steps.is_whole) / len(steps.is_whole) < 0.8
