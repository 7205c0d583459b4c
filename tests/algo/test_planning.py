"""Plans: what is planned is possible, distinct and the best there is; chances are exact."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo.planning import (
    NEVER,
    Ahead,
    Planned,
    alternatives,
    by_chance,
    by_fan_out,
    leads,
    outcome_chance,
    ranks,
    trust,
)

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
V = 9  # a vocabulary so small that the token in flight is often a candidate


@st.composite
def aheads(draw: st.DrawFn, least: int = 0) -> Ahead:
    """Any speculations in flight: ties, missing candidates, tokens that are no candidate, every length."""
    B, K, C = draw(st.integers(least, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    length = torch.randint(0, K + 1, (B,), generator=g)
    tokens = torch.randint(0, V, (B, K), generator=g).masked_fill(torch.arange(K) >= length[:, None], 0)
    candidates = torch.rand(B, K + 1, V, generator=g).argsort(-1)[..., :C]
    scores = torch.randint(-9, 9, (B, K + 1, C), generator=g).to(dtype) / 2
    n_real = torch.randint(0, C + 1, (B, K + 1, 1), generator=g)
    scores = scores.sort(-1, descending=True).values.masked_fill(torch.arange(C) >= n_real, NEVER)
    is_primary = torch.rand(B, generator=g) < 0.5
    return Ahead(torch.randperm(20, generator=g)[:B], tokens, length, candidates, scores, is_primary)


def possible(ahead: Ahead, b: int) -> dict[tuple[int, int], float]:
    """Every outcome that may be prepared for a row, with its score, one by one."""
    length = int(ahead.length[b])
    found = {}
    for k in range(length + 1):
        for token, score in zip(ahead.candidates[b, k].tolist(), ahead.scores[b, k].tolist(), strict=True):
            if score > NEVER and not (k < length and token == int(ahead.tokens[b, k])):
                found[k, token] = score
    return found


def outcomes(planned: Planned, b: int) -> list[tuple[int, int]]:
    """What is planned for a row; checks that places are filled from the front and that the rest is blank."""
    pairs = list(zip(planned.k[b].tolist(), planned.token[b].tolist(), strict=True))
    n = sum(k >= 0 for k, _ in pairs)
    assert all(k >= 0 for k, _ in pairs[:n])
    assert all(pair == (-1, 0) for pair in pairs[n:])
    return pairs[:n]


def in_flight(tokens: list[int], candidates: list[list[int]], scores: list[list[float]]) -> Ahead:
    """One row."""
    return Ahead(
        torch.tensor([0]),
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([len(tokens)]),
        torch.tensor([candidates]),
        torch.tensor([scores]),
        torch.tensor([True]),
    )


@QUICK
@given(ahead=aheads())
def test_alternatives_are_the_possible_outcomes(ahead: Ahead) -> None:
    scores = alternatives(ahead)
    assert scores.dtype == ahead.scores.dtype
    for b in range(len(ahead.slots)):
        left = {
            (k, int(ahead.candidates[b, k, c])): float(scores[b, k, c])
            for k, c in itertools.product(range(scores.shape[1]), range(scores.shape[2]))
            if scores[b, k, c] > NEVER
        }
        assert left == possible(ahead, b)


@QUICK
@given(ahead=aheads(), M=st.integers(0, 40), seed=st.integers(0, 99))
def test_by_chance_takes_the_largest(ahead: Ahead, M: int, seed: int) -> None:
    chance = torch.rand(ahead.scores.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    planned = by_chance(ahead, chance, M)
    assert planned.slots.equal(ahead.slots)
    assert planned.k.shape == planned.token.shape == (len(ahead.slots), M)
    for b in range(len(ahead.slots)):
        of = {
            (k, token): float(chance[b, k, ahead.candidates[b, k].tolist().index(token)])
            for k, token in possible(ahead, b)
        }
        assert outcomes(planned, b) == sorted(of, key=lambda pair: -of[pair])[:M]


@QUICK
@given(ahead=aheads(), M=st.integers(0, 40), most=st.integers(0, 8), seed=st.integers(0, 99))
def test_by_fan_out_takes_the_first_of_each_k(ahead: Ahead, M: int, most: int, seed: int) -> None:
    shape = ahead.scores.shape[:2]
    fan_out = torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed))
    planned = by_fan_out(ahead, fan_out, M)
    assert planned.k.shape == planned.token.shape == (len(ahead.slots), M)
    for b in range(len(ahead.slots)):
        at = [[token for k_, token in possible(ahead, b) if k_ == k] for k in range(shape[1])]
        wanted = [(j, k, token) for k, left in enumerate(at) for j, token in enumerate(left) if j < fan_out[b, k]]
        assert outcomes(planned, b) == [(k, token) for _, k, token in sorted(wanted)[:M]]


@QUICK
@given(ahead=aheads(), M=st.integers(0, 40))
def test_a_plan_has_only_possible_outcomes_and_each_once(ahead: Ahead, M: int) -> None:
    everything = torch.full(ahead.scores.shape[:2], 99)
    for planned in (by_chance(ahead, torch.ones_like(ahead.scores), M), by_fan_out(ahead, everything, M)):
        for b in range(len(ahead.slots)):
            found = outcomes(planned, b)
            assert len(set(found)) == len(found) == min(M, len(possible(ahead, b)))
            assert set(found) <= set(possible(ahead, b))


def test_what_has_no_chance_is_left_out() -> None:
    ahead = in_flight([7], [[7, 8], [5, 6]], [[2.0, 1.0], [2.0, 1.0]])
    planned = by_chance(ahead, torch.tensor([[[1.0, 0.0], [0.0, 0.5]]]), 3)
    assert outcomes(planned, 0) == [(1, 6)]


def test_the_token_in_flight_may_be_the_bonus_after_it() -> None:
    """Only where it stands is it impossible: the padding after a short speculation excludes nothing."""
    ahead = replace(in_flight([7, 0], [[7, 0], [7, 0], [7, 0]], [[2.0, 1.0]] * 3), length=torch.tensor([1]))
    planned = by_fan_out(ahead, torch.full((1, 3), 2), 6)
    assert outcomes(planned, 0) == [(0, 0), (1, 7), (1, 0)]


@QUICK
@given(ahead=aheads())
def test_trust_is_the_lead_over_the_best_other_candidate(ahead: Ahead) -> None:
    found = trust(ahead)
    assert found.dtype == ahead.scores.dtype
    assert found.shape == ahead.tokens.shape
    for b, i in itertools.product(range(found.shape[0]), range(found.shape[1])):
        score = {
            token: s
            for token, s in zip(ahead.candidates[b, i].tolist(), ahead.scores[b, i].tolist(), strict=True)
            if s > NEVER
        }
        own = score.pop(int(ahead.tokens[b, i]), None)
        if i >= int(ahead.length[b]):
            expected = 0.0
        elif own is None:
            expected = min(score.values(), default=0.0) - max(score.values(), default=0.0) - 1
        else:
            expected = own - max(score.values(), default=NEVER)
        assert float(found[b, i]) == expected


@QUICK
@given(ahead=aheads())
def test_leads_and_ranks_one_by_one(ahead: Ahead) -> None:
    scores = alternatives(ahead)
    for of, lead, rank in zip(
        scores.flatten(0, 1), leads(scores).flatten(0, 1), ranks(scores).flatten(0, 1), strict=True
    ):
        left = [c for c, score in enumerate(of.tolist()) if score > NEVER]
        for c, score in enumerate(of.tolist()):
            assert int(rank[c]) == (left.index(c) if c in left else len(of))
            others = [float(of[o]) for o in left if o != c]
            expected = score - max(others, default=NEVER) if c in left else NEVER
            assert float(lead[c]) == expected


def test_outcome_chance_of_every_path() -> None:
    """Each accept / reject path and bonus of a small tree, by hand."""
    accept = torch.tensor([[0.9, 0.6, 0.3]], dtype=torch.float64)
    bonus = torch.rand(1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bonus /= bonus.sum(-1, keepdim=True)
    for length in range(4):
        expected = torch.zeros(4, 3, dtype=torch.float64)
        for coins in itertools.product([True, False], repeat=length):
            chance = math.prod(float(a) if coin else 1 - float(a) for a, coin in zip(accept[0], coins, strict=False))
            k = (*coins, False).index(False)
            expected[k] += chance * bonus[0, k]
        found = outcome_chance(accept, bonus, torch.tensor([length]))[0]
        assert torch.allclose(found, expected, atol=1e-14, rtol=0)


@QUICK
@given(B=st.integers(0, 3), K=st.integers(0, 6), C=st.integers(1, 5), seed=st.integers(0, 99))
def test_outcome_chances_sum_to_one(B: int, K: int, C: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    accept = torch.rand(B, K, generator=g, dtype=torch.float64)
    bonus = torch.rand(B, K + 1, C, generator=g, dtype=torch.float64)
    length = torch.randint(0, K + 1, (B,), generator=g)
    chance = outcome_chance(accept, bonus / bonus.sum(-1, keepdim=True), length)
    assert torch.allclose(chance.sum((1, 2)), torch.ones(B, dtype=torch.float64), atol=1e-12)
    assert bool((chance >= 0).all())
    beyond = torch.arange(K + 1) > length[:, None]
    assert not bool(chance[beyond].any())


@pytest.mark.parametrize("M", [0, 1, 5])
def test_no_rows_give_an_empty_plan(M: int) -> None:
    none: Tensor = torch.zeros(0, dtype=torch.int64)
    ahead = Ahead(none, none.view(0, 2), none, none.view(0, 3, 4), torch.zeros(0, 3, 4), none.bool())
    assert by_chance(ahead, torch.zeros(0, 3, 4), M).k.shape == (0, M)
    assert by_fan_out(ahead, none.view(0, 3), M).token.shape == (0, M)
    assert trust(ahead).shape == (0, 2)
