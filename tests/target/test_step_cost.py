"""Prompts beside decoding rows: how much time of a step they get, by steps that take as long as a test says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from saguaro.config import SamplingParams
from saguaro.kv.pages import PagePool
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch, Scheduler
from saguaro.target.step_cost import UNBOUND, LatencyBudget, StepCost, Work
from saguaro.types import Outcome, Speculation

STEP_S, TOKEN_S, PAIR_S = 0.012, 0.0008, 1.4e-6  # about what a model of 135M parameters takes on two cores
PAGE = 16

Cost = Callable[[Work], float]


def usual(work: Work) -> float:
    return STEP_S + TOKEN_S * work.n_tokens + PAIR_S * work.n_pairs


@dataclass
class Played:
    """One step."""

    seconds: float
    n_read: int  # tokens of prompts
    decodes: bool


class Play:
    """A scheduler whose steps take what a function says; every token is 0."""

    def __init__(self, patience: LatencyBudget, cost: Cost = usual, max_tokens: int = 512) -> None:
        pool = PagePool(4096, PAGE, False)
        self.scheduler = Scheduler(
            pool, max_length=16_000, max_rows=8, max_tokens=max_tokens, lookahead=0, patience=patience
        )
        self.cost = cost

    def add(self, n_prompt: int, max_tokens: int) -> Request:
        request = Request("r", [0] * n_prompt, SamplingParams(max_tokens=max_tokens), seed=0)
        self.scheduler.add(request)
        return request

    def step(self) -> Played:
        batch = self.scheduler.next_batch()
        assert batch is not None
        decodes = any(row.request.n_pending == 1 for row in batch.rows)
        n_read = sum(row.n_tokens for row in batch.rows if row.request.n_pending > 1)
        seconds = self.cost(work_of(batch))
        none = torch.zeros(len(batch.sampling), dtype=torch.int64)
        outcome = Outcome(torch.tensor([row.request.slot for row in batch.sampling]), none, none, none)
        self.scheduler.took(batch, outcome, seconds)
        self.scheduler.commit(batch, Speculation.empty(len(batch.sampling)), outcome)
        return Played(seconds, n_read, decodes)

    def until(self, *requests: Request) -> list[Played]:
        """Steps until each of these has a token."""
        steps = []
        while any(request.n_output == 0 for request in requests):
            steps.append(self.step())
        return steps


def work_of(batch: Batch) -> Work:
    return sum((Work.of(row.start, row.n_tokens) for row in batch.rows), Work())


def beside_a_stream(patience: LatencyBudget, prompts: Sequence[int], cost: Cost = usual) -> list[Played]:
    """The steps in which these prompts are read while another request decodes."""
    play = Play(patience, cost)
    stream = play.add(20, 10_000)
    for _ in range(10):
        play.step()
    steps = play.until(*(play.add(n, 1) for n in prompts))
    assert stream.n_output == 10 + len(steps), "a step went by without a token for the row that decodes"
    return steps


def test_without_a_limit_a_chunk_late_in_a_long_prompt_takes_seconds() -> None:
    """Or the tests below could not fail."""
    assert max(step.seconds for step in beside_a_stream(UNBOUND, [8000])) > 5


@pytest.mark.parametrize("limit", [0.1, 0.2, 1.0])
def test_no_step_takes_longer_than_the_limit_once_the_pace_is_known(limit: float) -> None:
    steps = beside_a_stream(LatencyBudget(limit), [8000] * 3)
    a_page = usual(Work.of(8000, PAGE))  # what is read in any case
    assert max(step.seconds for step in steps[10:]) <= 1.1 * max(limit, a_page)
    assert max(step.seconds for step in steps) <= 2 * max(limit, a_page)


def test_the_time_that_there_is_is_used() -> None:
    """Reading takes hardly longer in all than in whole chunks: what is lost is what the stream decoded meanwhile."""
    free, bound = (beside_a_stream(patience, [8000] * 3) for patience in (UNBOUND, LatencyBudget(0.2)))
    assert len(bound) > 5 * len(free)
    assert sum(step.seconds for step in bound) < 1.15 * sum(step.seconds for step in free)


def test_prompts_alone_are_read_in_whole_chunks() -> None:
    play = Play(LatencyBudget(1e-9))
    assert [step.n_read for step in play.until(play.add(1200, 1))] == [512, 512, 176]


def test_once_nobody_decodes_chunks_are_whole_again() -> None:
    play = Play(LatencyBudget(0.05))
    stream = play.add(4, 6)
    play.step()
    reading = play.add(3000, 1)
    steps = play.until(reading)
    assert stream.finish_reason == "length"
    assert all(step.n_read < 100 for step in steps if step.decodes)
    assert [step.n_read for step in steps if not step.decodes][:4] == [512] * 4


def test_the_first_prompt_advances_by_a_page_however_short_the_time_is() -> None:
    play = Play(LatencyBudget(1e-9))
    stream = play.add(4, 10_000)
    play.step()
    first, second = play.add(10 * PAGE, 5), play.add(3 * PAGE, 5)
    assert [step.n_read for step in play.until(second)] == [PAGE] * 5  # every second step is for the shortest
    assert (first.n_computed, second.n_computed) == (2 * PAGE, 3 * PAGE)
    assert [step.n_read for step in play.until(first)] == [PAGE] * 8
    assert stream.n_output == 1 + 13


def test_what_one_prompt_leaves_goes_to_the_next() -> None:
    play = Play(LatencyBudget(0.2))
    play.add(4, 10_000)
    for _ in range(20):
        play.step()
    play.until(play.add(400, 1))  # the pace is known from now on
    short = [play.add(20, 1) for _ in range(4)]
    assert len(play.until(*short)) == 1


def test_a_machine_that_becomes_slow_is_noticed() -> None:
    """Something else takes the cores: within a few steps the prompts get fewer tokens; afterwards more again."""
    times = [1.0]

    def cost(work: Work) -> float:
        return times[0] * usual(work)

    play = Play(LatencyBudget(0.2), cost)
    play.add(4, 10_000)
    for _ in range(10):
        play.step()
    play.add(15_000, 1)
    for _ in range(20):
        play.step()
    times[0] = 5.0
    slow = [play.step() for _ in range(20)]
    assert slow[0].seconds > 0.6
    assert all(step.seconds < 0.25 or step.n_read == PAGE for step in slow[8:])
    times[0] = 1.0
    fast = [play.step() for _ in range(20)]
    assert min(step.seconds for step in fast[8:]) > 0.15


def test_one_hiccup_is_soon_forgotten() -> None:
    pace = StepCost()
    for _ in range(50):
        pace.learn(Work.of(100, 50), usual(Work.of(100, 50)))
    before = pace.room(0.2, 100)
    pace.learn(Work.of(100, 50), 60.0)
    assert pace.room(0.2, 100) >= before // 3
    for _ in range(6):
        pace.learn(Work.of(100, 50), usual(Work.of(100, 50)))
    assert pace.room(0.2, 100) >= 0.9 * before


def test_a_first_step_that_compiled_something_does_not_count_for_long() -> None:
    pace = StepCost()
    pace.learn(Work.of(0, 20), 30.0)
    for _ in range(20):
        pace.learn(Work.of(0, PAGE), usual(Work.of(0, PAGE)))
    assert pace.room(0.2, 0) > 4 * PAGE


def test_where_plain_steps_are_long_prompts_get_as_much_time() -> None:
    """A large model: steps without prompts take longer than the limit already."""

    def slow(work: Work) -> float:
        return 0.3 + 0.005 * work.n_tokens

    by_limit, by_rounds = (
        beside_a_stream(patience, [2000], slow) for patience in (LatencyBudget(0.2), LatencyBudget(0.2, 2))
    )
    assert [step.n_read for step in by_limit] == [PAGE] * 125
    assert all(35 < step.n_read < 65 for step in by_rounds[5:-1])


@pytest.mark.parametrize("is_plain", [True, False])
def test_steps_that_are_always_shorter_than_expected_leave_a_pace_that_can_still_learn(is_plain: bool) -> None:
    pace = StepCost()
    pace.learn(Work.of(0, 200), 1.0)
    for _ in range(3000):
        pace.learn(Work.of(0, 1), 0.0, is_plain)
    assert pace.seconds(Work.of(0, 1)) > 0
    for _ in range(100):
        pace.learn(Work.of(0, 1), 0.05, is_plain=True)
    assert pace.seconds(Work.of(0, 1)) == pytest.approx(0.05, rel=0.01)
