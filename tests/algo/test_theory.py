"""The theorems as functions: against brute force, against each other, and at their edges."""

import math
import random
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo.theory import (
    acceptance_rate,
    critical_batch_size,
    expected_tokens,
    outcome_law,
    rejection_hit_rate,
    residual_hit_rate,
    residual_law,
    saguaro_probabilities,
    sd_speedup,
    ssd_over_sd,
    ssd_over_sd_bounds,
    ssd_speedup,
    unconditional_hit_rate,
)
from saguaro.errors import ConfigError

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
RATE = st.floats(0, 1)
INNER_RATE = st.floats(0.01, 0.99)
TOKENS = st.floats(1, 10)
TIME = st.floats(0, 3)
LAW = st.lists(st.integers(1, 20), min_size=5, max_size=5).map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))

P = torch.tensor([0.4, 0.4, 0.1, 0.1], dtype=torch.float64)
Q = torch.tensor([0.41, 0.41, 0.09, 0.09], dtype=torch.float64)


@QUICK
@given(p=LAW, q=LAW)
def test_acceptance_is_the_chance_that_a_drafted_token_stands(p: Tensor, q: Tensor) -> None:
    by_hand = sum(float(q[v]) * min(1.0, float(p[v] / q[v])) for v in range(5))
    assert float(acceptance_rate(p, q)) == pytest.approx(by_hand, abs=1e-12)
    assert acceptance_rate(torch.stack([p, q]), torch.stack([q, q])).tolist() == pytest.approx([by_hand, 1], abs=1e-12)


@QUICK
@given(a=RATE, K=st.integers(0, 12))
def test_expected_tokens_are_those_of_the_outcome_law(a: float, K: int) -> None:
    law = outcome_law(a, K)
    assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    mean = sum(float(p) * (k + 1) for k, p in enumerate(law))
    assert expected_tokens(a, K) == pytest.approx(mean, abs=1e-9)
    if a < 0.999:
        assert expected_tokens(a, K) == pytest.approx((1 - a ** (K + 1)) / (1 - a), rel=1e-9)


def test_expected_tokens_at_the_ends() -> None:
    assert [expected_tokens(a, 4) for a in (0.0, 1.0)] == [1, 5]


def test_theorem_7_by_hand() -> None:
    # a draft longer than a verification: a hit costs T_p, not 1
    assert ssd_speedup(0.5, 4.0, 2.0, T_p=2.0, T_b=1.0) == 3 / (0.5 * 2 + 0.5 * 2)
    assert ssd_speedup(1.0, 4.0, 2.0, T_p=0.1, T_b=9.0) == 4
    assert ssd_speedup(0.0, 4.0, 2.0, T_p=0.1, T_b=1.0) == sd_speedup(2.0, 1.0)


def test_speedup_is_what_a_simulated_chain_shows() -> None:
    """Theorem 7 with Equation 1, against rounds played one after the other."""
    rng = random.Random(0)
    hit, tokens, time, hits, n = False, 0.0, 0.0, 0, 200_000
    for _ in range(n):
        hit = rng.random() < (0.8 if hit else 0.3)
        hits += hit
        tokens += 4.0 if hit else 1.5
        time += 1.0 if hit else 1.4
    p_h = unconditional_hit_rate(0.8, 0.3)
    assert p_h == pytest.approx(hits / n, abs=0.01)
    assert ssd_speedup(p_h, 4.0, 1.5, T_p=0.9, T_b=0.4) == pytest.approx(tokens / time, rel=0.01)


@QUICK
@given(p_hit_p=RATE, p_hit_b=RATE)
def test_the_unconditional_hit_rate_is_a_fixed_point_between_the_two(p_hit_p: float, p_hit_b: float) -> None:
    p_h = unconditional_hit_rate(p_hit_p, p_hit_b)
    assert p_h == pytest.approx(p_h * p_hit_p + (1 - p_h) * p_hit_b, abs=1e-12)
    assert 0 <= p_h <= 1


def test_the_unconditional_hit_rate_at_the_corners() -> None:
    assert [unconditional_hit_rate(p, b) for p, b in product((0, 1), (0, 1))] == [0, 0.5, 0, 1]


@QUICK
@given(p_h=RATE, E=TOKENS, T=TIME)
def test_corollary_8_is_theorem_7_over_sd_and_never_below_1(p_h: float, E: float, T: float) -> None:
    ratio = ssd_over_sd(p_h, T)
    assert ratio == pytest.approx(ssd_speedup(p_h, E, E, T_p=T, T_b=T) / sd_speedup(E, T), rel=1e-12)
    assert ratio >= 1
    if p_h > 1e-6 and T > 1e-6:
        assert ratio > 1


@QUICK
@given(p_h=RATE, E_hit=TOKENS, E_miss=TOKENS, E_sd=TOKENS, T_sd=TIME, T_p=RATE)
def test_corollary_9_holds_theorem_7(
    p_h: float, E_hit: float, E_miss: float, E_sd: float, T_sd: float, T_p: float
) -> None:
    E_hit, E_miss = max(E_hit, E_miss), min(E_hit, E_miss)
    ratio = ssd_speedup(p_h, E_hit, E_miss, T_p, T_b=0.0) / sd_speedup(E_sd, T_sd)
    lower, upper = ssd_over_sd_bounds(p_h, E_hit, E_sd, T_sd)
    assert lower - 1e-9 <= ratio <= upper + 1e-9
    assert ssd_over_sd_bounds(1.0, E_hit, E_sd, T_sd) == (upper, upper)


def test_corollary_16_by_counting_every_batch() -> None:
    """Time of a batch of 3 over all 8 patterns of hits."""
    p_h, T_p, T_b = 0.7, 1.2, 0.6
    time = tokens = 0.0
    for pattern in product((True, False), repeat=3):
        chance = math.prod(p_h if hit else 1 - p_h for hit in pattern)
        time += chance * (T_p if all(pattern) else 1 + T_b)
        tokens += chance * sum(4.0 if hit else 2.0 for hit in pattern) / 3
    assert ssd_speedup(p_h, 4.0, 2.0, T_p, T_b, b=3) == pytest.approx(tokens / time, rel=1e-12)


def slow_and_fast(p_hit_p: float, p_hit_b: float, E_p: float, E_b: float, T: float, b: float) -> tuple[float, float]:
    """Corollary 16 with the primary drafting its own misses (always a primary before), and with the free backup."""
    p_h = unconditional_hit_rate(p_hit_p, p_hit_b)
    return ssd_speedup(p_hit_p, E_p, E_p, 1.0, T, b), ssd_speedup(p_h, E_p, E_b, 1.0, 0.0, b)


@QUICK
@given(p_hit_p=RATE, p_hit_b=RATE, E_p=TOKENS, E_b=TOKENS, T=TIME)
def test_theorem_17_names_the_better_fallback(p_hit_p: float, p_hit_b: float, E_p: float, E_b: float, T: float) -> None:
    critical = critical_batch_size(p_hit_p, p_hit_b, E_p, E_b, T)
    assert critical >= 0
    for b in (1, 2, 3, 5, 8, 16, 64):
        slow, fast = slow_and_fast(p_hit_p, p_hit_b, E_p, E_b, T, b)
        if b < critical:
            assert slow >= fast * (1 - 1e-9)
        elif b > critical:
            assert fast >= slow * (1 - 1e-9)


@QUICK
@given(p_hit_p=INNER_RATE, p_hit_b=INNER_RATE, E_p=TOKENS, E_b=TOKENS, T=st.floats(0.1, 3))
def test_at_the_critical_batch_size_both_are_as_fast(
    p_hit_p: float, p_hit_b: float, E_p: float, E_b: float, T: float
) -> None:
    critical = critical_batch_size(p_hit_p, p_hit_b, E_p, E_b, T)
    if 1e-6 < critical < math.inf:
        slow, fast = slow_and_fast(p_hit_p, p_hit_b, E_p, E_b, T, critical)
        assert slow == pytest.approx(fast, rel=1e-9)


@pytest.mark.parametrize(
    ("p_hit_p", "p_hit_b", "E_p", "E_b", "T", "critical"),
    [
        (0.5, 0.5, 3.0, 1.0, 1.0, 1.0),
        (0.5, 0.5, 3.0, 1.0, 0.5, math.inf),  # the argument is exactly 0
        (0.5, 0.5, 3.0, 1.0, 0.4, math.inf),  # below 0
        (0.5, 0.5, 2.0, 2.0, 1.0, 0.0),  # 1: the backup drafts as well, and free
        (0.5, 0.5, 1.0, 2.0, 1.0, 0.0),  # above 1
        (0.0, 0.5, 2.0, 1.0, 3.0, 0.0),  # after a primary every round misses
        (0.5, 0.5, 3.0, 1.0, 0.0, math.inf),  # drafting just in time is free
        (0.5, 0.5, 1.0, 3.0, 0.0, 0.0),
        (1.0, 0.0, 3.0, 1.0, 1.0, math.inf),  # no primary round ever misses
    ],
)
def test_theorem_17_case_by_case(
    p_hit_p: float, p_hit_b: float, E_p: float, E_b: float, T: float, critical: float
) -> None:
    assert critical_batch_size(p_hit_p, p_hit_b, E_p, E_b, T) == critical


def test_the_construction_of_theorem_19() -> None:
    drafted = saguaro_probabilities(Q, F=2, C=0.7783)
    assert drafted.tolist() == pytest.approx([0.39, 0.39, 0.11, 0.11], abs=1e-4)
    assert float(acceptance_rate(P, Q)) == pytest.approx(0.98)
    assert float(acceptance_rate(P, drafted)) == pytest.approx(0.98, abs=1e-4)
    assert rejection_hit_rate(P, Q, F=2, C=1.0) == pytest.approx(0.5)
    assert rejection_hit_rate(P, Q, F=2, C=0.7783) == pytest.approx(1.0)


@QUICK
@given(p=LAW, q=LAW, F=st.integers(0, 5))
def test_theorem_15_the_hit_rate_never_rises_with_c(p: Tensor, q: Tensor, F: int) -> None:
    rates = [residual_hit_rate(p, q, F, C / 12) for C in range(1, 13)]
    assert all(low >= high - 1e-9 for low, high in pairwise(rates))


@QUICK
@given(p=LAW, q=LAW, F=st.integers(0, 5), C=st.floats(0.05, 1))
def test_rejection_hit_rate_is_the_sum_over_every_rejected_token(p: Tensor, q: Tensor, F: int, C: float) -> None:
    drafted = saguaro_probabilities(q, F, C)
    law, rejection = residual_law(p, drafted), 1 - float(acceptance_rate(p, drafted))
    if rejection < 1e-6:  # a difference of numbers that are nearly 1: nothing is left to divide by
        return
    order = sorted(range(5), key=lambda v: (-float(q[v]), v))
    total = 0.0
    for token in range(5):
        prepared = [v for v in order if v != token][:F]
        chance = max(0.0, float(drafted[token] - p[token])) / rejection
        total += chance * sum(float(law[v]) for v in prepared)
    assert rejection_hit_rate(p, q, F, C) == pytest.approx(total, abs=1e-9)


def test_leaving_out_the_rejected_token_breaks_theorem_15() -> None:
    """Suppressing the top token moves rejections elsewhere, and then token 2, the likely bonus, is not prepared."""
    p = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert residual_hit_rate(p, q, F=1, C=0.1) > residual_hit_rate(p, q, F=1, C=1.0)
    assert rejection_hit_rate(p, q, F=1, C=0.1) == pytest.approx(0.053, abs=1e-3)
    assert rejection_hit_rate(p, q, F=1, C=1.0) == pytest.approx(0.593, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_missed_where_nothing_is_rejected(dtype: torch.dtype) -> None:
    p = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=dtype)
    nearly = p * 3 / 3  # the same but for rounding
    assert residual_law(p, nearly).tolist() == [0, 0, 0, 0]
    assert residual_hit_rate(p, nearly, F=2, C=1.0) == rejection_hit_rate(p, nearly, F=2, C=1.0) == 1


def test_c_of_zero_drafts_only_outside_the_top() -> None:
    assert saguaro_probabilities(Q, F=2, C=0.0).tolist() == pytest.approx([0, 0, 0.5, 0.5])
    with pytest.raises(ConfigError, match="take C > 0 or a smaller F"):
        saguaro_probabilities(Q, F=4, C=0.0)


def test_errors_name_the_value_and_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"a is 1\.5; give a probability, from 0 to 1"):
        expected_tokens(1.5, 3)
    with pytest.raises(ConfigError, match="p_h is nan"):
        ssd_over_sd(math.nan, 1.0)
    with pytest.raises(ConfigError, match="K is -1; give a whole number, at least 0"):
        outcome_law(0.5, -1)
    with pytest.raises(ConfigError, match=r"T is -1\.0; give a time"):
        sd_speedup(2.0, -1.0)
    with pytest.raises(ConfigError, match=r"E_miss is 0\.5; give expected tokens"):
        ssd_speedup(0.5, 2.0, 0.5, 1.0, 0.0)
    with pytest.raises(ConfigError, match="b is 0; a batch has at least 1 row"):
        ssd_speedup(0.5, 2.0, 1.0, 1.0, 0.0, b=0)
    with pytest.raises(ConfigError, match=r"p is \(4,\) and q \(2,\)"):
        acceptance_rate(P, Q[:2])
