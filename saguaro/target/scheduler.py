"""Decides which tokens to compute next: continuous batching over the page pool.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens; a step computes some of
the difference. Only a younger request is ever preempted for an older one. Preemption gives back pages, never tokens.

If not all prompts fit into one step, steps alternate between oldest first and shortest first. So a short prompt does
not wait for long ones, and the oldest advances at least in every second step. Admission alternates in the same way,
but a request may overtake the oldest waiting request only if it leaves room for it. The oldest request of all can
preempt any other. So every request finishes.

While rows decode, the prompt tokens of a step are limited by the time that decoding rows may wait (target.step_cost),
but the first prompt gets at least a page. While no row decodes, prompts get whole steps.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from saguaro.algo.tree import nodes_at
from saguaro.algo.verification import BROKEN
from saguaro.errors import CapacityError, EmptyPrompt, PromptTooLong, SaguaroError
from saguaro.kv.pages import PagePool, PageTable
from saguaro.target.request import Request
from saguaro.target.step_cost import UNBOUND, LatencyBudget, StepCost, Work
from saguaro.types import EMPTY, SOURCES, FinishReason, Joined, Outcome, Speculation, TokenLogprobs

NOT_FINITE = (
    "the model's logits are not finite, so no token can be chosen; its weights are damaged or overflow in this dtype: "
    "download the model again, or use another dtype"
)


GROWTH = 256  # output tokens per request for which room is left when a request overtakes an older one


@dataclass(frozen=True)
class BatchRow:
    """One request's part of a step: compute tokens[start : start + n_tokens], then up to `lookahead` speculated."""

    request: Request
    start: int
    n_tokens: int
    lookahead: int
    samples: bool  # whether the step reaches the end of the text, so that a token is sampled


@dataclass(frozen=True)
class Batch:
    """One step: first the rows that get a token, then the rows that still read their prompt."""

    rows: list[BatchRow]
    joined: list[Joined]  # rows to introduce to the draft
    left: list[int]  # slots that the draft can drop

    @property
    def sampling(self) -> list[BatchRow]:
        """The rows that get a token."""
        return [row for row in self.rows if row.samples]


@dataclass(frozen=True)
class Commit:
    """The result of a step for one request."""

    request: Request
    tokens: list[int]
    room: int  # the largest number of tokens that could have been speculated
    length: int  # speculated tokens that were verified
    k: int  # accepted tokens
    source: str  # one of SOURCES
    logprobs: Sequence[TokenLogprobs] = ()
    drafted: Sequence[int] = ()  # the speculated tokens, accepted or not
    parents: Sequence[int] = ()  # theirs, if they were a tree; empty: a chain
    path: Sequence[int] = ()  # the accepted nodes of a tree


class Scheduler:
    """The waiting and the running requests, and their pages."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_length: int,
        max_rows: int,
        max_tokens: int,
        lookahead: int = 0,  # most nodes speculated per row
        depth: int | None = None,  # of trees; None: as deep as there are nodes
        patience: LatencyBudget = UNBOUND,
    ) -> None:
        self.pool = pool
        self.max_length, self.max_rows, self.max_tokens = max_length, max_rows, max_tokens
        self.lookahead, self.depth = lookahead, lookahead if depth is None else depth
        self.patience, self.pace = patience, StepCost()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._free_slots = deque(range(max_rows))
        self._joined: list[Request] = []
        self._left: list[int] = []
        self._n_arrived = self._n_turns = 0
        self._is_oldest_first = False
        self.n_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises if it can never be served."""
        self.check(len(request.prompt), request.params.max_tokens)
        request.number = self._n_arrived
        self._n_arrived += 1
        self.waiting.append(request)

    def check(self, n_prompt: int, max_tokens: int | None) -> None:
        """Raise if a request of this size can never be served."""
        if n_prompt == 0:
            raise EmptyPrompt("the prompt has no tokens; give at least one")
        capacity = self.pool.n_pages * self.pool.page_size
        limit = min(self.max_length, capacity)
        n_wanted = 1 if max_tokens is None else max_tokens
        if n_prompt + n_wanted <= limit:
            return
        if capacity < self.max_length:
            kind: type[SaguaroError] = CapacityError
            why = f"the KV memory holds {capacity} tokens; raise kv_memory"
        else:
            kind, why = PromptTooLong, f"max_model_len is {self.max_length}"
        n_least = min(n_wanted, 1)
        if n_prompt + n_least > limit:
            raise kind(f"the prompt has {n_prompt} tokens, at most {limit - n_least} fit ({why}); shorten it")
        raise kind(
            f"prompt ({n_prompt} tokens) and max_tokens ({max_tokens}) need {n_prompt + n_wanted}, "
            f"{limit} fit ({why}); set max_tokens to at most {limit - n_prompt}, or to None to fill the context"
        )

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a waiting or running request now. Finished requests are ignored."""
        if request.finish_reason is not None:
            return
        request.finish(reason)
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def next_batch(self) -> Batch | None:
        """Return the next step with its pages reserved, or None if there is no work."""
        rows = _Rows(self.max_tokens, self.pace)
        self._is_oldest_first, n_preempted = not self._is_oldest_first, self.n_preemptions
        self._decode(rows)
        if rows:  # prompts must not delay decoding rows too long
            rows.seconds_left = self._seconds_for_prompts(rows)
        self._read(rows, n_preempted)
        self._look_ahead(rows)
        if not rows:
            assert not self.has_work, "requests are left and none can be scheduled"
            return None
        ordered = sorted(rows, key=lambda row: (not row.samples, row.request.number))
        joined = [_introduce(request) for request in self._joined if request.speculates]
        batch = Batch(ordered, joined, self._left)
        self._joined, self._left = [], []
        return batch

    def commit(self, batch: Batch, spec: Speculation, outcome: Outcome) -> list[Commit]:
        """Append a step's tokens to its requests. Finished requests leave."""
        drafted, sources = spec.tokens.tolist(), spec.source.tolist()
        parents = spec.parents()
        accepted, bonus, length = outcome.accepted(), outcome.bonus.tolist(), outcome.length.tolist()
        commits = []
        for index, row in enumerate(batch.rows):
            request = row.request
            if request.finish_reason is not None:
                continue  # aborted while the step ran
            request.n_computed = row.start + row.n_tokens
            if outcome.prompt_logprobs and not _score(request, outcome.prompt_logprobs[index]):
                commits.append(Commit(request, [], 0, 0, 0, SOURCES[EMPTY]))
            elif row.samples:
                nodes, n_accepted = accepted[index], len(accepted[index])
                request.n_rounds += 1
                request.n_computed += n_accepted
                is_broken = bonus[index] == BROKEN
                new = [*(drafted[index][node] for node in nodes), *([] if is_broken else [bonus[index]])]
                logprobs = outcome.logprobs[index] if outcome.logprobs else ()
                new = self._append(request, new)
                if is_broken and request.finish_reason is None:
                    request.finish("error", NOT_FINITE)
                request.logprobs.extend(logprobs[: len(new)])
                source, proposed = SOURCES[sources[index]], drafted[index][: length[index]]
                facts = (row.lookahead, length[index], n_accepted, source)
                its_parents = parents[index]
                tree = ((), ()) if its_parents is None else (its_parents, nodes)
                commits.append(Commit(request, new, *facts, logprobs[: len(new)], proposed, *tree))
            elif not request.is_continued and request.n_pending == 0:
                request.finish("length")
                commits.append(Commit(request, [], 0, 0, 0, SOURCES[EMPTY]))
            request.n_computed = min(request.n_computed, len(request.tokens))
            self.pool.publish(request.table, request.tokens, request.n_computed)
            if request.finish_reason is None:
                self.pool.trim(request.table, request.n_computed)
            else:
                self._leave(request)
        return commits

    def took(self, batch: Batch, outcome: Outcome, seconds: float) -> None:
        """Update the cost model with a step's time, from asking the draft to the outcome."""
        n_verified = [*outcome.length.tolist(), *[0] * (len(batch.rows) - len(outcome.length))]
        work = (Work.of(row.start, row.n_tokens + n) for row, n in zip(batch.rows, n_verified, strict=True))
        is_plain = all(row.n_tokens == 1 for row in batch.rows)
        self.pace.learn(sum(work, Work()), seconds, is_plain)

    def rejoin(self) -> None:
        """Introduce every running row to the draft again, after a round that failed."""
        self._left = list(range(self.max_rows))
        self._joined = list(self.running)

    def tables(self) -> Iterable[PageTable]:
        """Every page table in use, for PagePool.check()."""
        return (request.table for request in (*self.running, *self.waiting))

    def _append(self, request: Request, new: list[int]) -> list[int]:
        """Append tokens until one ends the output. Returns the appended tokens."""
        limit = self._limit(request)
        if new:
            request.first_token_at = request.first_token_at or time.perf_counter()
        for count, token in enumerate(new, 1):
            request.tokens.append(token)
            if token in request.stop_ids:
                request.finish("stop")
            elif len(request.tokens) >= limit:
                request.finish("length")
            if request.finish_reason is not None:
                return new[:count]
        return new

    def _resting(self) -> set[Request]:
        """Rows that skip this step: all rows with slow masks but one, in turn. The oldest request never skips."""
        slow = [request for request in self.running[1:] if request.is_slow and request.n_pending == 1]
        if len(slow) < 2:
            return set()
        self._n_turns += 1
        return set(slow) - {slow[self._n_turns % len(slow)]}

    def _decode(self, rows: "_Rows") -> None:
        """Schedule the requests with exactly one pending token, oldest first."""
        resting = self._resting()
        for request in list(self.running):
            if request.n_pending == 1 and request not in resting and request in self.running:
                self._schedule(request, rows)

    def _read(self, rows: "_Rows", n_preempted: int) -> None:
        """Schedule prompts and admit waiting requests, within the limits of slots, tokens, time and pages."""
        is_full, can_overtake = not self._free_slots, True
        reading = [request for request in self.running if request.n_pending > 1]
        for request in self._in_order((*reading, *(() if is_full else self.waiting))):
            if request in self.running:
                self._schedule(request, rows)
            elif request in reading or self.n_preemptions > n_preempted or is_full:
                continue  # just preempted, or no room for more
            elif request is self.waiting[0] or (can_overtake and self._may_overtake(request)):
                is_full = not self._admit(request, rows)
            else:
                can_overtake = False  # those after it are longer

    def _in_order(self, requests: Iterable[Request]) -> list[Request]:
        """Sort prompts for this step: oldest first, or fewest pending tokens first."""
        if self._is_oldest_first:
            return sorted(requests, key=lambda request: request.number)
        return sorted(requests, key=lambda request: (request.n_pending, request.number))

    def _schedule(self, request: Request, rows: "_Rows") -> None:
        """Add a row for a running request, preempting the youngest ones if pages run out."""
        n_tokens = self._share(request.n_computed, request.n_pending, rows)
        if n_tokens == 0:
            return
        while not self.pool.reserve(request.table, request.n_computed + n_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            rows.drop(victim)
            if victim is request:
                return
        rows.put(_row(request, n_tokens))

    def _seconds_for_prompts(self, decoding: "_Rows") -> float:
        """How many seconds prompts may add to a step with these rows."""
        width = 1 + self.lookahead
        plain = self.pace.seconds(sum((Work.of(row.start, width) for row in decoding), Work()))
        return self.patience.seconds(plain) - plain

    def _share(self, start: int, n_pending: int, rows: "_Rows") -> int:
        """How many pending tokens of a text fit into this step: at least a page for the first prompt, and 0 after a
        prompt that was cut."""
        n_tokens = 0 if rows.has_cut else min(n_pending, rows.n_left)
        if n_pending == 1 or rows.seconds_left == math.inf:
            return n_tokens
        fitting = self.pace.room(rows.seconds_left, start)
        return min(n_tokens, fitting if rows.has_prompt else max(fitting, self.pool.page_size))

    def _look_ahead(self, rows: "_Rows") -> None:
        """Give decoding rows room for a speculation, from the remaining tokens and pages."""
        most = nodes_at(len(rows), self.lookahead, self.depth)
        for row in list(rows):
            request = row.request
            if request.n_pending != 1 or not request.speculates or request.is_slow:
                continue
            # The bonus needs a position too.
            room = self._limit(request) - len(request.tokens) - 1
            lookahead = max(0, min(most, room, rows.n_left))
            while lookahead and not self.pool.reserve(request.table, len(request.tokens) + lookahead):
                lookahead -= 1
            if lookahead:
                rows.put(replace(row, lookahead=lookahead))

    def _admit(self, request: Request, rows: "_Rows") -> bool:
        """Admit a waiting request if there are enough slots, tokens and pages."""
        if not self._free_slots:
            return False
        table, n_cached = self.pool.match(request.reusable)
        n_tokens = self._share(n_cached, len(request.tokens) - n_cached, rows)
        # Reserve room for the whole text, so that it is not preempted soon.
        n_pages = self.pool.n_needed(len(request.tokens)) - len(table.pages)
        while n_tokens and n_pages > self.pool.n_free and self.running and request.number < self.running[0].number:
            rows.drop(self.running[-1])
            self._preempt(self.running[-1])
        if n_tokens == 0 or n_pages > self.pool.n_free:
            self.pool.release(table)
            return False
        self.waiting.remove(request)
        request.table, request.n_computed = table, n_cached
        if request.n_preempted == 0:
            request.n_cached = n_cached
        request.slot = self._free_slots.popleft()
        self._joined.append(request)
        self.running.append(request)
        self.running.sort(key=lambda r: r.number)
        reserved = self.pool.reserve(request.table, request.n_computed + n_tokens)
        assert reserved, "pages counted as free were not there"
        rows.put(_row(request, n_tokens))
        return True

    def _may_overtake(self, request: Request) -> bool:
        """Whether the oldest waiting request still finds a slot and pages once the requests before it have finished."""
        oldest = self.waiting[0]
        younger = [*(other for other in self.running if other.number > oldest.number), request]
        n_tokens = (min(self._limit(other), len(other.tokens) + GROWTH) for other in (oldest, *younger))
        return sum(map(self.pool.n_needed, n_tokens)) <= self.pool.n_pages and len(younger) < self.max_rows

    def _limit(self, request: Request) -> int:
        """The maximum length of this request's text."""
        limit = min(self.max_length, self.pool.n_pages * self.pool.page_size)
        wanted = request.params.max_tokens
        return limit if wanted is None else min(limit, len(request.prompt) + wanted)

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages. It keeps its text and is queued by age."""
        self._leave(request)
        request.n_computed = 0
        request.n_preempted += 1
        self.n_preemptions += 1
        older = sum(other.number < request.number for other in self.waiting)
        self.waiting.insert(older, request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.table)
        self._free_slots.append(request.slot)
        if request in self._joined:
            self._joined.remove(request)  # it was never introduced
        else:
            self._left.append(request.slot)
        request.slot = -1


class _Rows:
    """The rows of a step under construction, and the tokens and prompt seconds left."""

    def __init__(self, max_tokens: int, pace: StepCost) -> None:
        self._rows: dict[Request, BatchRow] = {}
        self._pace = pace
        self.n_left = max_tokens
        self.seconds_left = math.inf

    def __iter__(self) -> Iterator[BatchRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_prompt(self) -> bool:
        """Whether any row reads a prompt."""
        return any(row.request.n_pending > 1 for row in self)

    @property
    def has_cut(self) -> bool:
        """Whether any row leaves prompt tokens for later steps."""
        return not all(row.samples for row in self)

    def put(self, row: BatchRow) -> None:
        """Add a row, replacing the request's earlier row."""
        self.drop(row.request)
        self._rows[row.request] = row
        self.n_left -= row.n_tokens + row.lookahead
        self.seconds_left -= self._seconds(row)

    def drop(self, request: Request) -> None:
        """Remove a request's row, if it has one."""
        row = self._rows.pop(request, None)
        if row is not None:
            self.n_left += row.n_tokens + row.lookahead
            self.seconds_left += self._seconds(row)

    def _seconds(self, row: BatchRow) -> float:
        """The seconds that a prompt row adds to the step. Decoding rows are counted before the limit is set."""
        return self._pace.more_seconds(Work.of(row.start, row.n_tokens)) if row.request.n_pending > 1 else 0.0


def _introduce(request: Request) -> Joined:
    return Joined(request.slot, list(request.tokens), len(request.prompt), request.seed, request.params)


def _row(request: Request, n_tokens: int) -> BatchRow:
    """A row without speculation."""
    samples = n_tokens == request.n_pending and request.is_continued
    return BatchRow(request, request.n_computed, n_tokens, 0, samples)


def _score(request: Request, found: Sequence[TokenLogprobs]) -> bool:
    """Add log-probabilities of prompt tokens. If logits are not finite, finish the request and return False."""
    request.prompt_logprobs.extend(found)
    is_finite = not any(math.isnan(one.logprob) for one in found)
    if not is_finite:
        request.finish("error", NOT_FINITE)
    return is_finite


def lookahead_limits(batch: Batch) -> torch.Tensor:  # [B] int64
    """The room for speculated tokens of each sampling row."""
    return torch.tensor([row.lookahead for row in batch.sampling], dtype=torch.int64)
