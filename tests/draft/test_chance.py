"""The probabilities of a node's candidates, learnt from outcomes."""

import math

import pytest
import torch
from torch import Tensor

from saguaro.draft.chance import LEAST, MOST, Chances

CPU = torch.device("cpu")
SCORES = torch.tensor([[[2.0, 1.0, 0.0, -3.0]]])  # [B=1, n=1, W=4]
NOISY, GREEDY = torch.tensor([[False]]), torch.tensor([[True]])


def learn(chances: Chances, is_greedy: Tensor, rates: list[float], n: int, scores: Tensor = SCORES) -> None:
    """Outcomes at these rates, the rest none of the candidates; as many of each in every stretch of twenty."""
    chosen = [rank for rank, rate in enumerate(rates) for _ in range(round(20 * rate))]
    chosen += [-1] * (20 - len(chosen))
    _, bins = chances(scores, is_greedy)
    for at in range(n):
        chances.learn(bins, torch.tensor([[chosen[at * 7 % 20]]]), torch.ones_like(bins, dtype=torch.bool))


@pytest.mark.parametrize("is_greedy", [NOISY, GREEDY])
def test_rates_become_what_is_true(is_greedy: Tensor) -> None:
    """Whatever the draft's own share says: it is too sure of the second, and not sure enough of the third."""
    chances, rates = Chances(4, CPU), [0.5, 0.05, 0.3, 0.0]
    learn(chances, is_greedy, rates, 4000)
    found, _ = chances(SCORES, is_greedy)
    assert found.exp().flatten().tolist() == pytest.approx(rates, abs=0.03)


def test_at_first_a_share_is_taken_as_it_is() -> None:
    """Up to the width of a bin of log-odds."""
    found, _ = Chances(4, CPU)(SCORES, NOISY)
    share = SCORES.softmax(-1)
    assert (found.exp().logit() - share.logit()).abs().max() < 0.6
    assert found.diff().le(0).all()


def test_greedy_and_noisy_rows_do_not_mix() -> None:
    chances = Chances(4, CPU)
    before, bins = chances(SCORES, GREEDY)
    learn(chances, NOISY, [0.0, 1.0, 0.0, 0.0], 500)
    after, _ = chances(SCORES, GREEDY)
    assert after.equal(before)
    noisy, noisy_bins = chances(SCORES, NOISY)
    assert noisy[0, 0, 1] > noisy[0, 0, 0]
    assert not set(bins.flatten().tolist()) & set(noisy_bins.flatten().tolist())
    both, _ = chances(SCORES.expand(2, 1, 4), torch.tensor([[True], [False]]))
    assert both[0].equal(after[0])
    assert both[1].equal(noisy[0])


def test_a_candidate_that_is_none_stays_none() -> None:
    scores = torch.tensor([[[1.0, 0.5, -math.inf, -math.inf]]])
    chances = Chances(4, CPU)
    learn(chances, NOISY, [0.5, 0.5, 0.0, 0.0], 100, scores)
    found, _ = chances(scores, NOISY)
    assert found[0, 0, 2:].eq(-math.inf).all()
    assert found[0, 0, :2].isfinite().all()


@pytest.mark.parametrize("width", [1, 4])
def test_an_only_candidate(width: int) -> None:
    """Its share is 1; it is likely, never certain, and what is learnt of it counts."""
    scores = torch.full((1, 1, width), -math.inf)
    scores[..., 0] = 3.0
    chances = Chances(width, CPU)
    found, bins = chances(scores, NOISY)
    assert 0.99 < float(found[0, 0, 0].exp()) <= MOST + 1e-6
    assert int(bins.max()) < len(chances._rate)
    learn(chances, NOISY, [0.5], 2000, scores)
    assert float(chances(scores, NOISY)[0][0, 0, 0].exp()) == pytest.approx(0.5, abs=0.03)


def test_no_candidate_at_all_does_not_spoil_the_rest() -> None:
    """As of a row of padding: its scores may be anything, and nothing is learnt from it."""
    chances = Chances(4, CPU)
    scores = torch.cat((SCORES, torch.full_like(SCORES, math.nan), torch.full_like(SCORES, -math.inf)))
    found, bins = chances(scores, torch.tensor([[False], [False], [False]]))
    assert found[0].isfinite().all()
    assert found[1:].eq(-math.inf).all()
    rates = chances._rate.clone()
    chances.learn(bins, torch.zeros(3, 1).long(), torch.zeros_like(bins, dtype=torch.bool))
    assert torch.allclose(chances._rate, rates, rtol=1e-6)


def test_a_rate_stays_within_bounds() -> None:
    chances = Chances(4, CPU)
    learn(chances, NOISY, [1.0, 0.0, 0.0, 0.0], 3000)
    found = chances(SCORES, NOISY)[0].exp()
    assert float(found.max()) <= MOST + 1e-6
    assert float(found.min()) >= LEAST * 0.99
