"""Both rules of verification on cases worked out by hand, then through the engine."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro import LLM, SamplingParams, rng
from saguaro.algo.verification import BROKEN
from saguaro.model.tiny import write_tiny
from saguaro.target.request import Request
from saguaro.target.rules import Rejection, Rule, SharedNoise
from saguaro.target.sampler import Context, Sampler
from saguaro.types import DRAFT, Speculation

V = 5
BOTH: dict[str, Callable[[Sampler], Rule]] = {"shared": SharedNoise, "rejection": Rejection}


def request(seed: int = 1, prompt: Sequence[int] = (1, 2, 3), **params: Any) -> Request:
    return Request("r", prompt, SamplingParams(**params), seed)


def greedy() -> Request:
    return request(temperature=0.0)


def best(*tokens: int) -> Tensor:  # [L, V]
    """Logits whose best tokens are these."""
    return torch.eye(V)[torch.tensor(tokens)] * 5 + torch.linspace(0, 1, V)


def decide(
    rule: Rule, requests: Sequence[Request], drafted: Sequence[list[int]], logits: Tensor, q: Tensor | None = None
) -> list[tuple[int, int]]:
    """(number accepted, bonus) of each row."""
    width = 4  # wider than any row needs
    drawn = Speculation.of(drafted, width, [DRAFT] * len(drafted))
    spec = Speculation(drawn.tokens, drawn.length, drawn.source, q)
    places: list[Context] = [
        (r, own[:j]) for r, own in zip(requests, drafted, strict=True) for j in range(len(own) + 1)
    ]
    assert len(places) == len(logits)
    n_accepted, bonus, _ = rule(logits.clone(), places, spec)
    return list(zip(n_accepted.tolist(), bonus.tolist(), strict=True))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        ([], (0, 4)),
        ([4], (1, 0)),
        ([3], (0, 4)),
        ([4, 0], (2, 2)),
        ([4, 1], (1, 0)),
        ([0, 0], (0, 4)),  # right only where it no longer counts
        ([4, 0, 2], (3, 1)),
        ([4, 0, 0], (2, 2)),
    ],
)
def test_a_greedy_row_accepts_what_is_best(kind: str, drafted: list[int], expected: tuple[int, int]) -> None:
    """The target would say 4, 0, 2, 1. A q that is not one-hot was not what a greedy draft draws from; this one was."""
    rule = BOTH[kind](Sampler(V))
    logits = best(4, 0, 2, 1)[: len(drafted) + 1]
    assert decide(rule, [greedy()], [drafted], logits) == [expected]


@pytest.mark.parametrize("kind", BOTH)
def test_rows_of_different_lengths_do_not_mix(kind: str) -> None:
    rule = BOTH[kind](Sampler(V))
    drafted = [[4, 0, 1], [], [2], [3, 3], [3], []]
    logits = torch.cat([best(4, 0, 2, 1), best(3), best(2, 1), best(3, 0, 4), best(3, 0), best(0)])
    expected = [(2, 2), (0, 3), (1, 1), (1, 0), (1, 0), (0, 0)]  # token 0 is what short rows are filled up with
    assert decide(rule, [greedy()] * 6, drafted, logits) == expected
    assert decide(rule, [greedy()] * 2, [[], []], best(3, 1)) == [(0, 3), (0, 1)]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_said(kind: str, temperature: float) -> None:
    """The head has rows that no token belongs to, and they score best."""
    rule = BOTH[kind](Sampler(3))
    logits = torch.tensor([[0.0, 9.0, 0.0, 50.0, 50.0], [0.0, 0.0, 9.0, 50.0, 50.0]])
    q = torch.tensor([[[0.0, 1.0, 0.0]]]) if kind == "rejection" else None
    for own in (None, q):
        assert decide(rule, [request(temperature=temperature)], [[1]], logits, own) == [(1, 2)]


def test_shared_noise_accepts_the_targets_own_tokens() -> None:
    """Token i of a request is argmax(log p + g(seed, i)), whatever was drafted."""
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3))
    r = request(seed=11, temperature=0.8)
    noise = rng.gumbel_all(torch.full((4,), 11), 3 + torch.arange(4), V)
    own = (logits / 0.8 + noise).argmax(-1).tolist()
    rule = SharedNoise(Sampler(V))
    assert decide(rule, [r], [own[:3]], logits) == [(3, own[3])]
    for at in range(3):
        drafted = [*own[:at], (own[at] + 1) % V, *own[at + 1 : 3]]
        assert decide(rule, [r], [drafted], logits) == [(at, own[at])]
    assert decide(rule, [r], [[]], logits[:1]) == [(0, own[0])]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3),
    lengths=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    mix=st.integers(0, 10**6),
    is_drawn=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0]),
)
def test_rejection_by_hand(seeds: list[int], lengths: list[int], mix: int, is_drawn: bool, temperature: float) -> None:
    """min(1, p/q) against the coin of the place, then the residual with the noise of the place, in plain Python."""
    g = torch.Generator().manual_seed(mix)
    requests = [request(seed, prompt=[1] * (2 + row), temperature=temperature) for row, seed in enumerate(seeds)]
    drafted = [torch.randint(0, V, (n,), generator=g).tolist() for n in lengths[: len(seeds)]]
    logits = torch.randn(sum(len(own) + 1 for own in drafted), V, generator=g) * 2
    q = torch.rand(len(seeds), 4, V, generator=g).softmax(-1) if is_drawn else None
    found = decide(Rejection(Sampler(V)), requests, drafted, logits, q)
    first = 0
    for row, (r, own) in enumerate(zip(requests, drafted, strict=True)):
        p = (logits[first : first + len(own) + 1].double() / temperature).softmax(-1)
        given_q = torch.eye(V, dtype=torch.float64)[own] if q is None else q[row].double()  # not drawn: certain
        assert found[row] == by_hand(r, own, p, given_q), (row, own)
        first += len(own) + 1


def by_hand(r: Request, drafted: list[int], p: Tensor, q: Tensor) -> tuple[int, int]:
    """One row of rejection sampling, one number at a time."""
    for at, token in enumerate(drafted):
        position = len(r.tokens) + at
        coin = float(rng.uniform(torch.tensor([r.seed]), torch.tensor([position]), torch.tensor([0])))
        if coin >= min(1.0, float(p[at, token]) / float(q[at, token])):
            left = [max(0.0, float(p[at, v] - q[at, v])) for v in range(V)]
            return at, sample(left, r.seed, position)
    return len(drafted), sample(p[len(drafted)].tolist(), r.seed, len(r.tokens) + len(drafted))


def sample(weights: list[float], seed: int, position: int) -> int:
    noise = rng.gumbel_all(torch.tensor([seed]), torch.tensor([position]), V)[0].tolist()
    return max(range(V), key=lambda v: math.log(weights[v]) + noise[v] if weights[v] > 0 else -math.inf)


def test_a_token_that_was_not_drawn_stands_with_its_own_probability() -> None:
    """q is one-hot: over many seeds, token 2 is accepted p(2) of the time and never comes back as the bonus."""
    logits = torch.tensor([[0.0, 0.5, 1.0, 0.0, 0.2]]).repeat(2, 1)
    p = logits[0].softmax(-1)
    rule, n = Rejection(Sampler(V)), 2000
    requests = [request(seed, temperature=1.0) for seed in range(n)]
    found = decide(rule, requests, [[2]] * n, logits.repeat(n, 1))
    assert abs(sum(k for k, _ in found) / n - float(p[2])) < 0.03
    rejected = [bonus for k, bonus in found if k == 0]
    assert 2 not in rejected
    assert abs(rejected.count(1) / len(rejected) - float(p[1] / (1 - p[2]))) < 0.04


def test_rejection_keeps_to_the_rows_rules() -> None:
    """top-k leaves tokens 1 and 3: another is never accepted, and never the bonus."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 4.5, 1.0]]).repeat(2, 1)
    requests = [request(seed, temperature=1.0, top_k=2) for seed in range(50)]
    found = decide(Rejection(Sampler(V)), requests, [[2]] * 50, logits.repeat(50, 1))
    assert {k for k, _ in found} == {0}
    assert {bonus for _, bonus in found} == {1, 3}


# Through the engine


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=4)
    return LLM(folder, device="cpu", kv_memory="2MiB")


@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_models_own_whatever_was_speculated(llm: LLM, verification: str, temperature: float) -> None:
    """Each is what the model alone says after the text so far; a bias does not show in them, so it can force it."""
    parts = {"draft": "drop:2", "link": "inline", "verification": verification, "lookahead": 3, "budget": 4}
    drafted = llm.sibling(method="ssd-uniform", **parts)
    prompt = [116, 104, 101]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, logprobs=2, ignore_eos=True)
    output = drafted.generate([prompt], params)[0].outputs[0]
    assert output.n_rounds < len(output.token_ids), "nothing was accepted"
    assert output.logprobs is not None
    texts = [[*prompt, *output.token_ids[:at]] for at in range(24)]
    forced = [
        SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True, logit_bias={token: 1000.0})
        for token in output.token_ids
    ]
    for at, alone in enumerate(llm.generate(texts, forced)):
        expected = alone.outputs[0].logprobs
        assert expected is not None
        found = output.logprobs[at]
        assert found.token == expected[0].token == output.token_ids[at]
        assert found.logprob == pytest.approx(expected[0].logprob, abs=1e-4)
        assert [token for token, _ in found.top] == [token for token, _ in expected[0].top]
        assert [p for _, p in found.top] == pytest.approx([p for _, p in expected[0].top], abs=1e-4)


def test_rejection_without_a_draft_gives_the_tokens_of_shared_noise(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, top_p=0.9)
    rejecting = llm.sibling(method="ar", verification="rejection")
    assert rejecting.generate("the end", params)[0].token_ids == llm.generate("the end", params)[0].token_ids


def test_greedy_rows_do_not_care_for_the_rule(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = [result.token_ids for result in llm.generate(["the end", "in"], params)]
    parts: list[dict[str, Any]] = [
        {"method": "saguaro", "saguaro_c": 0.5},
        {"method": "sd", "verification": "rejection"},
    ]
    for own in parts:
        drafted = llm.sibling(draft="drop:2", link="inline", lookahead=3, budget=4, **own)
        assert [result.token_ids for result in drafted.generate(["the end", "in"], params)] == expected


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_accepted_beyond_logits_that_are_not_finite(kind: str, temperature: float, odd: float) -> None:
    """The target would say 4, 0, 2, 1, and 3 of its four logits have an odd one: what comes before stands."""
    rule = BOTH[kind](Sampler(V))
    for at, expected in ((0, (0, BROKEN)), (1, (1, BROKEN)), (3, (3, BROKEN))):
        logits = best(4, 0, 2, 1) * 100
        logits[at, (4, 0, 2, 1)[at]] = odd
        both = torch.cat((best(4, 0, 2, 1) * 100, logits))
        requests = [request(temperature=temperature), request(temperature=temperature)]
        assert decide(rule, requests, [[4, 0, 2]] * 2, both) == [(3, 1), expected]


@pytest.mark.parametrize("kind", BOTH)
def test_odd_logits_after_a_rejection_do_not_matter(kind: str) -> None:
    logits = best(4, 0, 2, 1)
    logits[2] = math.nan
    assert decide(BOTH[kind](Sampler(V)), [greedy()], [[4, 1, 2]], logits) == [(1, 0)]
