"""Plans: what is planned is possible, distinct and the best there is; chances are exact."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo.planning import Ahead, Planned, alternatives, by_fan_out, chance_of_length

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
V = 9  # a vocabulary so small that the token in flight is often a candidate


@st.composite
def aheads(draw: st.DrawFn, least: int = 0) -> Ahead:
    """Any speculations in flight: missing candidates, tokens that are no candidate, every length."""
    B, K, C = draw(st.integers(least, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    length = torch.randint(0, K + 1, (B,), generator=g)
    tokens = torch.randint(0, V, (B, K), generator=g).masked_fill(torch.arange(K) >= length[:, None], 0)
    candidates = torch.rand(B, K + 1, V, generator=g).argsort(-1)[..., :C]
    known = torch.rand(B, K + 1, C, generator=g) < 0.7
    is_primary = torch.rand(B, generator=g) < 0.5
    return Ahead(torch.randperm(20, generator=g)[:B], tokens, length, candidates, known, is_primary)


def possible(ahead: Ahead, b: int) -> list[tuple[int, int]]:
    """Every outcome that may be prepared for a row, one by one, best first after each k."""
    length = int(ahead.length[b])
    found = []
    for k in range(length + 1):
        for token, is_known in zip(ahead.candidates[b, k].tolist(), ahead.is_known[b, k].tolist(), strict=True):
            if is_known and not (k < length and token == int(ahead.tokens[b, k])):
                found.append((k, token))
    return found


def outcomes(planned: Planned, b: int) -> list[tuple[int, int]]:
    """What is planned for a row; checks that places are filled from the front and that the rest is blank."""
    pairs = list(zip(planned.k[b].tolist(), planned.token[b].tolist(), strict=True))
    n = sum(k >= 0 for k, _ in pairs)
    assert all(k >= 0 for k, _ in pairs[:n])
    assert all(pair == (-1, 0) for pair in pairs[n:])
    return pairs[:n]


@QUICK
@given(ahead=aheads())
def test_alternatives_are_the_possible_outcomes(ahead: Ahead) -> None:
    is_left = alternatives(ahead)
    for b in range(len(ahead.slots)):
        cells = itertools.product(range(is_left.shape[1]), range(is_left.shape[2]))
        left = [(k, int(ahead.candidates[b, k, c])) for k, c in cells if is_left[b, k, c]]
        assert left == possible(ahead, b)


@QUICK
@given(ahead=aheads(), M=st.integers(0, 40), most=st.integers(0, 8), seed=st.integers(0, 99))
def test_by_fan_out_takes_the_first_of_each_k(ahead: Ahead, M: int, most: int, seed: int) -> None:
    shape = ahead.candidates.shape[:2]
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
    planned = by_fan_out(ahead, torch.full(ahead.candidates.shape[:2], 99), M)
    for b in range(len(ahead.slots)):
        found = outcomes(planned, b)
        assert len(set(found)) == len(found) == min(M, len(possible(ahead, b)))
        assert set(found) <= set(possible(ahead, b))


def test_the_token_in_flight_may_be_the_bonus_after_it() -> None:
    """Only where it stands is it impossible: the padding after a short speculation excludes nothing."""
    candidates = torch.tensor([[[7, 0]] * 3])
    known, one = torch.ones_like(candidates, dtype=torch.bool), torch.tensor([1])
    ahead = Ahead(one - 1, torch.tensor([[7, 0]]), one, candidates, known, one > 0)
    planned = by_fan_out(ahead, torch.full((1, 3), 2), 6)
    assert outcomes(planned, 0) == [(0, 0), (1, 7), (1, 0)]


def test_the_chance_of_every_length() -> None:
    """Each path of accepted and rejected tokens, by hand."""
    accept = torch.tensor([[0.9, 0.6, 0.3]], dtype=torch.float64)
    for length in range(4):
        expected = torch.zeros(4, dtype=torch.float64)
        for coins in itertools.product([True, False], repeat=length):
            k = (*coins, False).index(False)
            each = zip(accept[0].tolist(), coins, strict=False)
            expected[k] += math.prod(a if coin else 1 - a for a, coin in each)
        found = chance_of_length(accept, torch.tensor([length]))[0]
        assert torch.allclose(found, expected, atol=1e-14, rtol=0)


@QUICK
@given(B=st.integers(0, 3), K=st.integers(0, 6), seed=st.integers(0, 99))
def test_the_chances_of_lengths_sum_to_one(B: int, K: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    accept = torch.rand(B, K, generator=g, dtype=torch.float64)
    length = torch.randint(0, K + 1, (B,), generator=g)
    chance = chance_of_length(accept, length)
    assert torch.allclose(chance.sum(1), torch.ones(B, dtype=torch.float64), atol=1e-12)
    assert bool((chance >= 0).all())
    assert not bool(chance[torch.arange(K + 1) > length[:, None]].any())


@pytest.mark.parametrize("M", [0, 1, 5])
def test_no_rows_give_an_empty_plan(M: int) -> None:
    none: Tensor = torch.zeros(0, dtype=torch.int64)
    known = torch.zeros(0, 3, 4, dtype=torch.bool)
    ahead = Ahead(none, none.view(0, 2), none, none.view(0, 3, 4), known, none.bool())
    assert by_fan_out(ahead, none.view(0, 3), M).token.shape == (0, M)
