"""Calibration: exact on rounds made by hand, and what was put in comes out of synthetic ones (fixed seeds)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo.calibrate import (
    Recorded,
    acceptance_by_position,
    fit_acceptance_rate,
    fit_power_law,
    hit_curve,
    hit_table,
    outcome_frequencies,
)
from saguaro.algo.fanout import check_tables, greedy, power_law
from saguaro.algo.theory import outcome_law
from saguaro.errors import ConfigError

QUICK = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def recorded(k: list[int], rank: list[int] | None = None, K: int = 3, N: int = 4) -> Recorded:
    return Recorded(torch.tensor(k), torch.tensor(rank or [0] * len(k)), K, N)


def synthetic(a: float, r: float, K: int, N: int, n_rounds: int, seed: int) -> Recorded:
    """Rounds whose tokens are accepted at rate a and whose misses with F candidates have probability F^-r."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(n_rounds, K, generator=generator) < a
    u = 1 - torch.rand(n_rounds, generator=generator, dtype=torch.float64)  # (0, 1]
    rank = u.pow(-1 / r).clamp(max=1e6).floor().long()  # P(rank >= F) = P(u <= F^-r)
    return Recorded(coins.long().cumprod(1).sum(1), rank.where(rank < N, -1), K, N)


def log_likelihood(a: float, rounds: Recorded) -> float:
    law = outcome_law(a, rounds.K).log()
    return float(law[rounds.k].sum())


def test_acceptance_by_hand() -> None:
    rounds = recorded([3, 3, 1, 0, 2])  # 9 accepted, 3 rejected
    assert fit_acceptance_rate(rounds) == 9 / 12
    assert acceptance_by_position(rounds).tolist() == [4 / 5, 3 / 4, 2 / 3]
    assert outcome_frequencies(rounds).tolist() == [0.2, 0.2, 0.2, 0.4]


def test_acceptance_at_the_ends() -> None:
    assert fit_acceptance_rate(recorded([3, 3])) == 1
    assert fit_acceptance_rate(recorded([0, 0])) == 0
    positions = acceptance_by_position(recorded([0, 0])).tolist()
    assert positions[0] == 0
    assert all(math.isnan(x) for x in positions[1:])


@QUICK
@given(k=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_acceptance_rate_is_the_likeliest(k: list[int]) -> None:
    rounds = recorded(k)
    a = fit_acceptance_rate(rounds)
    for other in (a - 0.02, a + 0.02):
        if 0 < a < 1 and 0 < other < 1:
            assert log_likelihood(a, rounds) > log_likelihood(other, rounds)


@pytest.mark.parametrize(("a", "r"), [(0.8, 1.0), (0.5, 0.5), (0.9, 1.6)])
def test_a_and_r_are_recovered(a: float, r: float) -> None:
    """20,000 rounds: a within 0.01, P(k) within 0.015, r within 5 %, an rms below 0.05."""
    rounds = synthetic(a, r, K=5, N=12, n_rounds=20_000, seed=1)
    assert fit_acceptance_rate(rounds) == pytest.approx(a, abs=0.01)
    assert outcome_frequencies(rounds).tolist() == pytest.approx(outcome_law(a, 5).tolist(), abs=0.015)
    assert acceptance_by_position(rounds).tolist() == pytest.approx([a] * 5, abs=0.04)
    fit = fit_power_law(hit_curve(rounds.rank, rounds.N))
    assert fit.r == pytest.approx(r, rel=0.05)
    assert fit.scale == pytest.approx(1, abs=0.05)
    assert fit.rms < 0.05


@pytest.mark.parametrize(("r", "scale"), [(0.7, 1.0), (1.3, 0.5)])
def test_a_power_law_is_fitted_exactly(r: float, scale: float) -> None:
    fit = fit_power_law(power_law(r, 10, scale))
    assert (fit.r, fit.scale) == pytest.approx((r, scale), rel=1e-9)
    assert fit.rms < 1e-9


def test_the_fit_error_is_that_of_the_line() -> None:
    """Misses e^-1, e^-1, e^-3 at log F = 0, log 2, log 4: the line falls 2 in 2 steps and is off by 1/3, 2/3, 1/3."""
    misses = torch.tensor([1, math.exp(-1), math.exp(-1), 1, math.exp(-3)], dtype=torch.float64)
    h = 1 - misses
    h[3] = 1.0  # never missed at F = 3: left out
    fit = fit_power_law(h)
    assert fit.r == pytest.approx(1 / math.log(2))
    assert fit.scale == pytest.approx(math.exp(-2 / 3))
    assert fit.rms == pytest.approx(math.sqrt((1 + 4 + 1) / 9 / 3))


def test_the_hit_table_by_hand() -> None:
    rounds = recorded([0, 0, 1, 2], [0, -1, 1, 0], K=2, N=2)
    counts: list[list[float]] = [[0, 1 / 2, 1 / 2], [0, 0, 1], [0, 1, 1]]
    assert hit_table(rounds, strength=0).tolist() == counts
    # pooled (0, 1/2, 3/4); rejected: 3 rounds (0, 1/3, 2/3) and 3 imagined
    rejected = [0, (1 / 3 + 1 / 2) / 2, (2 / 3 + 3 / 4) / 2]
    smooth = hit_table(rounds, strength=3).tolist()
    assert smooth[0] == pytest.approx([(2 * c + 3 * p) / 5 for c, p in zip(counts[0], rejected, strict=True)])
    assert smooth[1] == pytest.approx([(1 * c + 3 * p) / 4 for c, p in zip(counts[1], rejected, strict=True)])
    assert smooth[2] == pytest.approx([0, (1 + 3 / 2) / 4, (1 + 9 / 4) / 4])


def test_a_k_never_seen_takes_what_is_known_of_others() -> None:
    rounds = recorded([0, 0], [0, 1], K=2, N=2)
    for strength in (0.0, 8.0):
        assert hit_table(rounds, strength).tolist() == [[0, 0.5, 1]] * 3


def test_many_rounds_outweigh_the_smoothing() -> None:
    rounds = synthetic(a=0.6, r=1.0, K=3, N=6, n_rounds=20_000, seed=2)
    assert torch.allclose(hit_table(rounds), hit_table(rounds, strength=0), atol=0.002)
    assert torch.allclose(hit_table(rounds)[1], power_law(1.0, 6), atol=0.02)


ROUNDS = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), min_size=1, max_size=30)


@QUICK
@given(pairs=ROUNDS, strength=st.sampled_from([0.0, 0.3, 8.0]))
def test_measured_tables_are_what_the_fan_out_takes(pairs: list[tuple[int, int]], strength: float) -> None:
    rounds = recorded([k for k, _ in pairs], [rank for _, rank in pairs])
    p_k, h = outcome_frequencies(rounds), hit_table(rounds, strength)
    assert h.shape == (4, 5)
    check_tables(p_k, h)
    assert sum(greedy(p_k, h, 6)) <= 6


def test_a_rank_beyond_the_candidates_is_a_miss_at_every_fan_out() -> None:
    assert hit_curve(torch.tensor([-1, -1]), N=3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("k", "rank", "K", "N", "message"),
    [
        ([], [], 3, 4, "0 rounds recorded; record at least 1"),
        ([1], [0, 0], 3, 4, "give one of each a round"),
        ([4], [0], 3, 4, "k goes from 4 to 4; it must lie from 0 to 3"),
        ([1], [4], 3, 4, "rank goes from 4 to 4; it must lie from -1 to 3"),
        ([1], [-2], 3, 4, "rank goes from -2"),
        ([1], [0], -1, 4, "K is -1"),
        ([1], [0], 3, 0, "N is 0; give a whole number, at least 1"),
    ],
)
def test_impossible_records_are_refused(k: list[int], rank: list[int], K: int, N: int, message: str) -> None:
    def int64(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    with pytest.raises(ConfigError, match=message):
        Recorded(int64(k), int64(rank), K, N)


def test_what_cannot_be_measured_says_so() -> None:
    with pytest.raises(ConfigError, match="K is 0: no token was speculated"):
        fit_acceptance_rate(recorded([0], K=0))
    with pytest.raises(ConfigError, match="misses at 1 fan-outs; 2 are needed"):
        fit_power_law(torch.tensor([0.0, 0.5, 1.0, 1.0]))
    with pytest.raises(ConfigError, match="misses do not fall with F"):
        fit_power_law(torch.tensor([0.0, 0.0, 0.0]))
    with pytest.raises(ConfigError, match=r"strength is -1\.0; give a number of rounds"):
        hit_table(recorded([0]), strength=-1.0)
