"""Children that are drawn from q, with noise that is new for every node, and the others by likelihood."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo import sampling
from saguaro.algo.theory import saguaro_probabilities
from saguaro.draft.ranking import Draws, likeliest, with_first
from saguaro.kernels.bundle import plain_kernels

V, C = 10, 4
CPU = torch.device("cpu")


def logits(n_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(
    n: int, temperature: float = 1.0, c: float = 1.0, fan_out: int = 2, draws: Draws | None = None, seed: int = 7
) -> tuple[Tensor, Tensor, Tensor]:
    """The children of one node, n times, their scores, and the q of the first: [n, C] twice, [V]."""
    same = logits(1).repeat(n, 1)
    q = sampling.at_temperature(same, torch.full((n,), temperature))
    noise = torch.full((n,), seed), torch.full((n,), 3)
    (tokens, scores), law = (draws or Draws(c, 0, CPU))(same, q, noise, C, torch.tensor([fan_out]))
    assert law.shape == (n, V)
    assert law.equal(law[:1].expand(n, V))
    return tokens, scores, law[0]


def test_first_children_are_samples_of_q() -> None:
    tokens, _, q = drawn(4000)
    assert torch.allclose(q, logits(1)[0].softmax(-1))
    counts = Counter(tokens[:, 0].tolist())
    assert all(abs(counts[token] / 4000 - float(q[token])) < 0.04 for token in range(V))


def test_the_others_are_the_likeliest_and_scores_do_not_tell_the_first() -> None:
    tokens, scores, _ = drawn(200)
    order, expected = likeliest(logits(1), C)
    assert scores.equal(expected.expand_as(scores))
    assert len(set(tokens[:, 0].tolist())) > C
    for first, *others in tokens.tolist():
        assert others == [token for token in order[0].tolist() if token != first][: C - 1]


def test_saguaro_sampling_holds_back_what_is_prepared() -> None:
    plain = drawn(1)[2]
    tokens, _, q = drawn(2000, c=0.3, fan_out=3)
    assert torch.allclose(q, saguaro_probabilities(plain, F=3, C=0.3), atol=1e-6)
    best = plain.topk(3).indices.tolist()
    share = sum(token in best for token in tokens[:, 0].tolist()) / 2000
    assert abs(share - float(q[best].sum())) < 0.05
    assert share < float(plain[best].sum()) - 0.1


def test_with_c_0_nothing_is_drawn_that_is_prepared() -> None:
    tokens, _, q = drawn(500, c=0.0, fan_out=2)
    best = logits(1)[0].topk(2).indices.tolist()
    assert float(q[best].sum()) == 0
    assert float(q.sum()) == pytest.approx(1)
    assert not set(best) & set(tokens[:, 0].tolist())


def test_where_nothing_is_prepared_c_does_nothing() -> None:
    assert drawn(1, c=0.3, fan_out=0)[2].allclose(drawn(1)[2])


@pytest.mark.parametrize("c", [1.0, 0.3, 0.0])
def test_q_of_a_greedy_row_is_one_hot(c: float) -> None:
    tokens, _, q = drawn(3, temperature=0.0, c=c)
    best = int(logits(1)[0].argmax())
    assert tokens[:, 0].tolist() == [best] * 3
    assert q.tolist() == [float(token == best) for token in range(V)]


def test_no_two_draws_have_the_same_noise() -> None:
    """Nor do two generations of drafts, nor two requests: then which drafts are used would tell what is in them."""
    first = drawn(40, draws=Draws(1.0, 0, CPU))[0][:, 0]
    assert len(set(first.tolist())) > 3
    assert first.equal(drawn(40, draws=Draws(1.0, 0, CPU))[0][:, 0])
    again = Draws(1.0, 0, CPU)
    assert first.equal(drawn(40, draws=again)[0][:, 0])
    assert not first.equal(drawn(40, draws=again)[0][:, 0]), "the second time is the first again"
    assert not first.equal(drawn(40, draws=Draws(1.0, 1, CPU))[0][:, 0])
    assert not first.equal(drawn(40, draws=Draws(1.0, 0, CPU), seed=9)[0][:, 0])
    # Nor the target's, whose own sample for a position is one and the same.
    own = sampling.pick(logits(1).softmax(-1).log(), torch.tensor([7]), torch.tensor([3]))
    assert set(own.tolist()) != set(first.tolist())


def test_children_of_trees_are_drawn_without_replacement() -> None:
    """Pairs are as frequent as those of two draws, the second from what the first leaves."""
    n = 6000
    tokens, scores, q = drawn(n, draws=Draws(1.0, 0, CPU, n=C))
    assert scores.equal(likeliest(logits(1), C)[1].expand_as(scores)), "scores tell the rank only"
    assert all(len(set(row)) == C for row in tokens.tolist())
    counts = Counter(map(tuple, tokens[:, :2].tolist()))
    for first in range(V):
        for second in range(V):
            chance = float(q[first] * q[second] / (1 - q[first])) if first != second else 0.0
            assert abs(counts[first, second] / n - chance) < 0.03, (first, second)
    assert tokens[:, 0].equal(drawn(n)[0][:, 0]), "the first is that of a chain"


def test_where_q_ends_the_likeliest_follow() -> None:
    """A greedy row has one token to draw: its siblings are the next best."""
    tokens, _, q = drawn(3, temperature=0.0, draws=Draws(1.0, 0, CPU, n=C))
    assert tokens.tolist() == [likeliest(logits(1), C)[0][0].tolist()] * 3
    assert int((q > 0).sum()) == 1


def test_the_kernel_draws_the_same_children() -> None:
    ours = drawn(50, draws=Draws(0.5, 0, CPU, n=C))
    theirs = drawn(50, draws=Draws(0.5, 0, CPU, n=C, kernels=plain_kernels()))
    assert ours[0].equal(theirs[0])
    assert (
        drawn(2, temperature=0.0, draws=Draws(1.0, 0, CPU, n=C, kernels=plain_kernels()))[0].tolist()
        == [likeliest(logits(1), C)[0][0].tolist()] * 2
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.permutations(range(6)), st.integers(1, 6), st.permutations(range(8)), st.integers(0, 6), st.integers(0, 6))
def test_tokens_put_first(tokens: list[int], n: int, drawn: list[int], m: int, n_real: int) -> None:
    first, is_real = torch.tensor([drawn[:m]], dtype=torch.int64), torch.arange(m)[None] < n_real
    found = with_first(torch.tensor([tokens[:n]]), first, is_real)[0].tolist()
    real = drawn[: min(m, n_real)]
    assert found == [*real, *(token for token in tokens[:n] if token not in real)][:n]
