"""The scheduler against a target that is a pure function of the text: nothing is lost, doubled, or starved."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saguaro.algo.verification import accept
from saguaro.config import SamplingParams
from saguaro.errors import CapacityError, EmptyPrompt, PromptTooLong
from saguaro.kv.pages import PagePool
from saguaro.target.grammar import Mask
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch, Commit, Scheduler, lookahead_limits
from saguaro.target.step_cost import UNBOUND, LatencyBudget
from saguaro.types import Outcome, Speculation

V = 5
STOP = 4
QUALITIES = ("none", "right", "partly", "wrong", "short")


def next_token(text: Sequence[int]) -> int:
    """The target: a fixed, scrambled function of the whole text; one token in eleven is STOP."""
    state = 7
    for token in text:
        state = (state * 1103515245 + token + 12345) % 2**31
    state //= 2**11
    return STOP if state % 11 == 0 else state % (V - 1)


def continuation(text: Sequence[int], n: int) -> list[int]:
    """The target's next n tokens."""
    grown = list(text)
    for _ in range(n):
        grown.append(next_token(grown))
    return grown[len(text) :]


class FakeTarget:
    """Plays the model and the draft, and keeps the memory: a slot holds the text up to it."""

    def __init__(
        self, scheduler: Scheduler, seed: int = 0, clock: Callable[[Batch, Outcome], float] = lambda *_: 1.0
    ) -> None:
        self.clock = clock  # seconds that a step takes
        self.scheduler, self.page_size = scheduler, scheduler.pool.page_size
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.random = random.Random(seed)
        self.taken: set[int] = set()  # slots the draft knows
        self.waited: Request | None = None  # the oldest request, if it had no part in the last step

    def step(self, quality: str = "none") -> tuple[Batch, list[Commit]] | None:
        """One round, everything about it checked."""
        scheduler = self.scheduler
        oldest = min((*scheduler.running, *scheduler.waiting), key=lambda r: r.number, default=None)
        n_before = {r: r.n_preempted for r in scheduler.running}
        batch = scheduler.next_batch()
        if batch is None:
            assert oldest is None
            return None
        assert oldest is not None
        assert oldest.n_preempted == n_before.get(oldest, oldest.n_preempted), "the oldest was preempted"
        advances = oldest in [row.request for row in batch.rows]
        assert advances or self.waited is not oldest, "the oldest did not advance in two steps"
        self.waited = None if advances else oldest
        self.check_batch(batch)
        spec = self.speculate(batch, quality).clip(lookahead_limits(batch))
        self.write(batch, spec)
        outcome = self.verify(batch, spec)
        texts = {row.request: list(row.request.tokens) for row in batch.rows}
        scheduler.took(batch, outcome, self.clock(batch, outcome))
        commits = scheduler.commit(batch, spec, outcome)
        assert [c.request for c in commits] == [row.request for row in batch.sampling]
        for c in commits:
            assert c.tokens == continuation(texts[c.request], len(c.tokens))
            assert c.request.tokens == [*texts[c.request], *c.tokens]
            assert c.request.n_computed <= len(c.request.tokens)
        scheduler.pool.check(scheduler.tables())
        return batch, commits

    def check_batch(self, batch: Batch) -> None:
        scheduler = self.scheduler
        scheduler.pool.check(scheduler.tables())
        rows, sampling = batch.rows, batch.sampling
        assert rows[: len(sampling)] == sampling, "sampling rows come first"
        assert sum(row.n_tokens + row.lookahead for row in rows) <= scheduler.max_tokens
        assert len(scheduler.running) <= scheduler.max_rows
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots), "a slot serves two requests"
        assert set(slots) <= set(range(scheduler.max_rows))
        for row in rows:
            assert row.n_tokens >= 1
            assert row.start + row.n_tokens <= len(row.request.tokens)
            assert row.samples == (row.start + row.n_tokens == len(row.request.tokens))
            assert row.lookahead == 0 or row.samples
            assert row.lookahead == 0 or len(row.request.tokens) + row.lookahead < scheduler.max_length
        self.check_slots(batch)
        for requests in (scheduler.running, scheduler.waiting):
            assert [r.number for r in requests] == sorted(r.number for r in requests)

    def check_slots(self, batch: Batch) -> None:
        """What the draft is told: a slot is left once, joined only when free, with the request's own text."""
        assert len(set(batch.left)) == len(batch.left)
        assert set(batch.left) <= self.taken, "a slot left that nobody had"
        self.taken -= set(batch.left)
        by_slot = {request.slot: request for request in self.scheduler.running}
        for joined in batch.joined:
            assert joined.slot not in self.taken, "a slot was joined while taken"
            assert list(joined.tokens) == by_slot[joined.slot].tokens
            self.taken.add(joined.slot)
        told = {slot for slot, request in by_slot.items() if request.speculates}
        assert self.taken == told, "the draft and the scheduler disagree about who runs"

    def speculate(self, batch: Batch, quality: str) -> Speculation:
        n_rows, k = len(batch.sampling), self.scheduler.lookahead
        tokens = torch.zeros(n_rows, k, dtype=torch.int64)
        length = torch.zeros(n_rows, dtype=torch.int64)
        for b, row in enumerate(batch.sampling):
            drafted = continuation(row.request.tokens, k)
            if quality == "wrong":
                drafted = [(token + 1) % V for token in drafted]
            if quality == "partly" and k:
                drafted[self.random.randrange(k)] = self.random.randrange(V)
            n = {"none": 0, "short": self.random.randint(0, k)}.get(quality, k)
            tokens[b] = torch.tensor(drafted, dtype=torch.int64)
            length[b] = n
        return Speculation(tokens, length, torch.zeros(n_rows, dtype=torch.int64))

    def write(self, batch: Batch, spec: Speculation) -> None:
        """Store every row's tokens, then see that each row's whole text is where its pages say."""
        texts, written = [], set()
        for b, row in enumerate(batch.rows):
            text = row.request.tokens[: row.start + row.n_tokens]
            if row.samples:
                text = [*text, *spec.tokens[b, : int(spec.length[b])].tolist()]
            texts.append(text)
            for at in range(row.start, len(text)):
                slot = self.slot(row.request, at)
                assert slot not in written, "two tokens written to one slot"
                written.add(slot)
                self.memory[slot] = tuple(text[: at + 1])
        for row, text in zip(batch.rows, texts, strict=True):
            for at in range(len(text)):
                assert self.memory[self.slot(row.request, at)] == tuple(text[: at + 1]), "wrong text in a page"
        pages = {page for page, _ in written}
        for request in self.scheduler.running:
            for at in range(request.n_computed):
                assert self.memory[self.slot(request, at)] == tuple(request.tokens[: at + 1])
        assert all(sum(page in table.pages for table in self.scheduler.tables()) == 1 for page in pages)

    def slot(self, request: Request, at: int) -> tuple[int, int]:
        return request.table.pages[at // self.page_size], at % self.page_size

    def verify(self, batch: Batch, spec: Speculation) -> Outcome:
        k = self.scheduler.lookahead
        targets = torch.zeros(len(batch.sampling), k + 1, dtype=torch.int64)
        for b, row in enumerate(batch.sampling):
            for j in range(k + 1):
                targets[b, j] = next_token([*row.request.tokens, *spec.tokens[b, :j].tolist()])
        slots = torch.tensor([row.request.slot for row in batch.sampling], dtype=torch.int64)
        return Outcome(slots, spec.length, *accept(targets, spec.tokens, spec.length))


def expected(request: Request, limit: int) -> tuple[list[int], str]:
    """The output a request must have, and why it ends."""
    wanted = request.params.max_tokens
    text = list(request.prompt)
    while True:
        text.append(next_token(text))
        n_output = len(text) - len(request.prompt)
        if text[-1] in request.stop_ids:
            return text[len(request.prompt) :], "stop"
        if n_output == wanted or len(text) == limit:
            return text[len(request.prompt) :], "length"


def new_request(prompt: Sequence[int], max_tokens: int | None = 8, stops: bool = True) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,) if stops else ())
    return Request(id="r", prompt=list(prompt), params=params, seed=0)


def new_scheduler(
    n_pages: int = 64,
    page_size: int = 2,
    *,
    max_length: int = 40,
    max_rows: int = 4,
    max_tokens: int = 16,
    lookahead: int = 0,
    caching: bool = True,
    patience: LatencyBudget = UNBOUND,
) -> Scheduler:
    return Scheduler(
        PagePool(n_pages, page_size, caching),
        max_length=max_length,
        max_rows=max_rows,
        max_tokens=max_tokens,
        lookahead=lookahead,
        patience=patience,
    )


def drain(target: FakeTarget, quality: str = "none") -> tuple[int, int]:
    """Step until nothing is left; how many steps, and the most rows that ran together. Never more than the work."""
    scheduler = target.scheduler
    unfinished = [*scheduler.running, *scheduler.waiting]
    limit = min(scheduler.max_length, scheduler.pool.n_pages * scheduler.pool.page_size)
    # The oldest advances by a token or more in two steps and is never thrown back.
    bound = 2 * sum(len(r.prompt) + len(expected(r, limit)[0]) for r in unfinished)
    n_steps = widest = 0
    while (done := target.step(quality)) is not None:
        n_steps += 1
        widest = max(widest, len(done[0].rows))
        assert n_steps <= bound, "too many steps: something waits for ever"
    assert not scheduler.has_work
    assert scheduler.pool.n_free == scheduler.pool.n_pages
    for request in unfinished:
        assert (request.output, request.finish_reason) == expected(request, limit)
    return n_steps, widest


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come, are stepped with drafts of any quality, and are aborted."""

    @initialize(
        n_pages=st.integers(3, 14),
        page_size=st.integers(1, 4),
        max_rows=st.integers(1, 4),
        more_tokens=st.integers(0, 8),
        max_length=st.integers(6, 24),
        lookahead=st.integers(0, 4),
        caching=st.booleans(),
        patience=st.sampled_from([UNBOUND, LatencyBudget(1e-9), LatencyBudget(0.5), LatencyBudget(0.5, n_rounds=2)]),
        step_s=st.sampled_from([1e-6, 0.1, 10.0]),
    )
    def build(
        self,
        n_pages: int,
        page_size: int,
        max_rows: int,
        more_tokens: int,
        max_length: int,
        lookahead: int,
        caching: bool,
        patience: LatencyBudget,
        step_s: float,
    ) -> None:
        self.scheduler = new_scheduler(
            n_pages,
            page_size,
            max_length=max_length,
            max_rows=max_rows,
            max_tokens=max_rows + more_tokens,
            lookahead=lookahead,
            caching=caching,
            patience=patience,
        )
        self.limit = min(max_length, n_pages * page_size)
        self.target = FakeTarget(self.scheduler, clock=lambda batch, _: step_s * len(batch.rows))
        self.requests: list[Request] = []
        self.emitted: dict[Request, list[int]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        max_tokens=st.none() | st.integers(1, 8),
        stops=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int | None, stops: bool) -> None:
        request = new_request(prompt, max_tokens, stops)
        if len(prompt) + (max_tokens or 1) > self.limit:
            with pytest.raises((PromptTooLong, CapacityError)):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests.append(request)
        self.emitted[request] = []

    @precondition(lambda self: self.scheduler.has_work)
    @rule(quality=st.sampled_from(QUALITIES))
    def step(self, quality: str) -> None:
        done = self.target.step(quality)
        assert done is not None
        for commit in done[1]:
            assert commit.tokens
            self.emitted[commit.request] += commit.tokens

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 10**6))
    def abort(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        before = request.finish_reason
        self.scheduler.abort(request)
        assert request.finish_reason == (before or "abort")

    @invariant()
    def the_books_balance(self) -> None:
        self.scheduler.pool.check(self.scheduler.tables())

    @invariant()
    def what_was_emitted_is_the_text(self) -> None:
        for request in self.requests:
            assert request.output == self.emitted[request]
            assert self.emitted[request] == continuation(request.prompt, len(self.emitted[request]))

    @invariant()
    def a_finished_request_is_gone(self) -> None:
        unfinished = [r for r in self.requests if r.finish_reason is None]
        left = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(left, key=lambda r: r.number) == unfinished

    def teardown(self) -> None:
        if hasattr(self, "target"):
            drain(self.target, "partly")
            assert all(request.finish_reason in ("stop", "length", "abort") for request in self.requests)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("seed", range(24))
def test_heavy_preemption_loses_no_token(seed: int) -> None:
    """A pool that can hold little more than one text, and many who want it."""
    chance = random.Random(seed)
    page_size = chance.choice((1, 2, 3))
    scheduler = new_scheduler(
        n_pages=-(-22 // page_size),
        page_size=page_size,
        max_length=20,
        max_rows=4,
        max_tokens=chance.choice((5, 9, 30)),
        lookahead=chance.choice((0, 1, 4)),
        caching=chance.random() < 0.5,
    )
    for _ in range(8):
        prompt = [chance.randrange(2) for _ in range(chance.randint(1, 4))]
        scheduler.add(new_request(prompt, chance.choice((None, 12)), stops=chance.random() < 0.2))
    drain(FakeTarget(scheduler, seed), chance.choice(QUALITIES))
    assert scheduler.n_preemptions > 0


def test_the_younger_is_preempted_keeps_its_text_and_comes_back_first() -> None:
    scheduler = new_scheduler(n_pages=6, page_size=2, max_length=12)
    older, younger, third = (new_request([i, i], 8, stops=False) for i in range(3))
    for request in (older, younger, third):
        scheduler.add(request)
    target = FakeTarget(scheduler)
    while scheduler.n_preemptions == 0:
        target.step()
    while younger.n_preempted == 0:
        target.step()
    assert older.n_preempted == 0
    assert list(scheduler.waiting) == [younger, third]
    assert younger.output == continuation([1, 1], younger.n_output)
    assert younger.n_output > 0
    assert (younger.n_computed, younger.table.pages, younger.slot) == (0, [], -1)
    drain(target)


def test_a_step_in_which_a_prompt_takes_pages_from_another_request_admits_no_third() -> None:
    """The pages and the token that it leaves are for the one that was preempted."""
    scheduler = new_scheduler(n_pages=5, page_size=2, max_length=10, max_tokens=4)
    older, younger, third = (new_request([i] * n, 2, stops=False) for i, n in enumerate((8, 3, 1)))
    target = FakeTarget(scheduler)
    for request in (older, younger):
        scheduler.add(request)
        target.step()
    assert [(r.n_computed, len(r.table.pages)) for r in scheduler.running] == [(5, 3), (3, 2)]
    scheduler.add(third)
    target.step()
    assert (older.n_output, younger.n_preempted, scheduler.pool.n_free) == (1, 1, 1)
    assert (scheduler.running, list(scheduler.waiting)) == ([older], [younger, third])
    drain(target)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    scheduler = new_scheduler(max_tokens=4)
    request = new_request([0] * 10, 2, stops=False)
    scheduler.add(request)
    target = FakeTarget(scheduler)
    shares = []
    while (done := target.step()) is not None:
        (row,) = done[0].rows
        shares.append((row.start, row.n_tokens, row.samples))
    assert shares == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    scheduler = new_scheduler(max_tokens=4)
    decoding, reading = new_request([1], 8, stops=False), new_request([0] * 15, 1, stops=False)
    scheduler.add(decoding)
    target = FakeTarget(scheduler)
    target.step()
    scheduler.add(reading)
    for n_output in range(2, 7):
        target.step()
        assert decoding.n_output == n_output
    assert (reading.n_computed, reading.finish_reason) == (15, "length")


@pytest.mark.parametrize("lookahead", [0, 1, 4])
@pytest.mark.parametrize(("n_pages", "max_length"), [(6, 12), (6, 40), (40, 12)])
def test_a_text_that_fills_the_context_ends_there(lookahead: int, n_pages: int, max_length: int) -> None:
    scheduler = new_scheduler(n_pages, page_size=2, max_length=max_length, lookahead=lookahead)
    requests = [new_request([i], None, stops=False) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    drain(FakeTarget(scheduler), "right")
    assert all(len(request.tokens) == 12 and request.finish_reason == "length" for request in requests)


def test_speculation_stops_where_it_is_of_no_use() -> None:
    """Each round can add lookahead + 1 tokens, so with n left to come at most n - 1 are worth speculating."""
    scheduler = new_scheduler(max_length=9, lookahead=4)
    bounded, unbounded = new_request([0], 7, stops=False), new_request([1, 1], None, stops=False)
    target = FakeTarget(scheduler)
    for request in (bounded, unbounded):
        scheduler.add(request)
    seen = []
    while (done := target.step()) is not None:
        seen.append([row.lookahead for row in done[0].rows])
    assert seen == [[4, 0], [4, 4], [4, 4], [3, 3], [2, 2], [1, 1], [0, 0]]  # a prompt of one token decodes at once


def test_a_speculation_without_pages_is_shortened_not_waited_for() -> None:
    scheduler = new_scheduler(n_pages=4, page_size=2, max_length=8, lookahead=4, max_tokens=32)
    for i in range(2):
        scheduler.add(new_request([i, i, i], 5, stops=False))
    target = FakeTarget(scheduler)
    target.step()
    done = target.step("right")
    assert done is not None
    assert [row.lookahead for row in done[0].rows] == [0, 0]
    drain(target, "right")


def test_speculation_takes_no_step_from_a_younger_request() -> None:
    """As many tokens as rows: every row gets its one, and none is left to verify a speculation."""
    scheduler = new_scheduler(max_rows=4, max_tokens=4, lookahead=4)
    for i in range(4):
        scheduler.add(new_request([i], 8, stops=False))
    assert drain(FakeTarget(scheduler), "wrong") == (8, 4)


@pytest.mark.parametrize("lookahead", [0, 4])
def test_speculation_takes_no_pages_from_a_younger_request(lookahead: int) -> None:
    """The memory holds all four texts exactly, and no more."""
    scheduler = new_scheduler(n_pages=12, page_size=4, max_length=40, max_rows=4, max_tokens=32, lookahead=lookahead)
    for i in range(4):
        scheduler.add(new_request([i] * 3, 9, stops=False))
    drain(FakeTarget(scheduler), "wrong")
    assert scheduler.n_preemptions == 0


def test_a_request_that_does_not_speculate_gets_no_lookahead() -> None:
    scheduler = new_scheduler(lookahead=3)
    for speculates in (True, False):
        request = new_request([1], 8, stops=False)
        object.__setattr__(request.params, "speculation", speculates)
        scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step()
    done = target.step()
    assert done is not None
    assert [row.lookahead for row in done[0].rows] == [3, 0]


class SlowGrammar:
    """Whose masks take long."""

    is_slow = True

    def mask(self, output: Sequence[int]) -> Mask:
        return np.zeros(0, np.uint8)

    def accepts(self, output: Sequence[int]) -> bool:
        return True


def test_rows_whose_masks_take_long_take_turns_and_get_no_lookahead() -> None:
    scheduler = new_scheduler(lookahead=2, max_tokens=32)
    requests = [new_request([1], 12, stops=False) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    ordinary, *slow = requests
    target = FakeTarget(scheduler)
    target.step()
    for request in slow:
        request.grammar = SlowGrammar()
    for _ in range(3):
        done = target.step()
        assert done is not None
        assert [(row.request is ordinary, row.lookahead) for row in done[0].rows] == [(True, 2), (False, 0)]
    assert [request.n_output for request in requests] == [4, 2, 2, 2]
    drain(target)


def test_a_slow_row_that_gives_its_pages_back_does_not_stop_the_others() -> None:
    """Three rows in memory for fewer, at every moment that one of them may have its turn."""
    for n_turns in range(3):
        scheduler = new_scheduler(n_pages=8, page_size=1, max_length=8)
        for _ in range(3):
            scheduler.add(new_request([1, 2], 5, stops=False))
        target = FakeTarget(scheduler)
        target.step()
        scheduler._n_turns = n_turns
        for request in list(scheduler.running):
            request.grammar = SlowGrammar()
        drain(target)
        assert scheduler.n_preemptions > 0


def test_a_right_speculation_saves_its_length_in_steps() -> None:
    def n_steps(lookahead: int, quality: str) -> int:
        scheduler = new_scheduler(max_length=64, lookahead=lookahead)
        scheduler.add(new_request([1, 2, 3], 1 + 30, stops=False))
        return drain(FakeTarget(scheduler), quality)[0]

    assert n_steps(0, "none") == n_steps(4, "wrong") == 31
    assert n_steps(4, "right") == 1 + 30 // 5
    assert n_steps(2, "right") == 1 + 30 // 3


def test_a_stop_token_inside_a_speculation_ends_the_output_there() -> None:
    prompt = next(p for p in ([a, b] for a in range(V) for b in range(V)) if STOP in continuation(p, 5)[1:4])
    scheduler = new_scheduler(lookahead=4)
    request = new_request(prompt, 20)
    scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step("right")
    done = target.step("right")
    assert done is not None
    (commit,) = done[1]
    assert commit.tokens[-1] == STOP
    assert commit.k >= len(commit.tokens)
    assert len(commit.tokens) < 5
    assert request.finish_reason == "stop"
    assert request.output == continuation(prompt, request.n_output)
    assert scheduler.pool.n_free == scheduler.pool.n_pages


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = new_scheduler(page_size=2)
    first, second = (new_request([1, 2, 3, 0, 1], 2, stops=False) for _ in range(2))
    target = FakeTarget(scheduler)
    scheduler.add(first)
    drain(target)
    scheduler.add(second)
    done = target.step()
    assert done is not None
    assert (first.n_cached, second.n_cached, done[0].rows[0].start, done[0].rows[0].n_tokens) == (0, 4, 4, 1)
    drain(target)
    assert first.output == second.output


def test_without_prefix_caching_every_prompt_is_computed() -> None:
    scheduler = new_scheduler(page_size=2, caching=False)
    target = FakeTarget(scheduler)
    for _ in range(2):
        request = new_request([1, 2, 3, 0, 1], 2, stops=False)
        scheduler.add(request)
        drain(target)
        assert request.n_cached == 0


def test_cached_is_what_the_prompt_found_and_not_what_a_preempted_text_finds_again() -> None:
    scheduler = new_scheduler(n_pages=6, page_size=2, max_length=12)
    older, younger = (new_request([i, i], 8, stops=False) for i in range(2))
    for request in (older, younger):
        scheduler.add(request)
    drain(FakeTarget(scheduler))
    assert younger.n_preempted > 0
    assert younger.n_cached == 0


def test_aborting_frees_everything_wherever_the_request_is() -> None:
    scheduler = new_scheduler(max_rows=2)
    requests = [new_request([i, i], 8, stops=False) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)
    for request in reversed(requests):  # waiting, then two running
        scheduler.abort(request)
        assert request.finish_reason == "abort"
        scheduler.pool.check(scheduler.tables())
    assert not scheduler.has_work
    assert scheduler.pool.n_free == scheduler.pool.n_pages
    assert target.step() is None


def test_aborting_a_finished_request_changes_nothing() -> None:
    scheduler = new_scheduler()
    request = new_request([1], 2, stops=False)
    scheduler.add(request)
    target = FakeTarget(scheduler)
    drain(target)
    scheduler.abort(request)
    assert request.finish_reason == "length"
    scheduler.abort(request, "stop")
    assert request.finish_reason == "length"


def test_a_slot_is_left_once_and_can_be_joined_in_the_same_step() -> None:
    scheduler = new_scheduler(max_rows=1)
    first, second = new_request([1], 8, stops=False), new_request([2], 8, stops=False)
    target = FakeTarget(scheduler)
    scheduler.add(first)
    target.step()
    scheduler.abort(first)
    scheduler.add(second)
    done = target.step()
    assert done is not None
    assert (done[0].left, [joined.slot for joined in done[0].joined]) == ([0], [0])
    done = target.step()
    assert done is not None
    assert (done[0].left, done[0].joined) == ([], [])


def test_a_request_aborted_while_its_step_runs_gets_nothing() -> None:
    scheduler = new_scheduler()
    gone, stays = new_request([1], 8, stops=False), new_request([2], 8, stops=False)
    for request in (gone, stays):
        scheduler.add(request)
    batch = scheduler.next_batch()
    assert batch is not None
    target = FakeTarget(scheduler)
    target.check_batch(batch)
    spec = target.speculate(batch, "none")
    target.write(batch, spec)
    outcome = target.verify(batch, spec)
    scheduler.abort(gone)
    commits = scheduler.commit(batch, spec, outcome)
    assert [commit.request for commit in commits] == [stays]
    assert (gone.output, gone.finish_reason) == ([], "abort")
    scheduler.pool.check(scheduler.tables())
    drain(target)


def test_a_small_request_does_not_wait_behind_one_that_waits_for_pages() -> None:
    scheduler = new_scheduler(n_pages=8, page_size=2, max_length=16, max_tokens=32)
    first, large, small = new_request([0] * 9, 4, False), new_request([1] * 9, 2), new_request([2], 2)
    for request in (first, large, small):
        scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step()
    assert (scheduler.running, list(scheduler.waiting)) == ([first], [large, small])
    target.step()
    assert (scheduler.running, list(scheduler.waiting)) == ([first, small], [large])
    drain(target)


def test_a_waiting_request_is_not_starved_by_smaller_ones() -> None:
    """Small requests come without end. They may use the pages that the large one leaves free, and no others."""
    scheduler = new_scheduler(n_pages=12, page_size=2, max_length=24, max_rows=4, max_tokens=32)
    first, large = new_request([0] * 3, 9, False), new_request([1] * 16, 2, False)
    small = [new_request([2], 2, False) for _ in range(40)]
    for request in (first, large, *small):
        scheduler.add(request)
    target = FakeTarget(scheduler)
    while first.finish_reason is None:
        target.step()
    n_before = sum(request.finish_reason is not None for request in small)
    assert 0 < n_before < 40
    for _ in range(4):
        target.step()
    assert (large.finish_reason, large.n_preempted) == ("length", 0)
    drain(target)


def test_the_oldest_of_all_takes_pages_from_those_that_were_admitted_before_it() -> None:
    scheduler = new_scheduler(n_pages=8, page_size=2, max_length=16, max_rows=4, max_tokens=32)
    first, small = new_request([0] * 3, 2, False), new_request([2] * 5, 9, False)
    for request in (first, small):
        scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step()
    small.number, large = 2, new_request([1] * 12, 2, False)  # as if it had been admitted before the large one
    scheduler.waiting.append(large)
    large.number = 1
    target.step()
    target.step()
    assert (scheduler.running, list(scheduler.waiting), small.n_preempted) == ([large], [small], 1)
    drain(target)


def test_a_short_prompt_does_not_wait_until_long_ones_are_read() -> None:
    scheduler = new_scheduler(n_pages=256, page_size=2, max_length=128, max_rows=4, max_tokens=8)
    long = [new_request([i] * 100, 2) for i in range(2)]
    for request in long:
        scheduler.add(request)
    target = FakeTarget(scheduler)
    target.step()
    short = new_request([3] * 4, 2)
    scheduler.add(short)
    for _ in range(2):
        target.step()
    assert short.n_output == 1
    assert [request.n_computed for request in long] == [20, 0]
    drain(target)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EmptyPrompt, match="at least one"):
        new_scheduler().add(new_request([]))


def test_a_prompt_that_leaves_no_room_for_output_is_refused() -> None:
    scheduler = new_scheduler(max_length=10)
    with pytest.raises(PromptTooLong, match=r"10 tokens.*at most 9.*max_model_len is 10.*shorten"):
        scheduler.add(new_request([0] * 10, None))
    scheduler.add(new_request([0] * 9, None))


def test_an_output_that_cannot_fit_is_refused_and_told_what_would() -> None:
    scheduler = new_scheduler(max_length=10)
    refusal = r"4 tokens.*max_tokens \(7\) need 11, 10 fit \(max_model_len is 10\).*at most 6, or to None"
    with pytest.raises(PromptTooLong, match=refusal):
        scheduler.add(new_request([0] * 4, 7))
    scheduler.add(new_request([0] * 4, 6))


def test_a_memory_too_small_is_blamed_and_not_the_context() -> None:
    scheduler = new_scheduler(n_pages=3, page_size=2, max_length=10)
    with pytest.raises(CapacityError, match=r"8 tokens, at most 5 fit.*KV memory holds 6 tokens; raise kv_memory"):
        scheduler.add(new_request([0] * 8, None))
    with pytest.raises(CapacityError, match=r"need 9, 6 fit.*raise kv_memory.*at most 2"):
        scheduler.add(new_request([0] * 4, 5))


def test_a_refused_request_leaves_no_trace() -> None:
    scheduler = new_scheduler(max_length=10)
    for request in (new_request([]), new_request([0] * 30)):
        with pytest.raises((EmptyPrompt, PromptTooLong)):
            scheduler.add(request)
        assert not scheduler.has_work
        assert scheduler.next_batch() is None
