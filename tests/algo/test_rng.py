"""Noise: the published generator, on both number types, and a function of (seed, position, token) alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro import rng

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**20)

# (counter, key, result) of Philox4x32-10 from Random123's known-answer tests
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers_on_torch(counter: str, key: str, result: str) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([w]) for w in words(f"{counter} {key}"))
    assert [int(w) for w in rng.philox(c0, c1, c2, c3, k0, k1)] == words(result)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers_on_numpy(counter: str, key: str, result: str) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([w], dtype=np.uint64) for w in words(f"{counter} {key}"))
    assert [int(w[0]) for w in rng.philox(c0, c1, c2, c3, k0, k1)] == words(result)


def test_torch_and_numpy_agree_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    t = torch.randint(0, 2**32, (6, 5000), generator=generator)
    n = t.numpy().astype(np.uint64)
    ours = torch.stack(rng.philox(t[0], t[1], t[2], t[3], t[4], t[5]))
    theirs = np.stack(rng.philox(n[0], n[1], n[2], n[3], n[4], n[5]))
    assert np.array_equal(ours.numpy().astype(np.uint64), theirs)


def by_hand(seed: int, position: int, token: int) -> float:
    """The noise of one token as the module's docstring defines it, in double precision."""
    zero = torch.zeros(1, dtype=torch.int64)
    key = zero + (seed & 0xFFFFFFFF), zero + (seed >> 32)
    word = int(rng.philox(zero + token // 4, zero + position, zero, zero + rng.DOMAIN, *key)[token % 4])
    return -math.log(-math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=SEEDS, position=POSITIONS, token=st.integers(0, 200_000))
def test_noise_is_what_the_docstring_defines(seed: int, position: int, token: int) -> None:
    found = rng.gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert float(found) == pytest.approx(by_hand(seed, position, token), abs=2e-5)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    rows=st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=5),
    n_vocab=st.integers(1, 30),
    asked=st.lists(st.integers(0, 29), min_size=1, max_size=8),
)
def test_noise_depends_neither_on_the_batch_nor_on_the_other_tokens_asked(
    rows: list[tuple[int, int]], n_vocab: int, asked: list[int]
) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = rng.gumbel_all(seeds, positions, n_vocab)
    tokens = torch.tensor(asked) % n_vocab
    for r in range(len(rows)):
        alone = rng.gumbel_all(seeds[r : r + 1], positions[r : r + 1], n_vocab + 3)
        assert alone[0, :n_vocab].equal(together[r])
        some = rng.gumbel(seeds[r].expand(len(tokens)), positions[r].expand(len(tokens)), tokens)
        assert some.equal(together[r, tokens])


@pytest.mark.parametrize("in_cache", [1, 7, 15])
def test_how_many_rows_are_computed_at_a_time_changes_nothing(in_cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.tensor([3, 2**53 - 1, 3, 4, 5]), torch.arange(5) * 2**20
    expected = torch.cat([rng.gumbel_all(*row, 11) for row in zip(seeds.split(1), positions.split(1), strict=True)])
    monkeypatch.setattr(rng, "IN_CACHE", in_cache)  # three blocks a row: one row, two, all of them
    assert rng.gumbel_all(seeds, positions, 11).equal(expected)
    assert rng.gumbel_all(seeds[:0], positions[:0], 11).shape == (0, 11)


def noise(seed: int, position: int) -> Tensor:
    return rng.gumbel_all(torch.tensor([seed]), torch.tensor([position]), 64)


@pytest.mark.parametrize("other", [(8, 5), (7, 6), (7 + 2**32, 5), (7, 5 + 2**16)])
def test_another_seed_or_position_gives_other_noise(other: tuple[int, int]) -> None:
    assert not (noise(7, 5) == noise(*other)).any()


def test_the_noise_of_a_row_never_repeats() -> None:
    seeds = torch.tensor([3, 3, 3])
    values = rng.gumbel_all(seeds, torch.tensor([0, 1, 2]), 1000)
    assert len(values.unique()) > 2990  # float32 rounds a few together


def test_extreme_words_stay_within_the_stated_bounds() -> None:
    extreme = torch.tensor([0, 1, 2, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1])
    found = rng._to_gumbel(extreme)
    assert found.isfinite().all()
    assert float(found.max()) <= rng.GUMBEL_MAX
    assert float(found.min()) >= rng.GUMBEL_MIN
    assert float(found[0]) == pytest.approx(rng.GUMBEL_MAX, abs=1e-3)  # the bounds are met, not merely kept
    assert float(found[-1]) == pytest.approx(rng.GUMBEL_MIN, abs=1e-3)


def test_noise_falls_as_the_word_grows() -> None:
    found = rng._to_gumbel(torch.linspace(0, 2**32 - 1, 1001, dtype=torch.float64).long())
    assert (found.diff() < 0).all()


def test_noise_has_the_mean_and_spread_of_gumbel() -> None:
    values = rng.gumbel_all(torch.arange(50), torch.arange(50), 2000).double()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)


def test_derived_seeds_differ_and_fit_json() -> None:
    seeds = [rng.derive_seed(seed, index) for seed in (0, 1, 2**53 - 1, 2**63 - 1) for index in range(1, 65)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_fresh_seeds_differ_and_fit_json() -> None:
    seeds = [rng.fresh_seed() for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**53 for seed in seeds)
