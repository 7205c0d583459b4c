"""The best tokens by noisy score, of cpu.c against saguaro.algo.sampling in torch."""

import math

import pytest
import torch
from torch import Tensor

from saguaro.algo.sampling import Rules, choose
from saguaro.algo.sampling import rank as rank_by_torch
from saguaro.kernels.best import rank, ranker_for

SEEDS = torch.tensor([0, 7, 2**53 - 1, 2**63 - 1, 12345, 1])
POSITIONS = torch.tensor([1, 9, 4095, 131071, 5, 0])


def draw(n_rows: int, n_vocab: int, spread: float = 6.0) -> Tensor:
    return torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(n_vocab)) * spread


def rules(temperature: Tensor) -> Rules:
    n = len(temperature)
    return Rules(temperature, torch.zeros(n).long(), torch.ones(n), torch.zeros(n), SEEDS[:n], POSITIONS[:n])


@pytest.mark.parametrize("n_vocab", [5, 31, 288, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("n", [1, 5])
def test_it_is_torchs(n_vocab: int, temperature: float, n: int) -> None:
    logits, each = draw(6, n_vocab), rules(torch.full((6,), temperature))
    tokens, scores = rank(logits, each.temperature, SEEDS, POSITIONS, n_vocab, n)
    expected, theirs = rank_by_torch(logits, each, n, width=n_vocab)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(scores, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens[:, 0], choose(logits, each))


def test_flat_laws_need_the_noise_of_every_token() -> None:
    logits, each = torch.zeros(6, 4096), rules(torch.ones(6))
    tokens, _ = rank(logits, each.temperature, SEEDS, POSITIONS, 4096, 9)
    assert torch.equal(tokens, rank_by_torch(logits, each, 9, width=4096)[0])


def test_greedy_and_warm_rows_together_and_of_ties_the_lowest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 2)
    tokens, scores = rank(logits, torch.tensor([0.0, 1e-30]), SEEDS[:2], POSITIONS[:2], 4, 4)
    assert tokens[0].tolist() == [1, 2, 3, 0]
    assert scores[0].tolist() == [0.0, 0.0, -1.0, -2.0]
    assert set(tokens[1, :2].tolist()) == {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_cannot_be_said_come_last(temperature: float) -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, [30, 1]] = torch.tensor([5.0, -90.0])
    tokens, scores = rank(logits, torch.tensor([temperature]), SEEDS[:1], POSITIONS[:1], 40, 5)
    assert tokens.tolist() == [[30, 1, 0, 2, 3]]
    assert scores[0, 2:].tolist() == [-math.inf] * 3


def test_padding_of_the_vocabulary_is_never_looked_at() -> None:
    wide = draw(3, 64)
    wide[:, 50:] = math.nan
    each = rules(torch.tensor([0.0, 1.0, 0.5]))
    tokens, _ = rank(wide, each.temperature, SEEDS[:3], POSITIONS[:3], 50, 3)
    assert torch.equal(tokens, rank_by_torch(wide[:, :50].clone(), each, 3)[0])


def test_rows_do_not_see_one_another() -> None:
    logits, each = draw(6, 999), rules(torch.tensor([0.0, 1.0, 0.7, 1.0, 0.0, 2.0]))
    together = rank(logits, each.temperature, SEEDS, POSITIONS, 999, 4)
    for row in range(6):
        one = slice(row, row + 1)
        alone = rank(logits[one], each.temperature[one], SEEDS[one], POSITIONS[one], 999, 4)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_only_on_a_cpu() -> None:
    assert ranker_for(torch.device("cuda")) is None
    assert ranker_for(torch.device("cpu")) is rank


@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 287])
def test_a_row_whose_logits_are_not_finite_has_no_scores(odd: float, at: int) -> None:
    """That row alone; and what lies beyond the known tokens does not matter."""
    logits, each = draw(6, 300), rules(torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 0.0]))
    logits[:, 288:] = math.nan
    expected, scores = rank(logits, each.temperature, SEEDS, POSITIONS, 288, 3)
    assert not scores.isnan().any()
    logits[[1, 3], at] = odd
    tokens, scores = rank(logits, each.temperature, SEEDS, POSITIONS, 288, 3)
    assert scores.isnan().all(1).tolist() == [False, True, False, True, False, False]
    good = [0, 2, 4, 5]
    assert torch.equal(tokens[good], expected[good])
    assert (tokens >= 0).all()
    assert (tokens < 288).all()
