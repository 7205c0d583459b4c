"""From logits to tokens: against slow plain Python, against transformers, and against the law itself."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from saguaro import rng
from saguaro.algo import sampling
from saguaro.algo.sampling import (
    NEVER,
    Rules,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
    pick,
    restrict,
)

QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)
Setting = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
SETTING = st.tuples(
    st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    st.sampled_from([-1, 0, 1, 2, 3, 100]),
    st.sampled_from([0.01, 0.3, 0.62, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.33, 1.0]),
)
ROW = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=6, max_size=6)  # ties are common


def make_rules(settings_: Sequence[Setting], seeds: Tensor | None = None, position: int = 3) -> Rules:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings_, strict=True))
    seeds = torch.arange(len(settings_)) if seeds is None else seeds
    return Rules(temperature, top_k, top_p, min_p, seeds, torch.full_like(seeds, position))


def plain_law(logits: Sequence[float], setting: Setting) -> list[float]:
    """The distribution after temperature, top-k, top-p and min-p, by definition; ties at a threshold stay."""
    temperature, top_k, top_p, min_p = setting
    weights = [math.exp(x / temperature) for x in logits]
    if top_k > 0:
        floor = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [w if w >= floor else 0.0 for w in weights]
    if top_p < 1:
        total, held = sum(weights), 0.0
        floor = 0.0
        for w in sorted(weights, reverse=True):
            if held >= top_p * total:
                break
            held, floor = held + w, w
        weights = [w if w >= floor else 0.0 for w in weights]
    weights = [w if w >= min_p * max(weights) * (1 - 1e-9) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def is_near_a_threshold(logits: Sequence[float], setting: Setting) -> bool:
    """Whether rounding may decide which tokens top-p or min-p keep."""
    temperature, top_k, top_p, min_p = setting
    law = sorted(plain_law(logits, (temperature, top_k, 1.0, 0.0)), reverse=True)
    held = [sum(law[: n + 1]) for n in range(len(law))]
    close = min_p not in (0, 1) and any(abs(x / law[0] - min_p) < 1e-4 for x in law)
    return close or any(abs(h - top_p) < 1e-4 for h in held[:-1])


@QUICK
@given(rows=st.lists(st.tuples(ROW, SETTING), min_size=1, max_size=5))
def test_restricted_rows_have_the_plain_law_each_by_its_own_settings(
    rows: list[tuple[list[float], Setting]],
) -> None:
    assume(not any(is_near_a_threshold(*row) for row in rows))
    logits = torch.tensor([logits for logits, _ in rows])
    found = restrict(logits, make_rules([setting for _, setting in rows])).softmax(-1)
    assert found.tolist() == [pytest.approx(plain_law(*row), abs=1e-5) for row in rows]


def spread(n_rows: int, n_vocab: int, seed: int, scale: float = 2.0) -> Tensor:
    """Random scores without ties."""
    scores = torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(seed)) * scale
    assert all(len(row.unique()) == n_vocab for row in scores)
    return scores


@pytest.mark.parametrize("k", [1, 2, 7, 50, 64])
def test_top_k_keeps_what_transformers_keeps(k: int) -> None:
    scores = spread(20, 64, seed=k)
    theirs = TopKLogitsWarper(k)(torch.zeros(20, 1, dtype=torch.int64), scores)
    assert keep_top_k(scores, torch.full((20,), k)).equal(theirs)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.77, 0.95, 0.999])
def test_top_p_keeps_what_transformers_keeps(p: float) -> None:
    scores = spread(20, 64, seed=int(p * 1000))
    theirs = TopPLogitsWarper(p)(torch.zeros(20, 1, dtype=torch.int64), scores)
    assert keep_top_p(scores, torch.full((20,), p)).equal(theirs)


@pytest.mark.parametrize("p", [0.001, 0.05, 0.4, 0.95])
def test_min_p_keeps_what_transformers_keeps(p: float) -> None:
    scores = spread(20, 64, seed=int(p * 1000))
    theirs = MinPLogitsWarper(p)(torch.zeros(20, 1, dtype=torch.int64), scores)
    assert keep_min_p(scores, torch.full((20,), p)).equal(theirs)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])  # the wanted mass lies beyond the first look, at it, within it
def test_top_p_on_a_wide_vocabulary_looks_as_deep_as_it_must(scale: float) -> None:
    scores = spread(4, 3001, seed=1, scale=scale)
    p = torch.tensor([0.2, 0.9, 0.99, 1.0])
    found = keep_top_p(scores, p, width=16)
    assert found.equal(keep_top_p(scores, p, width=3001))
    assert found.equal(keep_top_p(scores, p))
    assert found[3].equal(scores[3])


def test_a_row_with_top_p_off_does_not_make_the_others_look_deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = spread(2, 3001, seed=1, scale=5.0)
    calls = []
    look = sampling.keep_top_p

    def counted(scores: Tensor, p: Tensor, width: int = 1024) -> Tensor:
        calls.append(width)
        return look(scores, p, width)

    monkeypatch.setattr(sampling, "keep_top_p", counted)
    sampling.keep_top_p(scores, torch.tensor([0.5, 1.0]), 256)
    assert calls == [256]


def test_ties_at_a_threshold_are_all_kept() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    assert keep_top_k(scores, torch.tensor([2])).isinf().tolist() == [[False, False, False, True, False]]
    kept = keep_top_p(scores, torch.tensor([0.6]))
    assert kept.isinf().tolist() == [[False, False, False, True, False]]


def test_settings_that_are_off_change_nothing() -> None:
    scores = spread(3, 40, seed=0)
    for off in (0, -1, 40, 1000):
        assert keep_top_k(scores, torch.full((3,), off)).equal(scores)
    assert keep_top_p(scores, torch.ones(3)).equal(scores)
    assert keep_min_p(scores, torch.zeros(3)).equal(scores)


@pytest.mark.parametrize("top_p", [1e-6, 0.5])
def test_at_least_the_likeliest_token_is_kept(top_p: float) -> None:
    logits = torch.tensor([[0.0, 30.0, 0.0]])
    scores = restrict(logits, make_rules([(1.0, 1, top_p, 1.0)]))
    assert scores.isfinite().tolist() == [[False, True, False]]


def score_shapes(n_vocab: int) -> dict[str, Tensor]:
    """[16, V] each."""
    random = torch.Generator().manual_seed(n_vocab)
    base = torch.randn(16, n_vocab, generator=random)
    holes = base.masked_fill(torch.rand(16, n_vocab, generator=random) < 0.5, NEVER)
    holes[:, n_vocab // 2] = 0.0  # somebody is left
    one = torch.full((16, n_vocab), NEVER)
    one[:, -1] = -5.0
    return {
        "flat": torch.zeros(16, n_vocab),
        "gentle": base,
        "peaked": base * 12,
        "extreme": base * 1000,
        "holes": holes * 3,
        "one": one,
        "ties": (base * 2).round(),
        "step": torch.where(base > 0.5, 10.0, 0.0),
        "nothing": torch.full((16, n_vocab), NEVER),
    }


@pytest.mark.parametrize("n_vocab", [1, 2, 3, 5, 7, 8, 9, 30, 131, 1000])
def test_the_pruned_pick_is_the_dense_pick(n_vocab: int) -> None:
    seeds, positions = torch.arange(16) + 2**40, torch.arange(16) * 3
    noise = rng.gumbel_all(seeds, positions, n_vocab)
    for name, scores in score_shapes(n_vocab).items():
        assert pick(scores, seeds, positions).equal((scores + noise).argmax(-1)), name


@QUICK
@given(
    rows=st.lists(st.lists(st.integers(-40, 40), min_size=11, max_size=11), min_size=1, max_size=6),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_pruned_pick_is_the_dense_pick_on_any_row(rows: list[list[int]], seed: int) -> None:
    scores = torch.tensor(rows, dtype=torch.float32)
    seeds, positions = torch.full((len(rows),), seed), torch.arange(len(rows))
    assert pick(scores, seeds, positions).equal((scores + rng.gumbel_all(seeds, positions, 11)).argmax(-1))


def test_a_peaked_row_draws_noise_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    gumbel = rng.gumbel

    def counted(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        drawn.append(len(tokens))
        return gumbel(seeds, positions, tokens)

    monkeypatch.setattr(rng, "gumbel", counted)
    scores = spread(4, 2000, seed=0, scale=8.0)
    pick(scores, torch.arange(4), torch.arange(4))
    assert len(drawn) == 2
    assert sum(drawn) < 4 * 2000 / 4


def test_a_pick_does_not_depend_on_the_batch() -> None:
    scores = torch.cat([spread(8, 33, seed=3, scale=s) for s in (0.1, 3.0, 30.0)])
    seeds, positions = torch.arange(24), torch.arange(24)
    together = pick(scores, seeds, positions)
    alone = [pick(scores[r : r + 1], seeds[r : r + 1], positions[r : r + 1]) for r in range(24)]
    assert together.equal(torch.cat(alone))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert pick(scores[order], seeds[order], positions[order]).equal(together[order])


def chi_square(counts: Counter[int], law: Sequence[float]) -> float:
    n = sum(counts.values())
    assert all(law[token] > 0 for token in counts), "a token that cannot be was chosen"
    return sum((counts[v] - n * p) ** 2 / (n * p) for v, p in enumerate(law) if p > 0)


LOGITS = [1.2, -0.7, 0.4, 2.0, 0.1, -2.0, 1.9] + [NEVER] * 33  # few of many: the pruned, faster way
CRITICAL = 30.0  # 6 degrees of freedom: one fair run in 25 000 exceeds it, and these runs are fixed


@pytest.mark.parametrize(
    "setting",
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.5, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.7, 5, 0.9, 0.05),
    ],
)
@pytest.mark.parametrize("varies", ["seed", "position"])
def test_tokens_follow_the_law(setting: Setting, varies: str) -> None:
    """Over many seeds, and over the positions of one seed."""
    n, many = 20_000, torch.arange(20_000)
    rules = make_rules([setting] * n, seeds=many)
    if varies == "position":
        rules = replace(rules, seeds=torch.full((n,), 1234567), positions=many)
    tokens = choose(torch.tensor([LOGITS]).expand(n, -1), rules)
    counts = Counter(tokens.tolist())
    assert chi_square(counts, plain_law(LOGITS, setting)) < CRITICAL


def test_the_law_test_would_notice_a_slightly_wrong_law() -> None:
    n = 20_000
    tokens = choose(torch.tensor([LOGITS]).expand(n, -1), make_rules([(1.1, 0, 1.0, 0.0)] * n))
    assert chi_square(Counter(tokens.tolist()), plain_law(LOGITS, (1.0, 0, 1.0, 0.0))) > CRITICAL


def test_neighbouring_positions_are_independent() -> None:
    n = 20_000
    logits = torch.tensor([[0.0] * 3 + [NEVER] * 13]).expand(n, -1)
    here = pick(logits, torch.arange(n), torch.full((n,), 5))
    there = pick(logits, torch.arange(n), torch.full((n,), 6))
    counts = Counter((3 * here + there).tolist())
    assert chi_square(counts, [1 / 9] * 9) < CRITICAL


def test_greedy_and_warm_rows_share_a_batch() -> None:
    logits = spread(4, 9, seed=5, scale=0.5)
    mixed = make_rules([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.0, 2, 0.1, 0.5), (1.0, 0, 1.0, 0.0)])
    found = choose(logits, mixed)
    noisy = logits + rng.gumbel_all(mixed.seeds, mixed.positions, 9)
    assert found[[0, 2]].equal(logits[[0, 2]].argmax(-1))
    assert found[[1, 3]].equal(noisy[[1, 3]].argmax(-1))
    assert not found.equal(logits.argmax(-1)), "the warm rows must not all be greedy by chance"


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-37, 1e-38, 1e-42])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = spread(30, 50, seed=2, scale=10.0)
    rules = make_rules([(temperature, 0, top_p, 0.0)] * 30)
    assert choose(logits, rules).equal(logits.argmax(-1))


def test_a_huge_temperature_is_uniform() -> None:
    n = 20_000
    tokens = choose(torch.tensor([LOGITS]).expand(n, -1), make_rules([(1e30, 0, 1.0, 0.0)] * n))
    assert chi_square(Counter(tokens.tolist()), [1 / 7] * 7 + [0.0] * 33) < CRITICAL


def test_choosing_leaves_the_logits_alone() -> None:
    logits = spread(3, 20, seed=0)
    before = logits.clone()
    choose(logits, make_rules([(0.7, 5, 0.9, 0.01)] * 3))
    assert logits.equal(before)


@QUICK
@given(
    logits=ROW,
    prompt=st.lists(st.integers(0, 5), max_size=5),
    output=st.lists(st.integers(0, 5), max_size=7),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-1.0, 0.0, 0.6]),
    frequency=st.sampled_from([-0.2, 0.0, 0.4]),
)
def test_penalties_are_what_they_say(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    expected = list(logits)
    for token in {*prompt, *output}:
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
    for token, count in Counter(output).items():
        expected[token] -= presence + count * frequency
    row = torch.tensor(logits)
    written = Counter(output)
    penalise(
        row,
        torch.tensor(sorted({*prompt, *output}), dtype=torch.int64),
        torch.tensor(list(written), dtype=torch.int64),
        torch.tensor(list(written.values()), dtype=torch.float32),
        repetition,
        presence,
        frequency,
    )
    assert row.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("repetition", [0.7, 1.2, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(repetition: float) -> None:
    logits = spread(1, 30, seed=4)
    text = torch.tensor([[1, 5, 5, 29, 0, 1]])
    theirs = RepetitionPenaltyLogitsProcessor(repetition)(text, logits.clone())
    ours, none = logits[0].clone(), torch.zeros(0)
    penalise(ours, text.unique(), none.long(), none, repetition, 0.0, 0.0)
    assert ours.allclose(theirs[0], atol=1e-6)
