"""Each request's parameters at each place of a step, speculated tokens counted as written."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro import rng
from saguaro.algo.sampling import Rules, rank
from saguaro.config import SamplingParams
from saguaro.target.request import Request
from saguaro.target.sampler import Context, Sampler, adjust, logprobs, rules

V = 12
CPU = torch.device("cpu")


def new_request(
    prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), seed: int = 7, eos: int | None = None, **params: Any
) -> Request:
    eos_ids = frozenset() if eos is None else frozenset([eos])
    request = Request(id="r", prompt=prompt, params=SamplingParams(**params), seed=seed, eos_ids=eos_ids)
    request.tokens.extend(output)
    return request


def random_logits(n_rows: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def adjusted(logits: Tensor, request: Request, before: Sequence[int] = ()) -> Tensor:
    row = logits.clone()
    adjust(row, request, before)
    return row


TOKENS = st.lists(st.integers(0, V - 1), max_size=6)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    prompt=TOKENS.filter(len),
    output=TOKENS,
    before=TOKENS,
    repetition=st.sampled_from([0.8, 1.0, 1.5]),
    presence=st.sampled_from([-0.5, 0.0, 0.7]),
    frequency=st.sampled_from([0.0, 0.3]),
)
def test_speculated_tokens_count_as_written(
    prompt: list[int],
    output: list[int],
    before: list[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """The logits after a text and j speculated tokens are adjusted as if those were in the text."""
    logits = random_logits(1)[0]
    expected = logits.tolist()
    for token in {*prompt, *output, *before}:
        expected[token] *= 1 / repetition if expected[token] > 0 else repetition
    for token, count in Counter([*output, *before]).items():
        expected[token] -= presence + count * frequency
    wanted: dict[str, Any] = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }
    speculated = adjusted(logits, new_request(prompt, output, **wanted), before)
    assert speculated.tolist() == pytest.approx(expected, abs=1e-5)
    assert speculated.equal(adjusted(logits, new_request(prompt, [*output, *before], **wanted)))


def test_a_prompt_is_not_written_but_it_is_seen() -> None:
    logits = torch.ones(V)
    present = adjusted(logits, new_request([3], presence_penalty=1.0, frequency_penalty=1.0))
    assert present.equal(logits)
    repeated = adjusted(logits, new_request([3], repetition_penalty=2.0))
    assert repeated.tolist() == [0.5 if v == 3 else 1.0 for v in range(V)]


@pytest.mark.parametrize("stop", [{"eos": 5}, {"stop_token_ids": (5,)}])
def test_a_stop_token_is_banned_until_min_tokens_also_inside_a_speculation(stop: dict[str, Any]) -> None:
    """Two written, j speculated: token number 2 + j + 1 may be the end only if it is at least the fifth."""
    request = new_request(output=[1, 1], min_tokens=4, **stop)
    banned = [bool(adjusted(torch.zeros(V), request, [1] * j)[5].isinf()) for j in range(5)]
    assert banned == [True, True, False, False, False]
    others = adjusted(torch.zeros(V), request)
    assert others.isinf().sum() == 1


def test_a_sampler_obeys_min_tokens_place_by_place() -> None:
    logits = torch.zeros(4, V)
    logits[:, 5] = 9.0
    request = new_request(output=[1], min_tokens=3, temperature=0.0, stop_token_ids=(5,))
    places: list[Context] = [(request, [1] * j) for j in range(4)]
    assert (Sampler(V)(logits, places) == 5).tolist() == [False, False, True, True]


def test_an_ignored_end_of_text_is_not_banned() -> None:
    request = new_request(eos=5, min_tokens=4, ignore_eos=True)
    assert adjusted(torch.zeros(V), request).isfinite().all()


def test_logit_bias_is_added_to_its_tokens() -> None:
    request = new_request(logit_bias={3: 2.5, 0: -100.0})
    assert adjusted(torch.ones(V), request).tolist() == [-99, 1, 1, 3.5, *[1] * (V - 4)]


def test_a_bias_comes_after_the_penalties() -> None:
    request = new_request([3], repetition_penalty=2.0, logit_bias={3: 1.0})
    assert float(adjusted(torch.full((V,), 4.0), request)[3]) == 4.0 / 2 + 1


def test_a_bias_does_not_lift_a_ban() -> None:
    request = new_request(min_tokens=1, stop_token_ids=(3,), logit_bias={3: 100.0})
    assert adjusted(torch.ones(V), request)[3] == -math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_padding_rows_of_the_head_are_never_chosen(temperature: float) -> None:
    logits = torch.zeros(500, V)
    logits[:, 8:] = 30.0
    places: list[Context] = [
        (new_request(seed=seed, temperature=temperature, logit_bias={9: 50.0}), ()) for seed in range(500)
    ]
    tokens = Sampler(n_known=8)(logits, places)
    assert int(tokens.max()) < 8


def test_the_noise_of_a_place_is_that_of_its_position_in_the_text() -> None:
    """A token is the same whether it is reached by decoding or inside a speculation."""
    request = new_request([1, 2, 3], [4, 5], seed=99)
    places: list[Context] = [(request, [6] * j) for j in range(4)]
    found = rules(places, CPU)
    assert found.positions.tolist() == [5, 6, 7, 8]
    assert found.seeds.tolist() == [99] * 4
    logits = random_logits(4)
    noise = rng.gumbel_all(torch.full((4,), 99), torch.tensor([5, 6, 7, 8]), V)
    assert Sampler(V)(logits.clone(), places).equal((logits + noise).argmax(-1))


def test_every_place_follows_its_own_request() -> None:
    settings_ = [(0.0, 0, 1.0, 0.0), (0.8, 3, 1.0, 0.0), (1.5, 0, 0.7, 0.0), (1.0, 0, 1.0, 0.2)]
    names = ("temperature", "top_k", "top_p", "min_p")
    wanted: list[dict[str, Any]] = [dict(zip(names, setting, strict=True)) for setting in settings_]
    requests = [new_request(seed=seed, **params) for seed, params in enumerate(wanted)]
    logits = random_logits(4, scale=1.0)
    together = Sampler(V)(logits.clone(), [(request, ()) for request in requests])
    alone = [Sampler(V)(logits[i : i + 1].clone(), [(request, ())]) for i, request in enumerate(requests)]
    assert together.equal(torch.cat(alone))
    found = rules([(request, ()) for request in requests], CPU)
    columns = zip(found.temperature, found.top_k, found.top_p, found.min_p, strict=True)
    assert [tuple(map(float, row)) for row in columns] == [pytest.approx(setting) for setting in settings_]


def plain_rank(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, n_known: int, n: int
) -> tuple[Tensor, Tensor]:
    """A kernel that knows temperature and noise alone, as those for a CPU and a GPU do."""
    none = torch.zeros(len(logits))
    each = Rules(temperature, none.long(), torch.ones(len(logits)), none, seeds, positions)
    return rank(logits[:, :n_known], each, n)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {3: 5.0}},
        {"allowed_token_ids": (3, 4)},
        {"min_tokens": 4, "stop_token_ids": (0, 1, 2, 3, 4, 5)},
    ],
)
def test_a_kernel_for_plain_requests_changes_no_token(params: dict[str, Any]) -> None:
    """Each parameter alone, beside plain requests; and with it other tokens are chosen than without."""
    n = 100
    logits = random_logits(n, scale=0.5)
    requests = [new_request([1, 2], [2, 2], seed=seed, **(params if seed % 2 else {})) for seed in range(n)]
    places: list[Context] = [(request, ()) for request in requests]
    tokens, ranked = Sampler(V)(logits.clone(), places), Sampler(V).rank(logits.clone(), places, 1)[0]
    with_kernel = Sampler(V, plain_rank)
    assert with_kernel(logits.clone(), places).equal(tokens)
    assert with_kernel.rank(logits.clone(), places, 1)[0].equal(ranked)
    unrestricted = Sampler(V)(logits.clone(), [(new_request([1, 2], [2, 2], seed=seed), ()) for seed in range(n)])
    assert tokens.equal(unrestricted) == (not params)


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**53, 2**63 - 1])
def test_large_seeds_arrive_whole(seed: int) -> None:
    assert rules([(new_request(seed=seed), ())], CPU).seeds.tolist() == [seed]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(3)
    found = logprobs(logits, torch.tensor([0, 4, 11]), n_top=V)
    for row, one in zip(logits.tolist(), found, strict=True):
        total = math.log(sum(math.exp(x) for x in row))
        assert one.logprob == pytest.approx(row[one.token] - total, abs=1e-5)
        assert [value for _, value in one.top] == pytest.approx(
            sorted((x - total for x in row), reverse=True), abs=1e-5
        )
        assert dict(one.top)[one.token] == one.logprob
        assert sum(math.exp(value) for _, value in one.top) == pytest.approx(1, abs=1e-5)
    assert [one.token for one in found] == [0, 4, 11]


@pytest.mark.parametrize("n_top", [0, 1, 5])
def test_as_many_alternatives_as_asked_for_best_first(n_top: int) -> None:
    logits = random_logits(2)
    for row, one in zip(logits, logprobs(logits, torch.tensor([0, 0]), n_top), strict=True):
        assert [token for token, _ in one.top] == row.argsort(descending=True)[:n_top].tolist()
