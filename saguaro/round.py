"""One round, target side and draft side. Every method is this loop with other parts.

Autoregressive decoding is a round with an empty speculation; speculative decoding is a round without preparation. If
the draft is lost, rounds continue with empty speculations. Prefill is a row with many tokens and no speculation.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from saguaro.draft.drafter import Drafter, Prepared, never
from saguaro.draft.policy.ask import AlwaysAsk, Asks
from saguaro.draft.policy.kept import Kept
from saguaro.draft.policy.policy import Policy
from saguaro.draft.rows import DraftRow, DraftRows
from saguaro.target.grammar import Start
from saguaro.target.observe import round_event
from saguaro.target.scheduler import Batch, Commit, Scheduler, lookahead_limits
from saguaro.types import DraftLink, DraftTimes, Interval, Joined, Observer, Outcome, Speculation

now = time.perf_counter


class Pending(Protocol):
    """A running verification."""

    def outcome(self) -> Outcome:
        """Wait for the result."""

    def seconds(self) -> float | None:
        """Device time, available after the result; None: the host measures launch and wait."""


class Verifies(Protocol):
    """Launches verifications: target/verifier.py's Verifier, or what takes its place."""

    @property
    def runs_ahead(self) -> bool:
        """Whether launch returns before the result is computed, so that the host can continue."""

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """Start computing a batch. spec has one row per sampling row, at most as long as its lookahead."""


@dataclass(frozen=True)
class _Flight:
    """A round that was launched and is not decided yet."""

    batch: Batch
    spec: Speculation
    pending: Pending
    moments: tuple[float, float, float, float]  # boundaries of the speculate, launch and overlap intervals
    is_asked: bool  # whether the draft was to be asked


@dataclass(frozen=True)
class _Landed:
    """The result of a round."""

    commits: list[Commit]
    decided: float  # when the outcome arrived
    seconds: float | None  # device time


class Round:
    """The target side. Holds the last outcome until it is sent to the draft."""

    def __init__(self, scheduler: Scheduler, verifier: Verifies, draft: DraftLink, asks: Asks | None = None) -> None:
        self.scheduler, self.verifier, self.draft = scheduler, verifier, draft
        self.asks: Asks = asks if asks is not None else AlwaysAsk()
        self.observers: list[Observer] = []
        self._outcome, self._number = Outcome.nothing(), 0
        self._flight: _Flight | None = None
        self._trouble: BaseException | None = None

    def play(self) -> list[Commit]:
        """Run one round and return the tokens of each request. Returns an empty list if there is no work.

        On a device that computes asynchronously, the next round is launched before this one is reported, so the device
        does not wait for observers or detokenization. An error of that launch is raised by the next call, because the
        tokens of this round must be returned first.
        """
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
        flight = self._flight or self._launch()
        if flight is None:
            return []
        self._flight = None
        landed = self._land(flight)
        if self.verifier.runs_ahead:
            try:
                self._flight = self._launch()
            except BaseException as e:
                self._trouble = e
        self._tell(flight, landed)
        return landed.commits

    def _launch(self) -> _Flight | None:
        self.asks.choose()
        if self.draft.is_fresh():
            self._introduce_all()
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        try:
            began = now()
            self.draft.retire(batch.left)
            self.draft.admit(batch.joined)
            slots, room = [row.request.slot for row in batch.sampling], lookahead_limits(batch)
            spec = self.draft.speculate(self._outcome.without(batch.left), slots, room.tolist()).clip(room)
            asked = now()
            pending = self.verifier.launch(batch, spec)
            launched = now()
            self.draft.overlap()
            return _Flight(batch, spec, pending, (began, asked, launched, now()), self.asks.is_asking)
        except BaseException:  # the draft may have missed a message
            self._introduce_all()
            raise

    def _land(self, flight: _Flight) -> _Landed:
        try:
            waits = now()  # a round launched ahead may have waited here for any time
            self._outcome = flight.pending.outcome()
            decided, seconds = now(), flight.pending.seconds()
            began, asked, _, launched = flight.moments
            took = (launched - began) + (decided - waits)
            self.scheduler.took(flight.batch, self._outcome, took)
            commits = self.scheduler.commit(flight.batch, flight.spec, self._outcome)
            self.asks.learn(flight.batch, commits, asked - began, took + now() - decided)
            return _Landed(commits, decided, seconds)
        except BaseException:
            self._introduce_all()
            raise

    def _tell(self, flight: _Flight, landed: _Landed) -> None:
        self._number += 1
        moments = (*flight.moments, landed.decided)
        event = round_event(self._number, flight.batch, flight.spec, landed.commits, moments, landed.seconds)
        event = event if flight.is_asked else replace(event, is_asked=False)
        for observe in self.observers:
            observe(event)

    def _introduce_all(self) -> None:
        self._outcome = Outcome.nothing()
        self.scheduler.rejoin()


class DraftSide:
    """The draft side: the speculation in flight for each row, and what is prepared for its outcome."""

    def __init__(
        self,
        drafter: Drafter,
        policy: Policy,
        *,
        lookahead: int,
        n_vocab: int,
        start: Start | None = None,
        read_s: float = math.inf,  # seconds per round for reading texts while rows decode
        kept: Kept | None = None,  # what was learnt before, and will be
        reads_prompts: bool = True,  # whether a text may be read before the target has emitted its first token
    ) -> None:
        """Where draft and target share their threads, reading prompts early would delay first tokens. A draft that does
        not read them early prepares nothing."""
        self.rows = DraftRows(start)
        self.drafter, self.policy = drafter, policy
        self._lookahead, self._n_vocab, self._read_s, self._kept = lookahead, n_vocab, read_s, kept
        self._reads_prompts = reads_prompts
        self._is_awaited = False  # whether the last reply had any rows
        self._read_for_reply = 0.0  # seconds of reading before the last reply
        self._asked: list[DraftRow] = []
        self._outcome, self._prepared = Outcome.nothing(), (0.0, 0.0)
        self._made: Prepared | None = None  # the last preparation

    def warm(self, size: int) -> None:
        """Warm up for batches of this size."""
        self.drafter.warm(size)

    def admit(self, joined: Sequence[Joined]) -> None:
        """Add these rows."""
        self.drafter.admit(self.rows.admit(joined))

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        self.rows.retire(slots)
        self.drafter.retire(slots)

    def respond(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Commit the outcome, take what was prepared for it, and draft the rows that missed."""
        began, self._outcome = now(), outcome if self._made is not None else Outcome.nothing()
        self.policy.outcome(outcome, self.rows)
        self.rows.commit(outcome)
        self.drafter.settle(list(self.rows))
        reads_now = not self._reads_prompts and self.policy.reads
        self._read_for_reply = self._read(never, self._read_s) if reads_now else 0.0
        known = [(row, n) for slot, n in zip(slots, room, strict=True) if (row := self.rows.get(slot)) is not None]
        wanted = [(row, min(n, self._lookahead)) for row, n in known if n > 0]
        missed = self.drafter.serve(outcome, wanted)
        asked = [row for row, _ in known]
        self.policy.deepen([(row, n) for row, n in wanted if row.is_hit], asked)
        self.policy.draft(missed, asked)
        self._asked = [row for row in asked if row.request.params.prepare]
        self._is_awaited = bool(slots)
        self.policy.answered(self.rows, asked)
        spec = self.rows.in_flight(slots, self._lookahead, self._n_vocab)
        return replace(spec, times=DraftTimes((began, now()), self._prepared_in(), self._made is not None))

    def prepare(self, is_late: Callable[[], bool] = never) -> None:
        """Read texts that are behind, and prepare for likely outcomes. Stops early when the outcome arrives."""
        began, self._made = now(), None
        prepares = self.drafter.prepares and self.policy.prepares(self._asked, self.rows)
        read_s = self._read_for_reply
        if self._reads_prompts and (prepares or self.policy.reads):
            read_s = self._read(is_late, self._read_s if self._is_awaited else math.inf)
        is_due = self._kept is not None and self._kept.is_due and self.policy.learnt.is_sure
        if is_due:
            self.keep()
        self.policy.spent(read_s, prepares, is_due)
        if prepares:
            self._made = self.drafter.prepare(self._asked, self._outcome, is_late)
        self._prepared = (began, now())

    def keep(self) -> None:
        """Write what was learnt, if there is a file for it."""
        if self._kept is not None and self.policy.learnt.is_sure:
            self._kept.write({"policy": self.policy.state(), "drafter": self.drafter.state()})

    def _read(self, is_late: Callable[[], bool], most_s: float) -> float:
        """Read texts that are behind, for about so many seconds at most. Returns the seconds that it took."""
        began = now()
        rows = [row for row in self.rows if self._reads_prompts or row.request.n_output]
        return now() - began if self.drafter.read(rows, is_late, most_s) else 0.0

    def _prepared_in(self) -> Interval:
        """When the last preparation ran. On a device it continues after the launch."""
        seconds, began = self._made.seconds() if self._made else None, self._prepared[0]
        return self._prepared if seconds is None else (began, began + seconds)
