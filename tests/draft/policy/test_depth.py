"""How many captured steps are drafted, and how far a prepared speculation is grown. The clock is a number."""

from collections.abc import Sequence

import pytest

from saguaro.draft.policy.depth import MeasuredDepth
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import EVERY_FULL, MeasuredMisses, NoProposer
from saguaro.types import DRAFT
from tests.draft.policy.world import Clock, K, Stepping, World

HALF = [4, 3, 2, 1]  # that so many tokens stand, in turn: each further one stands less often


def drafted(step_s: float, stands: Sequence[int], n_rounds: int = 900) -> tuple[World, Stepping, list[int]]:
    """A model with captured steps that drafted so many misses, and its steps of each of the last 200."""
    clock = Clock()
    model, learnt = Stepping(clock, step_s, stands, choices=(1, 2, 3, 4)), Learnt(clock)
    world, found = World(clock, MeasuredMisses(model, NoProposer(), learnt), learnt), []
    for at in range(n_rounds):
        world.play(accepted={DRAFT: stands[at % len(stands)]})
        found.append(model.n_steps)
    return world, model, found[-200:]


@pytest.mark.parametrize(
    ("step_s", "stands", "steps"),
    [
        (0.01, [4], 4),  # nearly free
        (0.1, [2], 2),  # the third token never stands: 3 / 1.2
        (0.2, HALF, 3),  # 2.75 / 1.4, 3.25 / 1.6 and 3.5 / 1.8
        (0.4, [0, 1, 1, 1], 1),  # 1.75 / 1.4
    ],
)
def test_as_many_captured_steps_as_pay(step_s: float, stands: list[int], steps: int) -> None:
    """A verification takes a second."""
    expected = {n: (1 + sum(min(n, k) for k in stands) / len(stands)) / (1 + n * step_s) for n in range(1, K + 1)}
    assert expected[steps] >= 0.97 * max(expected.values())
    _, _, found = drafted(step_s, stands)
    assert found.count(steps) >= 0.9 * len(found)


def test_all_steps_are_taken_now_and_then() -> None:
    """So that what more steps are worth by now is seen."""
    _, _, found = drafted(0.1, [2])
    assert 2 <= found.count(K) <= 2 * 200 // EVERY_FULL


@pytest.mark.parametrize("choices", [(), (1, 2, 3, 4)])
@pytest.mark.parametrize(
    ("step_s", "prepared", "steps"),
    [
        (0.05, 1, 3),  # all of them stand, for little
        (0.05, 3, 1),
        (0.05, 4, 0),  # there is no room for more
        (0.9, 2, 0),  # two of five tokens a second are lost for one
    ],
)
def test_prepared_speculations_grow_as_far_as_pays(
    choices: tuple[int, ...], step_s: float, prepared: int, steps: int
) -> None:
    clock = Clock()
    model, learnt = Stepping(clock, step_s, [4], choices), Learnt(clock)
    world = World(clock, MeasuredMisses(model, NoProposer(), learnt), learnt)
    depth = MeasuredDepth(model, learnt)
    row = world.row(0)
    for _ in range(40):  # learns what steps and verifications take
        learnt.drafted(1, K, K * step_s)
        learnt.by_steps.add([1.0, 2.0, 3.0, 4.0])
        learnt.by_model.add(K, K)
        learnt.alone.add(1 + K, 1.0)
    model.prepared(row, prepared)
    depth.deepen([(row, K)], [row])
    assert len(row.speculation) == prepared + steps
    assert model.deepened in ([steps], [])


def test_nothing_is_grown_further_before_anything_is_known() -> None:
    clock = Clock()
    model, learnt = Stepping(clock, 0.01, [4]), Learnt(clock)
    world = World(clock, MeasuredMisses(model, NoProposer(), learnt), learnt)
    model.prepared(world.row(0), 1)
    MeasuredDepth(model, learnt).deepen([(world.row(0), K)], [world.row(0)])
    assert not model.deepened
