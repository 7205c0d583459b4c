"""Rejection on trees: for every shape of up to four nodes, every draw and every coin, the law is the target's.

Tables give the law after every text. The children of a node are drawn without replacement; each possible tree is a row
of one call. A walk ends at a node: its probability is a product of the chances that `reject` asks coins for. The law of
the bonus is the one that `reject` returns if just the nodes on the way stand.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from saguaro.algo import tree, verification
from saguaro.algo.sampling import stand
from saguaro.algo.verification import reject

Text = tuple[int, ...]
Parents = tuple[int, ...]
Table = Callable[[Text], list[float]]
Drawn = tuple[float, Text]  # a probability, and the token of each node
Law = dict[Text, float]


def shapes(most: int) -> list[Parents]:
    """Every tree of up to so many nodes, as parents; two orders of the same tree are two."""
    found: list[Parents] = []
    for n in range(1, most + 1):
        found += itertools.product(*(range(-1, node) for node in range(n)))
    return found


SHAPES = shapes(4)


def table(seed: int, n_vocab: int, n_possible: int) -> Table:
    """A law after every text, of so many possible tokens."""

    @cache
    def law(text: Text) -> list[float]:
        chance = torch.Generator().manual_seed(seed + 1000 * sum((token + 1) * 7**at for at, token in enumerate(text)))
        p = torch.rand(n_vocab, generator=chance, dtype=torch.float64) + 0.05
        p[torch.randperm(n_vocab, generator=chance)[n_possible:]] = 0
        return [float(x) for x in p / p.sum()]

    return law


def draws(parents: Parents, q: Table, n_vocab: int) -> list[Drawn]:
    """Every assignment of tokens to the nodes, with its probability. Where q has none left, the lowest token comes."""
    found: list[Drawn] = [(1.0, ())]
    for node, parent in enumerate(parents):
        longer = []
        for chance, tokens in found:
            before = [tokens[other] for other in range(node) if parents[other] == parent]
            law = q(text_of(parents, tokens, parent))
            left = [0.0 if token in before else law[token] for token in range(n_vocab)]
            if sum(left) == 0:
                left = [float(token == min(set(range(n_vocab)) - {*before})) for token in range(n_vocab)]
            longer += [(chance * x / sum(left), (*tokens, token)) for token, x in enumerate(left) if x > 0]
        found = longer
    return found


def text_of(parents: Parents, tokens: Sequence[int], node: int) -> Text:
    """The tokens from below the root down to a node."""
    return () if node < 0 else (*text_of(parents, tokens, parents[node]), tokens[node])


def law_of(parents: Parents, p: Table, q: Table, n_vocab: int, every: Sequence[Drawn], length: int) -> Law:
    """The law of so many tokens, if these trees were drawn."""
    n, paths = len(parents), tree.paths(parents)
    each = [p(text_of(parents, tokens, node)) for _, tokens in every for node in range(-1, n)]
    ps = torch.tensor(each, dtype=torch.float64).view(len(every), n + 1, n_vocab)
    heads = list(dict.fromkeys(parents))
    each = [q(text_of(parents, tokens, head)) for _, tokens in every for head in heads]
    qs = torch.tensor(each, dtype=torch.float64).view(len(every), len(heads), n_vocab)
    tokens = torch.tensor([tokens for _, tokens in every])
    sizes = torch.tensor(parents).expand(len(every), n), torch.full((len(every),), n), max(tree.ranks(parents))
    law: Law = defaultdict(float)
    for last in range(-1, n):
        way = paths[last] if last >= 0 else []
        coins = Coins(torch.tensor([node in way for node in range(n)]).expand(len(every), n))
        n_accepted, path, bonus = reject(ps, qs, tokens, *sizes, coins)
        bonus = bonus / bonus.sum(1, keepdim=True)  # as a sample of it would
        assert n_accepted.tolist() == [len(way)] * len(every)
        assert path.tolist() == [[*way, *[-1] * (n - len(way))]] * len(every)
        for row, (chance, own) in enumerate(every):
            weight = chance * reached(parents, way, coins.asked[row].tolist())
            for token, x in enumerate(bonus[row].tolist()):
                if weight * x > 0:
                    follow(law, p, (*(own[node] for node in way), token), weight * x, length)
    return law


class Coins:
    """Coins that fall as wanted; the chances that they were asked for are kept."""

    asked: Tensor

    def __init__(self, stands: Tensor) -> None:
        self._stands = stands

    def __call__(self, chance: Tensor) -> Tensor:
        """See reject."""
        self.asked = chance
        return self._stands


def reached(parents: Parents, way: list[int], chances: list[float]) -> float:
    """The probability that a walk ends behind these nodes."""
    weight, at = 1.0, -1
    for node, chance in enumerate(chances):
        if parents[node] != at:
            continue
        weight *= chance if node in way else 1 - chance
        at = node if node in way else at
    return weight


def follow(law: Law, p: Table, text: Text, weight: float, length: int) -> None:
    """Add a text that goes on with the target's own tokens."""
    if len(text) >= length:
        law[text[:length]] += weight
        return
    for token, x in enumerate(p(text)):
        if x > 0:
            follow(law, p, (*text, token), weight * x, length)


def distance(found: Law, p: Table) -> float:
    """How far a law is from the target's."""
    wanted: Law = defaultdict(float)
    follow(wanted, p, (), 1.0, max(len(text) for text in found))
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return max(abs(found[text] - wanted[text]) for text in [*found, *wanted])


def off(parents: Parents, p: Table, q: Table, n_vocab: int) -> float:
    """How far the law of a tree is from the target's, one token longer than the tree is deep."""
    length = max(len(path) for path in tree.paths(parents)) + 1
    return distance(law_of(parents, p, q, n_vocab, draws(parents, q, n_vocab), length), p)


@pytest.mark.parametrize(("n_vocab", "n_possible"), [(3, 3), (3, 2), (4, 4), (4, 2)])
def test_every_shape_has_the_targets_law(n_vocab: int, n_possible: int) -> None:
    """Also if q has fewer tokens than a node has children: then the others were not drawn."""
    p, q = table(1, n_vocab, n_vocab), table(2, n_vocab, n_possible)
    for parents in SHAPES:
        if max(tree.ranks(parents)) <= n_vocab:
            assert off(parents, p, q, n_vocab) < 1e-12, parents


def test_a_target_of_few_tokens() -> None:
    p, q = table(3, 4, 2), table(4, 4, 3)
    for parents in SHAPES:
        assert off(parents, p, q, 4) < 1e-12, parents


def test_tokens_that_were_not_drawn() -> None:
    """q is zero: each is accepted with its own probability among what is left."""
    p = table(5, 3, 3)
    for parents in SHAPES:
        if max(tree.ranks(parents)) <= 3:
            assert off(parents, p, lambda text: [0.0] * 3, 3) < 1e-12, parents


def test_at_temperature_0_a_child_is_accepted_if_it_is_the_targets_token() -> None:
    parent, length = torch.tensor([[-1, -1, 1, 1]]), torch.tensor([4])
    p = torch.eye(4)[torch.tensor([[2, 0, 3, 1, 1]])]
    q = torch.eye(4)[torch.tensor([[0, 1]])]
    tokens = torch.tensor([[0, 2, 1, 3]])
    n_accepted, path, law = reject(p, q, tokens, parent, length, 2, lambda chance: chance == 1)
    assert (n_accepted.tolist(), path.tolist()) == ([2], [[1, 3, -1, -1]])
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_siblings_have_coins_of_their_own() -> None:
    """And cousins share theirs, which no walk meets twice; the first are those of a chain."""
    parent = torch.tensor([[-1, -1, 0, 0, 1]])
    half = torch.full((400, 5), 0.5)
    found = stand(half, parent.expand(400, 5), torch.arange(400), torch.full((400,), 7)).float()
    alike = (found.T @ found) / 400  # P(both stand)
    assert alike[2, 4] == alike[2, 2]
    for one, other in [(0, 1), (0, 2), (1, 2), (2, 3), (0, 3), (1, 3)]:
        assert abs(float(alike[one, other]) - 0.25) < 0.07, (one, other)
    chain = stand(half[:, :2], torch.tensor([[-1, 0]]).expand(400, 2), torch.arange(400), torch.full((400,), 7)).float()
    assert chain.equal(found[:, [0, 2]])


# Mistakes


PAIR, FORK = (-1, -1), (-1, -1, 1)


@pytest.mark.parametrize("parents", [PAIR, FORK])
def test_the_q_of_the_first_sibling_is_seen(parents: Parents, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling verified as if it were drawn with replacement."""
    monkeypatch.setattr(verification, "without", lambda q, tokens: q)
    assert off(parents, table(1, 3, 3), table(2, 3, 3), 3) > 1e-3


def test_a_q_that_is_not_normalised_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "without", lambda q, tokens: q.scatter(-1, tokens[..., None], 0.0))
    assert off(PAIR, table(1, 3, 3), table(2, 3, 3), 3) > 1e-3


def test_a_residual_that_is_not_normalised_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "residual", lambda p, q: (p - q).clamp(min=0))
    assert off(PAIR, table(1, 3, 3), table(2, 3, 3), 3) > 1e-3


def test_another_order_of_siblings_is_seen() -> None:
    """The likelier child is tried first: then it is not distributed as the first draw."""
    p, q = table(1, 3, 3), table(2, 3, 3)
    every = [(chance, tuple(sorted(tokens, key=lambda token: -q(())[token]))) for chance, tokens in draws(PAIR, q, 3)]
    assert distance(law_of(PAIR, p, q, 3, every, 2), p) > 1e-3


def test_a_child_left_out_because_of_its_token_is_seen() -> None:
    """The second child is verified only if it is not some token; of the first one it may depend."""
    p, q, wrong = table(1, 3, 3), table(2, 3, 3), list[float]()
    for own in (0, 1):
        for token in range(3):
            law: Law = defaultdict(float)
            for n in (1, 2):
                every = [(c, drawn[:n]) for c, drawn in draws(PAIR, q, 3) if (drawn[own] == token) == (n == 1)]
                for text, chance in law_of(PAIR[:n], p, q, 3, every, 2).items():
                    law[text] += chance
            wrong.append(distance(law, p))
    assert max(wrong[:3]) < 1e-12
    assert max(wrong[3:]) > 1e-3
