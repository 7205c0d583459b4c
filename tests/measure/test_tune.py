"""What `saguaro tune` counts: each batch size first learns and is then measured, in turn, on the same texts."""

from collections.abc import Sequence
from typing import Any

import pytest

from saguaro import SamplingParams
from saguaro.engine.placement import Placement
from saguaro.measure import candidate, interleaved, tune
from saguaro.measure.metrics import Summary
from saguaro.measure.tune import Measured, Plan, batch_sizes, measure_placements

SLOW, FAST = Placement(), Placement("process", 1)


class Engine:
    """Takes so many seconds per call, the first calls longer."""

    def __init__(self, clock: "Clock", seconds: float, n_slow: int = 0) -> None:
        self.clock, self.seconds, self.n_slow = clock, seconds, n_slow
        self.asked: list[tuple[list[list[int]], list[int | None]]] = []
        self.asks, self.is_forced, self.forced = self, False, list[bool]()
        self.engine: Any = self
        self.round: Any = self
        self.observers: list[Any] = []

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        self.asked.append((list(prompts), [own.seed for own in params]))
        self.forced.append(self.is_forced)
        self.clock.now += self.seconds * (10 if len(self.asked) <= self.n_slow else 1)
        return [[1, 2, 3, 4]] * len(prompts)


class Clock:
    """In place of the time module."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(candidate, "time", fake)
    monkeypatch.setattr(tune, "generate_by", lambda engine: engine.generate)
    return fake


def test_speed_is_that_of_the_second_half(clock: Clock) -> None:
    slow, fast = Engine(clock, 0.5), Engine(clock, 0.1, n_slow=1)
    told: list[tuple[str, int, int]] = []
    plan = Plan(batches=[1, 2], seconds=4.0, prompts=[[1], [2], [3]], params=SamplingParams(seed=5))
    found = measure_placements({SLOW: slow, FAST: fast}, plan, lambda *told_: told.append(told_))  # type: ignore[dict-item]
    rates = {(one.placement, one.batch): one.tok_s for one in found}
    assert rates == pytest.approx({(SLOW, 1): 8.0, (FAST, 1): 40.0, (SLOW, 2): 16.0, (FAST, 2): 80.0})
    assert slow.asked == fast.asked, "the same prompts and seeds, as often"
    assert [prompts for prompts, _ in slow.asked][:4] == [[[1]], [[2]], [[3]], [[1]]]
    assert len({seeds[0] for _, seeds in slow.asked[:20]}) == 20
    assert slow.observers == fast.observers == []
    assert [stage for stage, done, total in told if done == total] == ["batch of 1", "batch of 2"]
    assert all(0 <= done <= total for _, done, total in told)


def test_each_half_has_a_turn_at_least(clock: Clock) -> None:
    one = Engine(clock, 60.0)
    plan = Plan(batches=[4], seconds=0.1, prompts=[[1]], params=SamplingParams())
    (found,) = measure_placements({SLOW: one}, plan, lambda *_: None)  # type: ignore[dict-item]
    assert len(one.asked) == 2
    assert one.forced == [True, False], "while it learns, a draft is always asked"
    assert found.tok_s == pytest.approx(16 / 60)


@pytest.mark.parametrize(
    ("sources", "prepared", "habit"),
    [
        ({"draft": 0.9}, 0.0, "drafts just in time"),
        ({"cache": 0.6, "draft": 0.3}, 0.9, "prepares"),
        ({"empty": 0.95, "draft": 0.05}, 0.0, "drafts nothing"),
        ({"empty": 0.6, "ngram": 0.4}, 0.0, "repeats from the text"),
        ({"empty": 0.6, "suffix": 0.4}, 0.0, "repeats from the text"),
        ({}, 0.0, "drafts nothing"),
    ],
)
def test_what_an_engine_did(sources: dict[str, float], prepared: float, habit: str) -> None:
    assert Measured(placement=SLOW, batch=1, tok_s=1.0, prepared=prepared, sources=sources).habit == habit


def test_batch_sizes_end_with_the_largest() -> None:
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(1) == [1]


def test_a_candidate_is_watched_until_it_is_not(clock: Clock) -> None:
    one = candidate.Candidate("x", Engine(clock, 1.0), True)  # type: ignore[arg-type]
    one.watch()
    assert isinstance(one.summary, Summary)
    assert len(one.llm.engine.round.observers) == 1  # type: ignore[union-attr]
    one.unwatch()
    assert one.llm.engine.round.observers == []  # type: ignore[union-attr]
    assert interleaved.rotated([one], 3) == [one]
