"""Rounds that nothing is prepared for, between others that are; and batches so large that less is prepared for each.

The tokens are the true ones, and a draft that is the target is always right: were a key of a branch that nobody copied
taken for computed, or a branch taken for another, it would show in what is accepted.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from saguaro import methods
from saguaro.algo.planning import Ahead, Planned
from saguaro.draft import growth
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.planner import Last
from saguaro.draft.policy.prepare import AlwaysPrepare
from saguaro.draft.rows import DraftRow
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.methods import draft_side
from saguaro.model.transformer import Transformer
from saguaro.target.request import Request
from saguaro.types import Joined, Outcome, RoundEvent
from tests.draft.config import new_config
from tests.round.tabular import under
from tests.round.test_conformance import N_REQUESTS, VARIANTS, Rig, new_rig, variant
from tests.target.test_round import N_KNOWN, new_model, new_requests, true_output

PREPARING = [name for name in VARIANTS if variant(name)[0].prepares]
PLAIN = ("greedy", "warm")  # a captured draft knows temperatures, and no other rules
KERNELS: dict[str, Callable[[], Kernels | None]] = {"eager": lambda: None, "captured": plain_kernels}
KINDS = [(name, kind) for name in PREPARING for kind in KERNELS]


class Moody(AlwaysPrepare):
    """Prepares as chance will have it."""

    def __init__(self, seed: int, share: float = 0.6) -> None:
        self._chance, self._share = Random(seed), share
        self.decided: list[bool] = []

    def prepares(self, asked: Sequence[DraftRow], known: Iterable[DraftRow]) -> bool:
        """See Prepares."""
        assert set(asked) <= set(known)
        self.decided.append(self._chance.random() < self._share)
        return self.decided[-1]


@pytest.fixture(scope="module")
def target() -> Transformer:
    return new_model(seed=0)


@pytest.fixture(scope="module")
def truth(target: Transformer) -> list[list[int]]:
    return [true_output(target, request) for request in new_requests(n=N_REQUESTS)]


def assert_always_right(rig: Rig, requests: Sequence[Request]) -> None:
    """Serve them all: whatever a model speculates is accepted."""
    for request in requests:
        rig.scheduler.add(request)
    while rig.scheduler.has_work:
        assert all(commit.k == commit.length for commit in rig.play() if commit.source in ("cache", "draft"))
    assert rig.sources["cache"] > 5


@pytest.mark.parametrize(("method", "kind"), KINDS)
def test_rounds_without_preparation_change_nothing(
    method: str, kind: str, target: Transformer, truth: list[list[int]]
) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, target.without([1]), **given, lookahead=3, kernels=KERNELS[kind]())
    rig.side.policy.prepare = moody = Moody(seed=1)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert {True, False} == set(moody.decided)
    assert rig.sources["cache"] > 0


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("fallback", ["draft", "ngram"])
@pytest.mark.parametrize("max_rows", [1, 3, 8])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_draft_that_is_the_target_is_right_however_often_it_prepares(
    share: float, max_rows: int, fallback: str, kind: str, target: Transformer
) -> None:
    """Misses of an n-gram leave the draft's own keys behind; those of the model do not."""
    method = under("shared", "ssd", fallback=fallback)
    rig = new_rig(method, target, target, kernels=KERNELS[kind](), max_rows=max_rows)
    rig.side.policy.prepare = Moody(seed=max_rows, share=share)
    assert_always_right(rig, new_requests(PLAIN, n=N_REQUESTS, max_tokens=40))
    assert rig.sources[fallback] > 0 or share > 0.5


@pytest.mark.parametrize(("method", "kind"), KINDS)
@pytest.mark.parametrize("every", [1, 2])
def test_requests_that_are_not_prepared_for_are_never_hit(
    every: int, method: str, kind: str, target: Transformer, truth: list[list[int]]
) -> None:
    """All of them, or every second: the tokens are the true ones, and the others are hit as before."""
    parts, given = variant(method)
    rig = new_rig(parts, target, target.without([1]), **given, lookahead=3, kernels=KERNELS[kind]())
    requests = new_requests(n=N_REQUESTS)
    for request in requests[::every]:
        request.params = replace(request.params, prepare=False)
    rig.side.policy.prepare = AlwaysPrepare()
    events: list[RoundEvent] = []
    rig.round.observers.append(events.append)
    assert rig.run(requests) == truth
    plain = {request.id for request in requests[::every]}
    rows = [row for event in events for row in event.rows]
    assert all(row.prepares == (row.request not in plain) for row in rows)
    assert not any(row.source == "cache" for row in rows if row.request in plain)
    assert any(row.source == "cache" for row in rows if row.request not in plain) == (every > 1)
    assert all(len(row.drafted) == row.length for row in rows)


@pytest.mark.parametrize("kind", KERNELS)
def test_nobody_who_looks_on_keeps_a_device_waiting(
    kind: str, target: Transformer, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it computes by itself, the next round is launched before observers are told of the last."""
    rig = new_rig(under("shared", "ssd"), target, target.without([1]), kernels=KERNELS[kind]())
    launched, launch = [0], rig.round.verifier.launch
    told: list[tuple[int, int]] = []

    def count(*given: Any) -> Any:
        launched[0] += 1
        return launch(*given)

    monkeypatch.setattr(rig.round.verifier, "launch", count)
    rig.round.observers.append(lambda event: told.append((event.number, launched[0])))
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    n_ahead = int(rig.round.verifier.runs_ahead)
    assert told == [(number, min(number + n_ahead, len(told))) for number in range(1, len(told) + 1)]


@pytest.mark.parametrize("most", [1, 8, 16, 64])
@pytest.mark.parametrize("method", ["ssd", "ssd-uniform", "amusd"])
def test_large_batches_prepare_less_for_each(
    most: int, method: str, target: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As requests end the batch shrinks and the budget of a row grows, while trees of the larger batch are hit."""
    monkeypatch.setattr(growth, "MOST_EXPANDED", most)
    rig = new_rig(under("shared", method), target, target, kernels=plain_kernels(), budget=6)
    drafter, budgets = rig.side.drafter, set[tuple[int, int]]()
    assert isinstance(drafter, TreeDrafter)
    prepare = drafter._growth.prepare

    def watched(size: int, shape: growth.Shape, is_late: Callable[[], bool]) -> None:
        budgets.add((size, shape.budget))
        prepare(size, shape, is_late)

    monkeypatch.setattr(drafter._growth, "prepare", watched)
    requests = new_requests(PLAIN, n=N_REQUESTS)
    for at, request in enumerate(requests):
        request.params = replace(request.params, max_tokens=8 + (6 if at < N_REQUESTS - 1 else 10) * at)
    assert_always_right(rig, requests)
    whole = 1 if method == "amusd" else 6
    assert budgets == {(size, max(1, min(whole, most // size))) for size in (1, 2, 4, 8)}


def test_products_of_all_nodes_are_those_that_are_fast() -> None:
    linear = pytest.importorskip("saguaro.kernels.linear", reason="no Triton")
    assert growth.MOST_EXPANDED == linear.MAX_ROWS


class Attentive(Last):
    """A planner that sees that it is told of what it was asked about."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked: dict[int, int] = {}  # slot -> length in flight
        self.n_learnt = 0

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        """One continuation."""
        self.asked = dict(zip(ahead.slots.tolist(), ahead.length.tolist(), strict=True))
        return super().plan(ahead, budget)

    def learn(self, outcome: Outcome) -> None:
        """Of rows in flight."""
        found = dict(zip(outcome.slots.tolist(), outcome.length.tolist(), strict=True))
        assert found in ({}, self.asked), "an outcome of another round"
        self.n_learnt += len(found)


def test_a_planner_learns_nothing_of_rounds_it_did_not_plan_for(
    target: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one round to the next speculations are of another length: outcomes cannot be taken for each other."""
    planner, moody = Attentive(), Moody(seed=3, share=0.5)
    monkeypatch.setattr(methods, "make_planner", lambda *given: planner)
    side = draft_side(new_config(N_KNOWN, growth="continuation", n_tokens=2000), target)
    side.policy.prepare = moody
    side.admit([Joined(slot, request.prompt) for slot, request in enumerate(new_requests(n=2))])
    outcome, slots = Outcome.nothing(), torch.tensor([0, 1])
    for at in range(40):
        spec = side.respond(outcome, slots.tolist(), [at % 4 + 1] * 2)
        assert spec.times is not None
        assert spec.times.is_prepared == (at > 0 and moody.decided[-1])
        side.prepare()
        outcome = Outcome(slots, spec.length, torch.tensor([0, 1]), torch.tensor([at, at + 1]))
    n_told = sum(before and now for before, now in pairwise(moody.decided))
    assert planner.n_learnt == 2 * n_told > 0, "it is told at the next preparation, or never"
