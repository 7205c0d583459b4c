"""What the draft guesses: the target's own token under shared noise, a fresh sample of q under rejection."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.algo.theory import saguaro_probabilities
from saguaro.config import SamplingParams
from saguaro.draft.ranking import Ranker, SampledRanker, SharedRanker
from saguaro.target.request import Request
from saguaro.target.sampler import Context, Sampler

V, KNOWN, C = 12, 10, 4


def request(seed: int = 7, **params: Any) -> Request:
    return Request("r", [1, 2], SamplingParams(**params), seed)


def logits(n_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed)) * 2


PLACES: list[Context] = [
    (request(temperature=0), []),
    (request(temperature=1), []),
    (request(temperature=1), [3, 3]),
    (request(seed=8, temperature=1), []),
    (request(temperature=1.5, top_k=3), [4]),
    (request(temperature=0.7, top_p=0.5), [4]),
    (request(temperature=1, logit_bias={6: 50.0}), []),
    (request(temperature=0, presence_penalty=2.0, repetition_penalty=3.0), [5, 5, 5]),
]


def guessers() -> list[Ranker]:
    sampler = Sampler(KNOWN)
    return [SharedRanker(sampler, C), SampledRanker(sampler, C, fan_out=2, c=0.5)]


@pytest.mark.parametrize("guess", guessers(), ids=["shared", "drawn"])
def test_candidates_are_distinct_known_and_best_first(guess: Ranker) -> None:
    for drafts in (None, [guess.start() for _ in PLACES]):
        found = guess(logits(len(PLACES)), PLACES, drafts)
        assert guess.n_candidates == C
        assert found.candidates.shape == found.scores.shape == (len(PLACES), C)
        assert (found.scores.diff(dim=1) <= 0).all()
        assert all(len(set(row)) == C and max(row) < KNOWN for row in found.candidates.tolist())
        assert found.token.max() < KNOWN


@pytest.mark.parametrize("guess", guessers(), ids=["shared", "drawn"])
def test_there_are_no_more_candidates_than_tokens(guess: Ranker) -> None:
    few = Sampler(3)
    small = SharedRanker(few, C) if isinstance(guess, SharedRanker) else SampledRanker(few, C, 2, 0.5)
    found = small(logits(1), PLACES[1:2], [small.start()])
    assert sorted(found.candidates[0].tolist()) == [0, 1, 2]


def test_with_the_targets_logits_a_shared_guess_is_the_targets_token() -> None:
    guess = SharedRanker(Sampler(KNOWN), C)
    for seed in range(20):
        expected = Sampler(KNOWN)(logits(len(PLACES), seed), PLACES)
        found = guess(logits(len(PLACES), seed), PLACES, [guess.start()] * len(PLACES))
        assert found.token.tolist() == expected.tolist()
        assert found.token.equal(found.candidates[:, 0])
        assert found.q is None


def test_shared_guesses_do_not_depend_on_the_draft() -> None:
    guess = SharedRanker(Sampler(KNOWN), C)
    names = [guess.start() for _ in range(3)]
    found = [guess(logits(1), PLACES[1:2], [name]).token for name in names]
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


def drawn(n: int, place: Context, c: float = 1.0, fan_out: int = 2, generation: int = 0) -> tuple[list[int], Tensor]:
    """The tokens of n drafts of one place, and the q they were drawn from."""
    guess = SampledRanker(Sampler(KNOWN), C, fan_out, c, generation)
    names = [guess.start() for _ in range(n)]
    assert len(set(names)) == n
    found = guess(logits(1).repeat(n, 1), [place] * n, names)
    assert found.q is not None
    assert found.q.shape == (n, KNOWN)
    assert found.q.equal(found.q[:1].expand(n, KNOWN))
    return found.token.tolist(), found.q[0]


def test_drawn_tokens_are_samples_of_q() -> None:
    tokens, q = drawn(4000, PLACES[1])
    assert torch.allclose(q, logits(1)[0, :KNOWN].softmax(-1))
    counts = Counter(tokens)
    assert all(abs(counts[token] / 4000 - float(q[token])) < 0.04 for token in range(KNOWN))


def test_saguaro_sampling_holds_back_what_is_prepared() -> None:
    _, plain = drawn(1, PLACES[1])
    tokens, q = drawn(2000, PLACES[1], c=0.3, fan_out=3)
    assert torch.allclose(q, saguaro_probabilities(plain, F=3, C=0.3), atol=1e-6)
    best = plain.topk(3).indices.tolist()
    share = sum(token in best for token in tokens) / 2000
    assert abs(share - float(q[best].sum())) < 0.05
    assert share < float(plain[best].sum()) - 0.1


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_q_of_a_greedy_row_is_one_hot(c: float) -> None:
    tokens, q = drawn(3, PLACES[0], c)
    best = int(logits(1)[0, :KNOWN].argmax())
    assert tokens == [best] * 3
    assert q.tolist() == [float(token == best) for token in range(KNOWN)]


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_q_keeps_to_the_rows_own_rules(c: float) -> None:
    _, q = drawn(1, PLACES[4], c)
    assert q.nonzero().flatten().tolist() == sorted(logits(1)[0, :KNOWN].topk(3).indices.tolist())
    _, biased = drawn(1, PLACES[6], c)
    assert biased[6] > 0.99


def test_no_two_drafts_draw_with_the_same_noise() -> None:
    """Nor do two generations of drafts, nor two requests: then which drafts are used would tell what is in them."""
    flat = request(temperature=1)
    guess = SampledRanker(Sampler(KNOWN), C, 2, 1.0)
    later = SampledRanker(Sampler(KNOWN), C, 2, 1.0, generation=1)
    names = [guess.start() for _ in range(40)]
    others = [later.start() for _ in range(40)]
    assert not set(names) & set(others)
    same = torch.zeros(40, V)
    first = guess(same.clone(), [(flat, [])] * 40, names).token.tolist()
    assert len(set(first)) > 5
    assert first == guess(same.clone(), [(flat, [])] * 40, names).token.tolist()
    assert first != guess(same.clone(), [(flat, [])] * 40, others).token.tolist()
    assert first != guess(same.clone(), [(request(seed=9, temperature=1), [])] * 40, names).token.tolist()
    # Nor the target's, whose own sample for a place is one and the same.
    assert {int(Sampler(KNOWN)(same[:1].clone(), [(flat, [])]))} != set(first)


def test_ranking_draws_nothing() -> None:
    guess = SampledRanker(Sampler(KNOWN), C, 2, 0.5)
    found = guess(logits(2), PLACES[1:3], None)
    assert found.q is None
    assert found.candidates.equal(logits(2)[:, :KNOWN].topk(C).indices)
    assert found.token.equal(found.candidates[:, 0])
    assert torch.allclose(found.scores, logits(2)[:, :KNOWN].log_softmax(-1).topk(C).values)
