"""Runs the engine in its own thread, so that the event loop never waits for it.

Invariant: every ticket gets exactly one last event, Done or Failed, even if its request, the engine or the thread
fails; and the memory held per ticket is bounded.

    event loop                                      the engine's thread
    ticket: is there room? ------- submit --------> add
    events <------- deltas of a step, results ----- step, step, ...
    closed: done, or client gone ---- discard ----> its pages are free before the next step
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from saguaro.config import SamplingParams
from saguaro.engine.engine import Engine
from saguaro.engine.results import Completion, Delta, Result
from saguaro.errors import ConfigError, Overloaded, RankError, ReaderTooSlow, SaguaroError, TimedOut, Unavailable
from saguaro.types import RoundEvent, RowEvent

log = logging.getLogger(__name__)

T = TypeVar("T")

JOIN_SECONDS = 5.0  # for the engine's thread to end: a hanging step must not block the shutdown
MAX_BEHIND = 512  # pieces per output that a reader may be behind
MAX_BROKEN = 3  # consecutive failed steps that end no request, before the engine is given up


@dataclass(frozen=True)
class Piece:
    """The tokens that a round added to one output of one of the prompts."""

    prompt: int
    delta: Delta
    round: tuple[RoundEvent, RowEvent] | None  # None if no round made it: the output was ended


@dataclass(frozen=True)
class Done:
    """All outputs have ended; one result per prompt."""

    results: list[Result]


@dataclass(frozen=True)
class Failed:
    """The request failed. No event follows."""

    error: SaguaroError


Event = Piece | Done | Failed


class Watcher(Protocol):
    """Is notified about requests, in the engine's thread. Times are in seconds."""

    def joined(self, n_prompt: int) -> None:
        """A prompt with this many tokens was queued."""

    def grew(self, n_tokens: int, since: float, is_first: bool) -> None:
        """An output got tokens. since: time since its last tokens, or since arrival for the first."""

    def ended(self, reason: str, seconds: float, output: Completion | None) -> None:
        """An output ended, this long after the request arrived; None: it was discarded."""


@dataclass
class _Work:
    """The engine thread's state of a ticket."""

    ticket: str
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    wants_pieces: bool
    arrived: float
    names: list[str] = field(default_factory=list)  # its request ids in the engine
    results: dict[int, Result] = field(default_factory=dict)
    open: dict[tuple[int, int], float] = field(default_factory=dict)  # (prompt, output) -> time of its last tokens


class Ticket:
    """One caller's request. Used by the event loop."""

    def __init__(self, front: "Front", number: int, n_rows: int, seconds: float | None) -> None:
        self.id, self.n_rows, self.arrived = f"ticket-{number}", n_rows, time.perf_counter()
        self._front, self._events, self._news = front, deque[Event](), asyncio.Event()
        self._is_submitted = self._is_over = False
        self._failed: asyncio.Future[SaguaroError] = asyncio.get_running_loop().create_future()
        self._timer = None
        if seconds is not None:
            error = TimedOut(f"the request took longer than {seconds:g} seconds; ask for fewer tokens")
            self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, error)

    def submit(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], wants_pieces: bool) -> None:
        """Submit prompts, once. Without pieces only the last event is sent."""
        assert not self._is_submitted, "a ticket is good for one submission"
        self._is_submitted = True
        if not self._is_over:
            self._front.submit(_Work(self.id, prompts, params, wants_pieces, self.arrived))

    async def wait_for(self, work: Awaitable[T]) -> T:
        """Await work that precedes the submission. Raises the ticket's error if it comes first."""
        return await _unless(self._failed, work)

    async def events(self) -> list[Event]:
        """Wait for events and return all of them. None follows the last event."""
        await self._news.wait()
        self._news.clear()
        events = list(self._events)
        self._events.clear()
        return events

    def put(self, event: Event) -> None:
        """Add an event. Events after the last one are dropped."""
        if self._is_over:
            return
        limit = MAX_BEHIND * self.n_rows
        if isinstance(event, Piece) and len(self._events) >= limit:
            self._events.clear()
            self.fail(ReaderTooSlow(f"{limit} pieces of text were not read in time; read faster, or do not stream"))
            return
        self._is_over = not isinstance(event, Piece)
        if isinstance(event, Failed) and not self._failed.done():
            self._failed.set_result(event.error)
        self._events.append(event)
        self._news.set()

    def fail(self, error: SaguaroError) -> None:
        """End the ticket with an error, unless it has ended."""
        if not self._is_over:
            self.put(Failed(error))
            self._front.discard(self)

    def close(self) -> None:
        """Close the ticket: no caller is waiting."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over:
            self._is_over = True
            self._front.discard(self)


class Front:
    """Owns the engine's thread."""

    def __init__(self, engine: Engine, *, max_waiting: int, watcher: Watcher) -> None:
        self.engine, self._watcher = engine, watcher
        self.n_rows, self.max_rows = 0, engine.config.max_batch_rows + max_waiting  # of all tickets
        self.failure: str | None = None  # why the thread ended
        self.lost: RankError | None = None  # a rank ended: the engine must be started again
        self.on_lost: Callable[[], None] = lambda: None  # called in the event loop, after its tickets have ended
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()  # set if there are no tickets
        self._idle.set()
        self._tickets: dict[str, Ticket] = {}
        self._n_tickets = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._works: dict[str, _Work] = {}  # by ticket; from here on owned by the engine's thread
        self._jobs: dict[str, tuple[_Work, int]] = {}  # by request id: its ticket and prompt index
        self._event: RoundEvent | None = None
        self._n_broken = 0
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="saguaro-engine", daemon=True)

    def start(self) -> None:
        """Start the thread. Events go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.round.observers.append(self._observe)
        if self.engine.ranks is not None:  # a rank may end while no step runs
            self.engine.ranks.watch(lambda: self._commands.put(self.engine.check_ranks))
        self._thread.start()

    async def close(self) -> None:
        """End all tickets, then the engine. Returns when the thread has ended, or after JOIN_SECONDS."""
        self.end(Unavailable("the server has ended; ask another"))
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            log.error("the engine's step has not ended after %g seconds; it is left", JOIN_SECONDS)

    @contextlib.contextmanager
    def ticket(self, n_rows: int, seconds: float | None = None) -> Iterator[Ticket]:
        """A ticket for n_rows outputs, with a time limit in seconds. Raises if there is no room."""
        self.check()
        if n_rows > self.max_rows:
            raise ConfigError(
                f"{n_rows} outputs in one request; at most {self.max_rows} at a time are served: ask twice"
            )
        if self.n_rows + n_rows > self.max_rows:
            raise Overloaded(f"{self.n_rows} outputs are in the making, of at most {self.max_rows}; ask again later")
        self._n_tickets += 1
        ticket = Ticket(self, self._n_tickets, n_rows, seconds)
        self._tickets[ticket.id] = ticket
        self._idle.clear()
        self.n_rows += n_rows
        try:
            yield ticket
        finally:
            ticket.close()
            del self._tickets[ticket.id]
            self.n_rows -= n_rows
            if not self._tickets:
                self._idle.set()

    @property
    def n_requests(self) -> int:
        """The number of open tickets."""
        return len(self._tickets)

    def check(self) -> None:
        """Raise unless requests are accepted."""
        if self.failure is not None:
            raise Unavailable(f"the engine has broken down and must be started again: {self.failure}")
        if self.is_draining:
            raise _ending()

    @property
    def is_draining(self) -> bool:
        """Whether new tickets are refused."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Refuse new tickets. Open ones continue."""
        self._draining.set()

    async def while_serving(self, work: Awaitable[T]) -> T:
        """Await work that precedes the ticket. Raises if draining starts first."""
        drained = asyncio.ensure_future(self._drained())
        try:
            return await _unless(drained, work)
        finally:
            drained.cancel()

    async def idle(self) -> None:
        """Wait until there are no tickets."""
        await self._idle.wait()

    def end(self, error: SaguaroError) -> None:
        """End every ticket with an error."""
        for ticket in list(self._tickets.values()):
            ticket.fail(error)

    def submit(self, work: _Work) -> None:
        """Queue a ticket's prompts for the engine."""
        self._commands.put(lambda: self._add(work))

    def discard(self, ticket: Ticket) -> None:
        """Drop a ticket's outputs."""
        self._commands.put(lambda: self._discard(ticket.id))

    # The methods from here on run in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._obey()
                if self.engine.has_work and not self._is_closed:
                    self._step()
        except RankError as e:
            log.error("%s", e)
            self.failure, self.lost = str(e), e
            error = Unavailable(f"the engine has broken down: {e}")
            self._call(lambda: self.end(error))
            self._call(self.on_lost)
        except BaseException as e:
            log.exception("the engine has broken down")
            self.failure = f"{type(e).__name__}: {e}"
            self._call(lambda: self.end(Unavailable(f"the engine has broken down: {self.failure}")))
        finally:
            self.engine.close()

    def _obey(self) -> None:
        """Run the event loop's commands. If the engine is idle, wait for one."""
        if not self.engine.has_work:
            self._commands.get()()
        with contextlib.suppress(queue.Empty):
            while not self._is_closed:
                self._commands.get_nowait()()

    def _stop(self) -> None:
        self._is_closed = True

    def _add(self, work: _Work) -> None:
        self._works[work.ticket] = work
        try:
            for index, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
                name = f"{work.ticket}-{index}"
                self.engine.add(prompt, params, name)
                work.names.append(name)
                work.open |= {(index, output): work.arrived for output in range(params.n)}
                self._jobs[name] = (work, index)
                self._watcher.joined(len(prompt))
        except SaguaroError as e:
            self._fail(work, e)

    def _fail(self, work: _Work, error: SaguaroError) -> None:
        self._discard(work.ticket)
        self._post([(work.ticket, Failed(error))])

    def _discard(self, ticket: str) -> None:
        work = self._works.pop(ticket, None)
        if work is None:
            return
        for name in work.names:
            self.engine.discard(name)
            self._jobs.pop(name, None)
        for _ in work.open:
            self._watcher.ended("abort", time.perf_counter() - work.arrived, None)

    def _observe(self, event: RoundEvent) -> None:
        self._event = event

    def _step(self) -> None:
        self._event = None
        try:
            deltas = self.engine.step()
            self._n_broken = 0
        except RankError:
            raise
        except Exception:
            log.exception("a step has broken; the requests that were running end")
            deltas = self.engine.take()
            self._n_broken = 0 if deltas else self._n_broken + 1
            if self._n_broken == MAX_BROKEN:
                raise
        event = self._last_event()
        rows = {row.request: row for row in event.rows} if event is not None else {}
        events: list[tuple[str, Event]] = []
        for delta in deltas:
            work, prompt = self._jobs[delta.request_id]
            row = rows.get(f"{delta.request_id}/{delta.index}")
            round_ = (event, row) if event is not None and row is not None else None
            if work.wants_pieces:
                events.append((work.ticket, Piece(prompt, delta, round_)))
            self._count(work, prompt, delta)
            if delta.finish_reason is not None:
                events += self._end_output(work, prompt, delta)
        if events:
            self._post(events)

    def _last_event(self) -> RoundEvent | None:
        """The round of the last step; None if it did not finish."""
        return self._event

    def _count(self, work: _Work, prompt: int, delta: Delta) -> None:
        now, key = time.perf_counter(), (prompt, delta.index)
        if delta.token_ids:
            self._watcher.grew(len(delta.token_ids), now - work.open[key], work.open[key] == work.arrived)
            work.open[key] = now

    def _end_output(self, work: _Work, prompt: int, delta: Delta) -> list[tuple[str, Event]]:
        del work.open[prompt, delta.index]
        if any(of == prompt for of, _ in work.open):
            return []
        name = work.names[prompt]
        result = work.results[prompt] = self.engine.result(name)
        del self._jobs[name]
        for output in result.outputs:
            self._watcher.ended(output.finish_reason, time.perf_counter() - work.arrived, output)
        if work.open:
            return []
        del self._works[work.ticket]
        return [(work.ticket, Done([work.results[index] for index in range(len(work.prompts))]))]

    def _post(self, events: list[tuple[str, Event]]) -> None:
        self._call(lambda: self._deliver(events))

    def _call(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # The methods from here on run in the event loop.

    async def _drained(self) -> SaguaroError:
        await self._draining.wait()
        return _ending()

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for name, event in events:
            ticket = self._tickets.get(name)
            if ticket is not None:
                ticket.put(event)


def _ending() -> Unavailable:
    return Unavailable("the server is ending and takes no more requests; ask another")


async def _unless(failed: "asyncio.Future[SaguaroError]", work: Awaitable[T]) -> T:
    """Await the work. If an error comes first, cancel the work and raise the error."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, failed), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise failed.result()
    finally:
        task.cancel()
