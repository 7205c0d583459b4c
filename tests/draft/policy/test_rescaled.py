"""What was kept from a busy machine, on a quiet one, and the reverse: the first rounds find the scale of kept times.
The clock is a number."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from saguaro.draft.policy.cost import MOST_KEPT, MOST_KEPT_AT, TRIED, Scale, SecondsByCount
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import MeasuredMisses
from saguaro.draft.policy.modes import WARM_UP
from saguaro.types import DRAFT, NGRAM
from tests.draft.policy.test_prepare import Play
from tests.draft.policy.test_prepare import World as Machine
from tests.draft.policy.world import Clock, Counting, Stepping, World


@dataclass(frozen=True)
class Pair:
    """A target whose verification takes a second and 0.05 s for each token speculated, and its draft."""

    step_s: float
    stands: Sequence[int]  # how many tokens of a speculation are accepted, in turn


PAIRS = {
    "a good, fast draft": Pair(0.05, [4, 3, 4, 2]),
    "a usual one": Pair(0.2, [0, 1, 2, 4]),
    "only the first token pays": Pair(0.25, [1]),
    "it hardly pays": Pair(0.45, [1, 2, 0, 4]),
    "it does not pay": Pair(0.8, [0, 1]),
    "a slow draft": Pair(1.2, [4]),
    "a bad draft": Pair(0.3, [0, 0, 0, 1]),
}
BUSY = {  # how many times as long target and draft took when it was learnt
    "the target was slow": (3.0, 1.0),
    "the draft was slow": (1.0, 3.0),
    "both were slow": (4.0, 4.0),
    "the target is slow now": (1 / 3, 1.0),
    "the draft is slow now": (1.0, 1 / 3),
    "both are slow now": (1 / 4, 1 / 4),
    "nothing was": (1.0, 1.0),
}


class Machines:
    """Rounds of one pair on machines of any pace."""

    def __init__(self, pair: Pair, target: float = 1.0, draft: float = 1.0, state: Any = None) -> None:
        self.clock, self.pair = Clock(), pair
        model, learnt = Stepping(self.clock, draft * pair.step_s, pair.stands), Learnt(self.clock)
        misses = MeasuredMisses(model, Counting(self.clock, NGRAM, n_most=1), learnt)
        self.world = World(self.clock, misses, learnt, verify_s=target)
        self.world.token_s = 0.05 * target
        if state is not None:
            self.world.policy.restore(json.loads(json.dumps(state)))

    def play(self, n: int) -> float:
        """Tokens per second of n rounds."""
        stands, began, before = self.pair.stands, self.clock.now, sum(self.world.accepted)
        for at in range(n):
            self.world.play(accepted={DRAFT: stands[at % len(stands)]})
        return (n + sum(self.world.accepted) - before) / (self.clock.now - began)

    def lengths(self, n: int) -> list[int]:
        """What is speculated in n rounds more."""
        self.play(n)
        return self.world.lengths[-n:]


def learnt_on(pair: Pair, target: float = 1.0, draft: float = 1.0) -> Any:
    machine = Machines(pair, target, draft)
    machine.play(600)
    return machine.world.policy.state()


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize("name", PAIRS)
def test_a_start_is_as_fast_as_if_the_true_times_were_kept(name: str, busy: str) -> None:
    """Nothing is known of the present before the second round."""
    pair = PAIRS[name]
    right = Machines(pair, state=learnt_on(pair)).play(100)
    misled = Machines(pair, state=learnt_on(pair, *BUSY[busy]))
    assert misled.play(100) >= 0.97 * right


@pytest.mark.parametrize("name", PAIRS)
def test_after_ten_rounds_the_decisions_are_those_of_the_true_times(name: str) -> None:
    """A target that was three times as slow makes drafting look cheap."""
    pair = PAIRS[name]
    right, misled = Machines(pair, state=learnt_on(pair)), Machines(pair, state=learnt_on(pair, 3.0, 1.0))
    right.play(10)
    misled.play(10)
    expected, found = right.lengths(20), misled.lengths(20)
    assert sum(one == other for one, other in zip(expected, found, strict=True)) >= 17


def test_a_scale_is_found_with_outliers_and_kept_times_then_count_little() -> None:
    kept = SecondsByCount(is_reference=True)
    for n in (1, 3, 5) * 200:
        kept.add(n, 3.0 * (10 + n))
    restored = SecondsByCount(is_reference=True)
    restored.restore(json.loads(json.dumps(kept.state())))
    for n, slower in ((1, 1.0), (3, 8.0), (1, 1.0), (5, 9.0)):
        restored.add(n, slower * (10 + n))
    assert restored.measured is not None
    assert restored.at(3) == pytest.approx(13.0, rel=0.01)
    assert restored.slope() == pytest.approx(1.0, rel=0.02)
    restored.add(1, 11.0)
    assert restored.measured is None
    assert restored.n <= MOST_KEPT + TRIED
    assert restored.known[3].n <= MOST_KEPT_AT + TRIED
    for _ in range(25):  # another shape
        restored.add(5, 30.0)
    assert restored.at(5) == pytest.approx(30.0, rel=0.1)


def test_what_is_not_measured_yet_has_the_scale_of_its_kind_or_of_the_target() -> None:
    clock = Clock()
    first = Learnt(clock)
    for _ in range(60):
        first.alone.add(1, 3.0)
        first.beside.add(1, 6.0)
        for rows in (1, 2):
            first.drafted(rows, 2, 0.6 * rows)
    second = Learnt(clock)
    second.restore(json.loads(json.dumps(first.state())))
    second.alone.add(1, 1.0)
    assert second.beside.at(1) == pytest.approx(2.0, rel=0.01)
    assert second.drafting(2).at(2) == pytest.approx(0.4, rel=0.01)
    second.drafted(1, 2, 0.6)
    assert second.drafting(2).at(2) == pytest.approx(1.2, rel=0.01)
    for _ in range(TRIED):
        second.drafted(1, 2, 0.6)
        second.alone.add(1, 1.0)
    assert second.drafting(2).at(2) == pytest.approx(1.2, rel=0.01), "found, and applied to all sizes"
    assert second.alone.at(1) == pytest.approx(1.0, rel=0.01)


def test_without_kept_times_there_is_nothing_to_rescale() -> None:
    new = SecondsByCount()
    new.restore(SecondsByCount().state())
    new.add(2, 7.0)
    assert (new.measured, new.at(2), Scale().factor) == (None, 7.0, 1.0)


QUIET = Machine(20.0, 23.4, 18.4)  # preparing costs
SLOWED = Machine(60.0, 70.2, 68.4)  # learnt while other programs ran: preparing paid


@pytest.mark.parametrize(("before", "after"), [(SLOWED, QUIET), (QUIET, SLOWED)])
def test_whether_to_prepare_is_tried_again_soon_on_another_machine(before: Machine, after: Machine) -> None:
    """The first stretch shows that the times do not hold any more. The other mode is visited at once, not after a gap
    that had grown."""
    pays = after.with_s < after.without_s
    for seed in range(10):
        first, second = Play(2, seed), Play(2, seed)
        first.rounds(3000, before)
        assert first.policy._books[2].gap > 100
        second.learnt.restore(json.loads(json.dumps(first.learnt.state())))
        second.policy.restore(json.loads(json.dumps(first.policy.state())))
        found = second.rounds(140, after)
        assert pays in found[: 10 + 2 * WARM_UP]
        assert found[100:].count(pays) >= 30
