"""Fan-out lists: Theorem 12 against a numeric optimiser, Theorem 18 against exhaustive search, budgets always."""

import math
from collections.abc import Callable
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo.fanout import (
    geometric,
    geometric_shares,
    greedy,
    hit_rate,
    power_law,
    round_to_budget,
    uniform,
    unit_gains,
)
from saguaro.algo.theory import outcome_law
from saguaro.errors import ConfigError

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
RATE = st.floats(0, 1)
EXPONENT = st.floats(0.1, 4)
LOOKAHEAD = st.integers(0, 10)
BUDGET = st.integers(0, 60)


def bisect(too_low: Callable[[float], bool], low: float, high: float) -> float:
    """The point from which too_low no longer holds, in log space."""
    for _ in range(110):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return math.sqrt(low * high)


def by_multiplier(p_k: list[float], r: float, M: int) -> list[float]:
    """Maximise the sum of P(k) (1 - F_k^-r) under sum F_k = M: equal marginal gains, found by two bisections."""

    def share(p: float, multiplier: float) -> float:
        return bisect(lambda f: p * r * f ** (-r - 1) > multiplier, 1e-9, 1e9)

    def shares(multiplier: float) -> list[float]:
        return [share(p, multiplier) for p in p_k]

    return shares(bisect(lambda multiplier: sum(shares(multiplier)) > M, 1e-12, 1e12))


@pytest.mark.parametrize(
    ("a", "r", "K", "M"), [(0.8, 1.0, 7, 24), (0.5, 0.4, 4, 12), (0.93, 2.5, 6, 40), (0.3, 1, 1, 5)]
)
def test_geometric_is_the_optimum_of_the_power_law(a: float, r: float, K: int, M: int) -> None:
    assert geometric_shares(a, r, K, M) == pytest.approx(by_multiplier(outcome_law(a, K).tolist(), r, M), abs=1e-6)


@QUICK
@given(a=st.floats(0.05, 0.95), r=EXPONENT, K=st.integers(1, 7), M=st.integers(1, 60), pair=st.integers(0, 1000))
def test_moving_a_little_of_the_geometric_split_gains_nothing(a: float, r: float, K: int, M: int, pair: int) -> None:
    p_k, shares = outcome_law(a, K).tolist(), geometric_shares(a, r, K, M)
    give, take = pair % (K + 1), pair // 7 % (K + 1)
    moved = list(shares)
    moved[give] -= 0.01 * shares[give]
    moved[take] += 0.01 * shares[give]
    misses = [math.fsum(p * f**-r for p, f in zip(p_k, split, strict=True)) for split in (shares, moved)]
    assert misses[0] <= misses[1] * (1 + 1e-12)


def test_geometric_gives_the_check_value_of_the_design() -> None:
    shares = geometric_shares(a=0.8, r=1, K=7, M=24)
    assert shares == pytest.approx([3.90, 3.49, 3.12, 2.79, 2.49, 2.23, 2.00, 3.99], abs=0.005)


@QUICK
@given(a=st.floats(0.01, 0.99), r=EXPONENT, K=st.integers(1, 10), M=BUDGET)
def test_geometric_is_the_closed_form_of_theorem_12(a: float, r: float, K: int, M: int) -> None:
    x = 1 / (1 + r)
    f_0 = M / ((1 - a ** (K * x)) / (1 - a**x) + a ** (K * x) * (1 - a) ** -x)
    closed = [f_0 * a ** (k * x) for k in range(K)] + [f_0 * a ** (K * x) * (1 - a) ** -x]
    assert geometric_shares(a, r, K, M) == pytest.approx(closed, rel=1e-9)


@QUICK
@given(a=RATE, r=EXPONENT, K=LOOKAHEAD, M=BUDGET)
def test_geometric_spends_the_budget_and_stays_near_the_shares(a: float, r: float, K: int, M: int) -> None:
    fan_out, shares = geometric(a, r, K, M), geometric_shares(a, r, K, M)
    assert sum(fan_out) == M
    assert len(fan_out) == K + 1
    assert all(f >= 0 and abs(f - share) < 1 + 1e-9 for f, share in zip(fan_out, shares, strict=True))
    assert fan_out[:K] == sorted(fan_out[:K], reverse=True)


def test_geometric_at_the_ends() -> None:
    assert geometric(a=1.0, r=1, K=3, M=8) == [0, 0, 0, 8]
    assert geometric(a=0.0, r=1, K=3, M=8) == [8, 0, 0, 0]
    assert geometric(a=0.7, r=1, K=0, M=8) == [8]
    assert geometric(a=0.7, r=1, K=2, M=0) == [0, 0, 0]


def test_equal_remainders_go_to_the_smallest_k() -> None:
    assert round_to_budget([0.5, 0.5, 0.5, 0.5], 2) == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match="that sum to M = 3"):
        round_to_budget([1.0, 1.0], 3)


@QUICK
@given(K=LOOKAHEAD, M=BUDGET)
def test_uniform_spends_the_budget_evenly(K: int, M: int) -> None:
    fan_out = uniform(K, M)
    assert sum(fan_out) == M
    assert len(fan_out) == K + 1
    assert max(fan_out) - min(fan_out) <= 1
    assert fan_out == sorted(fan_out, reverse=True)


@st.composite
def tables(draw: st.DrawFn, concave: bool) -> tuple[Tensor, Tensor]:
    """A law of outcomes and a hit table, K <= 3, N <= 5; whole weights, so that ties and flat ends are common."""
    n_rows, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    weights = draw(st.lists(st.integers(0, 6), min_size=n_rows, max_size=n_rows).filter(any))
    rows = []
    for _ in range(n_rows):
        gains = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
        gains = sorted(gains, reverse=True) if concave else gains
        rows.append([sum(gains[:f]) / 64 for f in range(n + 1)])
    return torch.tensor(weights, dtype=torch.float64) / sum(weights), torch.tensor(rows, dtype=torch.float64)


def best_by_search(p_k: Tensor, h: Tensor, M: int) -> float:
    splits = product(range(h.shape[1]), repeat=len(p_k))
    return max(hit_rate(split, p_k, h) for split in splits if sum(split) <= M)


@QUICK
@given(table=tables(concave=True), M=st.integers(0, 9))
def test_greedy_is_optimal_on_concave_tables(table: tuple[Tensor, Tensor], M: int) -> None:
    p_k, h = table
    fan_out = greedy(p_k, h, M)
    assert sum(fan_out) <= M
    assert hit_rate(fan_out, p_k, h) == pytest.approx(best_by_search(p_k, h, M), abs=1e-12)


@QUICK
@given(table=tables(concave=False), M=st.integers(0, 9))
def test_greedy_is_optimal_on_the_envelopes_of_any_table(table: tuple[Tensor, Tensor], M: int) -> None:
    p_k, h = table
    curves = [[0.0, *accumulate(unit_gains(row))] for row in h.tolist()]
    envelope = torch.tensor(curves, dtype=torch.float64).clamp(max=1)
    fan_out = greedy(p_k, h, M)
    assert sum(fan_out) <= M
    assert hit_rate(fan_out, p_k, envelope) == pytest.approx(best_by_search(p_k, envelope, M), abs=1e-12)
    inside = [float(envelope[k, f] - h[k, f]) > 1e-9 for k, f in enumerate(fan_out)]
    assert sum(inside) <= 1  # only the last piece may be cut by the end of the budget
    if not any(inside):
        assert hit_rate(fan_out, p_k, h) == pytest.approx(best_by_search(p_k, h, M), abs=1e-9)


@QUICK
@given(table=tables(concave=False))
def test_unit_gains_are_the_least_concave_curve_above(table: tuple[Tensor, Tensor]) -> None:
    for row in table[1].tolist():
        gains = unit_gains(row)
        curve = [math.fsum(gains[:f]) for f in range(len(row))]
        assert gains == sorted(gains, reverse=True)
        assert all(c >= value - 1e-12 for c, value in zip(curve, row, strict=True))
        for f in range(len(row)):  # nowhere above the highest chord
            chords = [row[f]] + [
                row[i] + (row[j] - row[i]) * (f - i) / (j - i) for i in range(f) for j in range(f + 1, len(row))
            ]
            assert curve[f] == pytest.approx(max(chords), abs=1e-12)


def test_greedy_leaves_what_gains_nothing() -> None:
    h = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    assert greedy(torch.tensor([1.0, 0.0]), h, M=4) == [1, 0]


def test_greedy_of_equal_gains_takes_the_smallest_k() -> None:
    h = torch.tensor([[0.0, 0.25, 0.5]]).repeat(2, 1)
    assert greedy(torch.tensor([0.5, 0.5]), h, M=2) == [2, 0]


@pytest.mark.parametrize("scale", [0.4, 0.6])
def test_greedy_on_a_concave_power_law_is_no_worse_than_any_other_split(scale: float) -> None:
    for a, r, M in product((0.5, 0.8, 0.95), (0.5, 1.0, 2.0), (6, 12, 24)):
        p_k, h = outcome_law(a, 5), power_law(r, M, scale).repeat(6, 1)
        best = hit_rate(greedy(p_k, h, M), p_k, h)
        assert best >= hit_rate(geometric(a, r, 5, M), p_k, h) - 1e-12
        assert best >= hit_rate(uniform(5, M), p_k, h) - 1e-12


def test_hit_rate_is_definition_11() -> None:
    a, r, fan_out = 0.6, 1.5, [4, 2, 3]
    by_hand = sum(a**k * (1 - a) * (1 - fan_out[k] ** -r) for k in range(2)) + a**2 * (1 - fan_out[2] ** -r)
    assert hit_rate(fan_out, outcome_law(a, 2), power_law(r, 4).repeat(3, 1)) == pytest.approx(by_hand, rel=1e-12)


def test_the_papers_power_law_needs_two_candidates() -> None:
    h = power_law(1.0, 3)
    assert h.tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3])
    assert unit_gains(h.tolist()) == pytest.approx([1 / 4, 1 / 4, 1 / 6])


@pytest.mark.parametrize("r", [0.3, 1.0, 3.0])
def test_a_power_law_is_concave_up_to_the_stated_scale(r: float) -> None:
    limit = 1 / (2 - 2**-r)
    for scale, concave in ((limit - 1e-6, True), (limit + 1e-6, False)):
        gains = power_law(r, 8, scale).diff()
        assert bool((gains.diff() <= 0).all()) is concave


def test_errors_name_the_value_and_the_limit() -> None:
    p_k, h = torch.tensor([0.5, 0.5]), torch.tensor([[0.0, 0.5], [0.0, 0.5]])
    with pytest.raises(ConfigError, match=r"r is -1\.0; give a finite exponent above 0"):
        geometric(0.5, -1.0, 2, 3)
    with pytest.raises(ConfigError, match="M is -3; give a whole number"):
        uniform(2, -3)
    with pytest.raises(ConfigError, match=r"fan-out \[2, 0\] does not fit; give K \+ 1 = 2 numbers from 0 to 1"):
        hit_rate([2, 0], p_k, h)
    with pytest.raises(ConfigError, match=r"p_k is \(2,\) and h \(1, 2\)"):
        greedy(p_k, h[:1], 2)
    with pytest.raises(ConfigError, match="give probabilities that sum to 1"):
        greedy(2 * p_k, h, 2)
    with pytest.raises(ConfigError, match="does not start at 0 or falls"):
        greedy(p_k, h.flip(1), 2)
