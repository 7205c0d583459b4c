"""Trees that are offered to the target: the output is the target's own, whatever is in them."""

import random
from collections.abc import Callable, Sequence

import pytest

from saguaro.draft.rows import DraftRow, Proposal
from saguaro.model.transformer import Transformer
from saguaro.target.request import Request
from saguaro.types import SCRIPT
from tests.target.test_round import N_KNOWN, STYLES, new_requests, new_rig, proposing, rest

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


@pytest.mark.parametrize("style", STYLES)
def test_logprobs_are_those_of_plain_decoding(model: Transformer, texts: list[list[int]], style: str) -> None:
    def asked() -> list[Request]:
        found = new_requests()
        for request in found:
            object.__setattr__(request.params, "logprobs", 2)
        return [request for index, request in enumerate(found) if list(STYLES)[index % len(STYLES)] == style]

    plain, in_trees = asked(), asked()
    new_rig(model).run(plain)
    new_rig(model, proposing(Trees(texts, hidden, has_chains=True), 12), lookahead=12).run(in_trees)
    for one, other in zip(plain, in_trees, strict=True):
        assert [each.token for each in other.logprobs] == [each.token for each in one.logprobs] == one.output
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert b.logprob == pytest.approx(a.logprob, abs=1e-9)
            assert [token for token, _ in b.top] == [token for token, _ in a.top]
