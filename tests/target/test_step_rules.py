"""What a captured step decides itself, and what it leaves to the host: the tokens are the same."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saguaro.attention.step import Segment
from saguaro.config import SamplingParams
from saguaro.kernels.row_rules import MOST_BIASES
from saguaro.model.transformer import Transformer
from saguaro.runner.captured import Room
from saguaro.target import tables
from saguaro.target.request import Request
from saguaro.target.step_rules import LEFT_TO_HOST, MOST_OUTPUT, StepRules
from tests.target.test_round import chance, new_requests, new_rig, proposing, scripted, true_output
from tests.target.test_tree import Spy, Trees, hidden

ROOM = Room(seats=4, changes=5, masks=3)
ALL = SimpleNamespace(mask=lambda output: np.full(250, 255, np.uint8), is_slow=False)  # a grammar


def new_request(params: dict[str, Any], n_output: int = 0) -> Request:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=None, **params), 0, frozenset([7]))
    request.tokens += [4] * n_output
    request.grammar = ALL if request.params.structured is not None else None
    return request


def segment(request: Request, n: int) -> Segment:
    """Its row, with n speculated tokens."""
    return Segment([4] * (1 + n), len(request.tokens) - 1, (), 1 + n)


@pytest.mark.parametrize(
    ("params", "n_output", "is_taken"),
    [
        ({}, 9, True),
        ({"top_p": 0.9, "logprobs": 3}, 9, True),
        ({"repetition_penalty": 1.2, "presence_penalty": 0.5}, MOST_OUTPUT, True),
        ({"repetition_penalty": 1.2}, MOST_OUTPUT + 1, False),
        ({"logit_bias": dict.fromkeys(range(MOST_BIASES), 1.0)}, MOST_OUTPUT + 1, True),
        ({"logit_bias": dict.fromkeys(range(MOST_BIASES + 1), 1.0)}, 0, False),
        ({"logit_bias": {3: -1e30}}, 0, True),
        ({"logit_bias": {3: -1e31}}, 0, False),
        ({"repetition_penalty": 1e-31}, 0, False),
        ({"repetition_penalty": 1e31}, 0, False),
        ({"presence_penalty": 0.1, "logprobs": 0}, 0, False),
        ({"logit_bias": {3: 1.0}, "logprobs": 0}, 0, False),
        ({"allowed_token_ids": (3, 4)}, 0, True),
        ({"allowed_token_ids": (3, 4), "logprobs": 0}, 0, False),
        ({"min_tokens": 3}, 2, True),
        ({"min_tokens": 3, "allowed_token_ids": (3, 4)}, 2, False),
        ({"min_tokens": 3, "allowed_token_ids": (3, 4)}, 3, True),
        ({"min_tokens": 3, "logprobs": 0}, 2, False),
        ({"min_tokens": 3, "logprobs": 0}, 3, True),
        ({"structured": {"json": True}}, 0, True),
        ({"structured": {"json": True}, "min_tokens": 3}, 2, False),
        ({"structured": {"json": True}, "min_tokens": 3}, 3, True),
    ],
    ids=str,
)
def test_what_is_taken(params: dict[str, Any], n_output: int, is_taken: bool) -> None:
    request = new_request(params, n_output)
    rows = [segment(request, 2), segment(request, 1)]
    assert StepRules(ROOM, 2000).take(rows, [request, new_request({})]) == is_taken
    assert any(is_left(request) for is_left in LEFT_TO_HOST.values()) != is_taken


def test_more_masks_than_there_is_room_for() -> None:
    request, plain = new_request({"structured": {"json": True}}), new_request({})
    rules = StepRules(ROOM, 2000)
    assert rules.take([segment(request, 2), segment(plain, 5)], [request, plain])
    assert not rules.take([segment(request, 3)], [request])
    assert not rules.take([segment(request, 1), segment(request, 1)], [request, request])
    assert not StepRules(replace(ROOM, masks=0), 2000).take([segment(request, 0)], [request])


@pytest.mark.parametrize("n_seats", [1, 2, 5])
def test_more_requests_than_seats(model: Transformer, n_seats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some batches fit, others are decided by the host, and seats change hands."""
    monkeypatch.setattr(tables, "MOST_SEATS", n_seats)
    requests = new_requests(["penalised", "warm", "restricted"], n=12, max_tokens=16)
    truth = [true_output(model, one) for one in requests]
    texts = [[*one.prompt, *output] for one, output in zip(requests, truth, strict=True)]
    rig = new_rig(model, proposing(Trees(texts, hidden, has_chains=True), 5), lookahead=5, captured=(5, 6), max_rows=4)
    spy = Spy(rig, monkeypatch)
    assert rig.run(requests) == truth
    assert spy.of_trees
    assert (spy.n_eager > 0) == (n_seats < 4)


def test_a_request_that_comes_back_is_counted_anew(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted, while others take its slot and its seat."""
    monkeypatch.setattr(tables, "MOST_SEATS", 2)
    requests = new_requests(["penalised"], n=8, max_tokens=24)
    truth = [true_output(model, one) for one in requests]
    texts = [[*one.prompt, *output] for one, output in zip(requests, truth, strict=True)]
    rig = new_rig(
        model, scripted(chance(texts), 3), lookahead=3, n_pages=18, max_tokens=64, max_rows=3, captured=(3, 3)
    )
    assert rig.run(requests) == truth
    assert rig.scheduler.n_preemptions > 0


def test_a_launch_that_fails_is_told_again(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = new_requests(["penalised", "restricted"], n=4, max_tokens=20)
    truth = [true_output(model, one) for one in requests]
    texts = [[*one.prompt, *output] for one, output in zip(requests, truth, strict=True)]
    rig = new_rig(model, scripted(chance(texts), 3), lookahead=3, captured=(3, 3))
    runner = rig.round.verifier._runner  # type: ignore[attr-defined]
    run, n_runs = runner.run, 0

    def fails(*given: Any) -> Any:
        nonlocal n_runs
        n_runs += 1
        ran = run(*given) if n_runs % 6 else None
        if n_runs % 3 == 0:  # before or after it
            raise ConnectionError
        return ran

    monkeypatch.setattr(runner, "run", fails)
    for request in requests:
        rig.scheduler.add(request)
    n_failed = 0
    while rig.scheduler.has_work:
        try:
            rig.play()
        except ConnectionError:
            n_failed += 1
    assert n_failed > 3
    assert [request.output for request in requests] == truth
