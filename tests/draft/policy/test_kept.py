"""What is kept from one start to the next: all of it, only where it fits, and never a damaged part."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro.draft.chance import Chances
from saguaro.draft.drafter import NoDrafter
from saguaro.draft.policy.kept import EVERY_S, FIRST_S, Kept, file_name, read
from saguaro.draft.policy.learnt import WORTH_KEEPING, Learnt
from saguaro.draft.policy.misses import KEPT_TRIES, FixedMisses, MeasuredMisses, NoProposer
from saguaro.draft.policy.modes import LEAST_GAP
from saguaro.draft.policy.policy import Policy
from saguaro.draft.policy.prepare import MeasuredPrepare, NeverPrepare
from saguaro.round import DraftSide
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, Joined, Outcome
from tests.draft.policy.test_prepare import COSTS, PAYS, Play
from tests.draft.policy.world import Clock, Counting, Stepping, World

FACTS = {"target": "a", "cores": 2}


def new_world(clock: Clock, state: Any = None, step_s: float = 0.7) -> World:
    """One row and a model that does not pay if a step takes 0.7 s."""
    learnt = Learnt(clock)
    world = World(clock, MeasuredMisses(Stepping(clock, step_s), Counting(clock, NGRAM, n_most=1), learnt), learnt)
    world.policy.prepare = MeasuredPrepare(learnt)
    if state is not None:
        world.policy.restore(state)
    return world


def as_read(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("step_s", "source"), [(0.7, EMPTY), (0.05, DRAFT)])
def test_a_second_start_is_right_from_the_first_round(step_s: float, source: int) -> None:
    clock = Clock()
    first = new_world(clock, step_s=step_s)
    for _ in range(200):
        first.play(accepted={DRAFT: 1})
    state = as_read(first.policy.state())
    second = new_world(Clock(), state, step_s)
    again = as_read(second.policy.state())
    for name in ("alone", "beside", "drafting", "by_steps"):
        assert again["learnt"][name] == state["learnt"][name]
    assert again["misses"] == state["misses"]
    found = [second.play(accepted={DRAFT: 1})[0] for _ in range(20)]
    assert found.count(DRAFT) == (20 if source == DRAFT else KEPT_TRIES), "what speaks against it is tried once"
    learnt = second.policy.learnt
    assert learnt.alone.at(1) == pytest.approx(1.0)
    assert learnt.drafting(1).slope() == pytest.approx(step_s)


def test_rounds_are_learnt_though_the_time_to_write_has_come(tmp_path: Path) -> None:
    """A slow machine has measured too little by then: it goes on learning until there is enough to write."""
    clock = Clock()
    kept = Kept(tmp_path / "it.json", FACTS, clock)
    policy = Policy(Learnt(clock), FixedMisses(NoProposer()), NeverPrepare())
    side = DraftSide(NoDrafter(), policy, lookahead=1, n_vocab=9, kept=kept)
    side.admit([Joined(0, [1])])
    outcome = Outcome.nothing()
    for _ in range(WORTH_KEEPING + 10):
        side.respond(outcome, [0], [1])
        side.prepare()
        clock.now += FIRST_S
        zero = torch.tensor([0])
        outcome = Outcome(zero, zero, zero, zero)
    assert policy.learnt.is_sure
    assert kept.read() is not None


@pytest.mark.parametrize(("world", "pays"), [(PAYS, True), (COSTS, False)])
def test_whether_preparing_pays_is_kept(world: Any, pays: bool) -> None:
    first = Play(2)
    first.rounds(400, world)
    second = Play(2)
    second.learnt.restore(as_read(first.learnt.state()))
    second.policy.restore(as_read(first.policy.state()))
    assert second.rounds(100, world).count(not pays) <= 8


def test_rates_of_candidates_are_kept() -> None:
    chances, twin = (Chances(4, torch.device("cpu")) for _ in range(2))
    bins = torch.randint(0, 90, (1, 50, 4), generator=torch.Generator().manual_seed(0))
    chances.learn(bins, torch.randint(-1, 4, (1, 50)), torch.ones(1, 50, 4, dtype=torch.bool))
    twin.restore(as_read(chances.state()))
    assert torch.equal(twin.counts, chances.counts)
    assert torch.equal(twin.rates[0], chances.rates[0])
    for broken in ([[1.0]], [[1.0] * 3, [2.0] * 3], [[math.nan] * 184] * 2, [[2.0] * 184, [1.0] * 184], None):
        with pytest.raises((ValueError, TypeError)):
            twin.restore(broken)
    assert torch.equal(twin.counts, chances.counts)


# Files


def test_it_is_written_now_and_then(tmp_path: Path) -> None:
    clock = Clock()
    kept = Kept(tmp_path / "below" / "it.json", FACTS, clock)
    assert kept.read() is None
    assert not kept.is_due
    clock.now += FIRST_S
    assert kept.is_due
    kept.write({"a": [1.5]})
    assert kept.read() == {"a": [1.5]}
    assert not kept.is_due
    clock.now += EVERY_S
    assert kept.is_due
    kept.write({"a": [2.5]})
    assert read(kept.path, FACTS) == {"a": [2.5]}
    assert [path.name for path in kept.path.parent.iterdir()] == ["it.json"], "nothing temporary is left"
    assert kept.path.parent.stat().st_mode & 0o077 == 0


def test_other_circumstances_have_another_file(tmp_path: Path) -> None:
    assert file_name(FACTS) != file_name({**FACTS, "cores": 3})
    kept = Kept(tmp_path / "it.json", FACTS, Clock())
    kept.write({"a": []})
    assert read(kept.path, {**FACTS, "cores": 3}) is None, "even under the same name"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 2}', '{"format": 1, "facts": {}, "learnt": {}}', "\x00\xff", "[" * 10**5],
)
def test_a_damaged_file_is_ignored(text: str, tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    assert Kept(path, {}, Clock()).read() is None


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = Kept(tmp_path / "file" / "it.json", FACTS, Clock())
    kept.write({"a": []})
    assert kept.read() is None
    assert not kept.is_due, "it is not tried again"


def test_readers_never_see_a_part_of_it(tmp_path: Path) -> None:
    path, state = tmp_path / "it.json", {"a": [0.5] * 20000}
    Kept(path, FACTS, Clock()).write(state)
    found: list[Any] = []

    def write() -> None:
        for _ in range(20):
            Kept(path, FACTS, Clock()).write(state)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found.append(read(path, FACTS))
    assert len(found) > 3
    assert all(each == state for each in found)


def paths_of(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a state that holds a number or a list."""
    if isinstance(state, dict):
        return [p for key, value in state.items() for p in paths_of(value, (*path, key))]
    if isinstance(state, list):
        return [path, *(p for at, value in enumerate(state[:3]) for p in paths_of(value, (*path, at)))]
    return [path]


def learnt_state() -> Any:
    """All that a policy keeps, after some rounds."""
    first = Play(2)
    first.rounds(400, PAYS)
    world = new_world(Clock())
    for _ in range(100):
        world.play(accepted={DRAFT: 1, CACHE: 2})
    return {**as_read(world.policy.state()), "prepare": as_read(first.policy.state())}


def place_of(state: Any, path: tuple[Any, ...]) -> Any:
    """What holds the last step of a path."""
    for key in path[:-1]:
        state = state[key]
    return state


def test_no_number_in_it_stops_the_decisions() -> None:
    """Numbers that no rounds lead to are refused, or rounds go on with them."""
    state = learnt_state()
    n_refused = n_played = 0
    for path in paths_of(state):
        if not isinstance(place_of(state, path)[path[-1]], float):
            continue
        for value in (-1.0, 0.0, 1e-320, 1e308):
            odd = as_read(state)
            place_of(odd, path)[path[-1]] = value
            try:
                world, play = new_world(Clock(), odd), Play(2)
                play.learnt.restore(odd["learnt"])
                play.policy.restore(odd["prepare"])
            except ValueError:
                n_refused += 1
                continue
            for _ in range(6):
                world.play(accepted={DRAFT: 1, CACHE: 2})
            play.rounds(LEAST_GAP + 10, PAYS)
            n_played += 1
    assert min(n_refused, n_played) > 20


def test_a_better_mode_that_was_never_measured_is_refused() -> None:
    empty = {"seconds": [0.0, 0.0, 0.0], "made": []}
    with pytest.raises(ValueError, match="never measured"):
        MeasuredPrepare(Learnt()).restore({"2": {"best": True, "loss": 0.1, "gap": 32, "ways": [empty, empty]}})


def test_whatever_is_damaged_in_it_is_an_error_that_is_told(tmp_path: Path) -> None:
    """Any number replaced by a text: no value of it may reach a decision."""
    state = learnt_state()
    Policy(Learnt(), *_parts()).restore(state)
    for path in paths_of(state):
        if path[-1] in ("is_model", "best"):
            continue
        broken = as_read(state)
        place_of(broken, path)[path[-1]] = "many"
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            Policy(Learnt(), *_parts()).restore(broken)


def _parts() -> tuple[MeasuredMisses, MeasuredPrepare]:
    learnt, clock = Learnt(), Clock()
    return MeasuredMisses(Stepping(clock, 1.0), Counting(clock, NGRAM), learnt), MeasuredPrepare(learnt)
