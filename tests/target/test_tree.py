"""Trees that are offered to the target: the output is the target's own, whatever is in them."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from saguaro.algo.tree import nodes_at
from saguaro.draft.rows import DraftRow, Proposal
from saguaro.model.transformer import Transformer
from saguaro.runner.captured import Followed
from saguaro.runner.runner import Runner
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch
from saguaro.target.verifier import Pending, Verifier
from saguaro.types import SCRIPT, Outcome, Speculation
from tests.target.test_round import (
    N_KNOWN,
    STYLES,
    Rig,
    chance,
    new_requests,
    new_rig,
    proposing,
    rest,
    scripted,
    true_output,
)

Tree = tuple[list[int], list[int]]  # tokens and parents
Grow = Callable[[list[int], int, random.Random], Tree]  # the true next tokens, how many nodes, chance


def hidden(true: list[int], n: int, chance: random.Random) -> Tree:
    """The true tokens as one path among others, at a random place among its siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    at, depth = -1, 0
    while len(tokens) < n and depth < len(true):
        siblings = chance.sample([token for token in range(N_KNOWN) if token != true[depth]], chance.randrange(3))
        siblings.insert(chance.randint(0, len(siblings)), true[depth])
        siblings = siblings[: n - len(tokens)]
        first = len(tokens)
        tokens += siblings
        parents += [at] * len(siblings)
        if true[depth] not in siblings:
            break
        at, depth = first + siblings.index(true[depth]), depth + 1
    return tokens, parents


def wild(true: list[int], n: int, chance: random.Random) -> Tree:
    """Any tree: a node hangs anywhere, and is the true token half of the time where that could be."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: dict[int, int] = {-1: 0}
    for node in range(chance.randint(0, n)):
        parent = chance.randrange(-1, node)
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        depth = depths[parent]
        token = true[depth] if depth < len(true) and chance.random() < 0.5 else chance.randrange(N_KNOWN)
        while token in taken:
            token = chance.randrange(N_KNOWN)
        tokens.append(token)
        parents.append(parent)
        depths[node] = depth + 1
    return tokens, parents


class Trees:
    """Proposes trees around the true text; every third is a chain."""

    source = SCRIPT

    def __init__(self, texts: Sequence[list[int]], grow: Grow, has_chains: bool) -> None:
        self._texts, self._grow, self._has_chains = texts, grow, has_chains
        self._chance, self._n = random.Random(3), 0

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """A tree for each row."""
        tokens: list[list[int]] = []
        parents: list[list[int] | None] = []
        for row in rows:
            true = rest(self._texts, row.text, lookahead)
            self._n += 1
            if self._has_chains and self._n % 3 == 0:
                tokens.append(true)
                parents.append(None)
            else:
                found = self._grow(true, lookahead, self._chance)
                tokens.append(found[0])
                parents.append(found[1])
        return Proposal(tokens, parents=parents)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("lookahead", [1, 5, 16, 64])
@pytest.mark.parametrize("grow", [hidden, wild])
@pytest.mark.parametrize("has_chains", [False, True])
def test_the_output_is_the_targets(
    model: Transformer,
    truth: list[list[int]],
    texts: list[list[int]],
    grow: Grow,
    lookahead: int,
    page_size: int,
    has_chains: bool,
) -> None:
    link = proposing(Trees(texts, grow, has_chains), lookahead)
    rig = new_rig(model, link, lookahead=lookahead, page_size=page_size, n_pages=2400 // page_size, max_tokens=2000)
    assert rig.run(new_requests()) == truth
    if grow is hidden and lookahead == 64:
        assert rig.n_rounds < 8, "the true path was in every tree"


def test_pages_run_out(model: Transformer, truth: list[list[int]], texts: list[list[int]]) -> None:
    """Trees are cut where there is no room for them, and requests are preempted."""
    link = proposing(Trees(texts, hidden, has_chains=True), 16)
    rig = new_rig(model, link, lookahead=16, n_pages=30, max_tokens=64)
    assert rig.run(new_requests()) == truth


SIMPLE = list(STYLES)  # requests that are decided within the captured step


@pytest.fixture(scope="module")
def simple_truth(model: Transformer) -> list[list[int]]:
    """The outputs of new_requests(SIMPLE)."""
    return [true_output(model, request) for request in new_requests(SIMPLE)]


@pytest.fixture(scope="module")
def simple_texts(simple_truth: list[list[int]]) -> list[list[int]]:
    """Prompts and outputs of new_requests(SIMPLE)."""
    return [[*request.prompt, *output] for request, output in zip(new_requests(SIMPLE), simple_truth, strict=True)]


class Spy:
    """What came of a captured verifier's launches."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_trees: list[Outcome] = []  # decided within captured steps
        self.n_eager = 0
        verifier = rig.round.verifier
        assert isinstance(verifier, Verifier)
        launch = verifier.launch

        def spied(batch: Batch, spec: Speculation) -> Pending:
            pending = launch(batch, spec)
            if isinstance(pending.decided, Followed):
                outcome = pending.outcome()
                self._check(spec, outcome)
                self.of_trees += [outcome] if outcome.path is not None else []
            else:
                self.n_eager += all(row.samples and row.n_tokens == 1 for row in batch.rows)
            return pending

        monkeypatch.setattr(verifier, "launch", spied)

    @staticmethod
    def _check(spec: Speculation, outcome: Outcome) -> None:
        """A path leads from the root down, and is as wide as the speculation."""
        if spec.parent is None:
            assert outcome.path is None
            return
        assert outcome.path is not None
        assert outcome.path.shape == spec.tokens.shape
        for row, path in enumerate(outcome.accepted()):
            assert outcome.path[row, len(path) :].eq(-1).all()
            assert spec.parent[row, path].tolist() == [-1, *path][: len(path)]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("lookahead", "depth", "nodes"), [(1, 1, 2), (5, 5, 6), (5, 2, 5), (16, 16, 17), (16, 4, 20)])
@pytest.mark.parametrize("grow", [hidden, wild])
def test_captured_steps_decide_simple_requests(
    model: Transformer,
    simple_truth: list[list[int]],
    simple_texts: list[list[int]],
    grow: Grow,
    lookahead: int,
    depth: int,
    nodes: int,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if trees are deeper than the verifier looks. Two rows: a large batch has no room for trees."""
    link = proposing(Trees(simple_texts, grow, has_chains=True), lookahead)
    n_pages, captured = 1200 // page_size, (depth, nodes)
    rig = new_rig(model, link, lookahead=lookahead, captured=captured, page_size=page_size, n_pages=n_pages, max_rows=2)
    assert nodes_at(2, nodes, depth) == nodes
    spy = Spy(rig, monkeypatch)
    assert rig.run(new_requests(SIMPLE)) == simple_truth
    assert spy.n_eager == 0
    paths = [path for outcome in spy.of_trees for path in outcome.accepted()]
    assert max(map(len, paths)) <= depth
    if lookahead > 1:
        assert any(path != list(range(len(path))) for path in paths)


@pytest.mark.parametrize(("lookahead", "depth", "nodes"), [(5, 5, 6), (16, 4, 16)])
@pytest.mark.parametrize("grow", [hidden, wild])
def test_captured_steps_give_the_true_tokens_of_any_request(
    model: Transformer,
    truth: list[list[int]],
    texts: list[list[int]],
    grow: Grow,
    lookahead: int,
    depth: int,
    nodes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with penalties and logprobs are decided by the eager verifier, and so are those beside them."""
    link = proposing(Trees(texts, grow, has_chains=True), lookahead)
    rig = new_rig(model, link, lookahead=lookahead, captured=(depth, nodes))
    spy, requests = Spy(rig, monkeypatch), new_requests()
    for request in requests:
        if request.params.repetition_penalty != 1:
            object.__setattr__(request.params, "logprobs", 1)
    assert rig.run(requests) == truth
    assert spy.n_eager > 0


def test_captured_chains_are_decided_without_paths(
    model: Transformer, simple_truth: list[list[int]], simple_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a verifier of trees and by one of chains alike, round by round; the latter leaves trees to the eager one."""
    rounds = []
    for nodes in (4, 9):
        rig = new_rig(model, scripted(chance(simple_texts), 4), lookahead=4, captured=(4, nodes))
        spy = Spy(rig, monkeypatch)
        assert rig.run(new_requests(SIMPLE)) == simple_truth
        assert spy.n_eager == 0
        rounds.append(rig.n_rounds)
    assert rounds[0] == rounds[1]
    rig = new_rig(model, proposing(Trees(simple_texts, hidden, False), 4), lookahead=4, captured=(4, 4))
    spy = Spy(rig, monkeypatch)
    assert rig.run(new_requests(SIMPLE)) == simple_truth
    assert spy.n_eager > 0


def test_captured_pages_run_out(
    model: Transformer, simple_truth: list[list[int]], simple_texts: list[list[int]]
) -> None:
    link = proposing(Trees(simple_texts, hidden, has_chains=True), 12)
    rig = new_rig(model, link, lookahead=12, n_pages=30, max_tokens=64, captured=(5, 12))
    assert rig.run(new_requests(SIMPLE)) == simple_truth


def test_padding_rows_move_nothing(model: Transformer) -> None:
    """Neither when a step is captured, nor beside other rows: page 0, which padding points to, stays as it is."""
    rig = new_rig(model, captured=(3, 5))
    verifier = rig.round.verifier
    assert isinstance(verifier, Verifier)
    assert isinstance(verifier._runner, Runner)
    memory = verifier._runner.cache.memory
    memory.normal_()
    before = memory.clone()
    verifier.warm(4)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("captured", [None, (12, 13), (4, 12)], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_logprobs_are_those_of_plain_decoding(
    model: Transformer, texts: list[list[int]], style: str, captured: tuple[int, int] | None
) -> None:
    def asked() -> list[Request]:
        found = new_requests()
        for request in found:
            object.__setattr__(request.params, "logprobs", 2)
        return [request for index, request in enumerate(found) if list(STYLES)[index % len(STYLES)] == style]

    plain, in_trees = asked(), asked()
    new_rig(model).run(plain)
    link = proposing(Trees(texts, hidden, has_chains=True), 12)
    new_rig(model, link, lookahead=12, captured=captured).run(in_trees)
    for one, other in zip(plain, in_trees, strict=True):
        assert [each.token for each in other.logprobs] == [each.token for each in one.logprobs] == one.output
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=1e-9 if captured is None else 1e-4)
            assert [token for token, _ in b.top] == [token for token, _ in a.top]
