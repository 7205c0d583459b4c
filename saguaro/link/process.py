"""The link to a draft in its own process.

Invariant: the target never waits longer than the timeout. A late draft gets no messages until it has caught up; a dead
one is restarted in the background. Both have lost their rows then, and is_fresh() reports it once.

    starting --ready--> in step --late--> behind --caught up--> fresh --introduced--> in step
        ^                  |                |
        +--- after a pause +--- dead -------+
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from saguaro.config import DraftConfig
from saguaro.errors import DraftError
from saguaro.link.child import GRACE, Child
from saguaro.link.frame import Message, MessageKind, WireError
from saguaro.link.wire import DraftRequest, WireLimits, decode_reply, decode_text, encode_request
from saguaro.types import Joined, Outcome, Speculation

now = time.monotonic
log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "saguaro.link.worker")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time limits for a draft, in seconds."""

    behind: float = 20.0
    """A late draft is killed after this time without a byte in either direction (at least ten timeouts)."""
    loading: float = 1800.0
    """The same for a draft that is starting."""
    pauses: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    """Pauses before the first restart, the second, ...; the last value is used for all later ones."""
    settled: float = 10.0
    """A draft that has replied for this long resets the pauses."""
    lull: float = 0.005
    """Maximum wait per round for the rest of a late reply that is arriving."""


PATIENCE = Timeouts()


class Process:
    """Talks to a draft in another process. Not thread-safe."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        threads: int,
        cores: Sequence[int] | None,
        timeout: float,
        worker: Sequence[str] = WORKER,
        patience: Timeouts = PATIENCE,
    ) -> None:
        """Start the draft without waiting for it. It gets these cores (None: any) and threads."""
        self.n_starts = self.n_deaths = self.n_late = 0
        self.failure: str | None = None  # why the last draft died; None once the next is ready
        self.timeout = timeout  # seconds
        self._config, self._limits, self.patience = config, WireLimits.of(config), patience
        self._command, self._threads, self._cores = worker, threads, cores
        self._child: Child | None = None
        self._is_closed = self._is_in_step = self._is_afresh = False
        self._n_failures, self._start_at = 0, now()
        self._left: list[int] = []
        self._joined: dict[int, Joined] = {}
        self._known: set[int] = set()
        self._poll()

    @property
    def is_ready(self) -> bool:
        """Whether the draft was loaded and owed no reply when last polled."""
        child = self._child
        return child is not None and not child.is_given_up and child.is_ready and not child.is_behind

    @property
    def pid(self) -> int | None:
        """The draft's process id; None if it is not running."""
        return None if self._child is None else self._child.pid

    def wait_ready(self, seconds: float) -> None:
        """Wait until the draft is loaded. Raises DraftError if it fails or takes longer."""
        deadline = now() + seconds
        while not self.is_ready:
            if self.failure is not None:
                raise DraftError(f"the draft {self._config.draft!r} could not be started: {self.failure}")
            if now() >= deadline:
                remedy = "wait longer, or choose a smaller draft"
                raise DraftError(f"the draft {self._config.draft!r} is not ready after {seconds:g} seconds; {remedy}")
            if self._child is None or self._child.is_given_up:
                time.sleep(0.005)
            else:
                self._child.channel.wait(min(deadline, now() + 0.1))
            self._poll()

    def is_fresh(self) -> bool:
        """Whether the draft runs and has no rows. After True, the caller must introduce all rows."""
        self._poll()
        if self._is_in_step or not self.is_ready:
            return False
        self._left, self._joined, self._known = [], {}, set()
        self._is_afresh = self._is_in_step = True
        return True

    def admit(self, rows: Sequence[Joined]) -> None:
        """Introduce these rows with the next message."""
        if self._is_in_step:
            self._joined.update({row.slot: row for row in rows})
            self._known.update(row.slot for row in rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Report with the next message that these rows left."""
        if self._is_in_step:
            self._joined = {slot: row for slot, row in self._joined.items() if slot not in slots}
            self._left = list(dict.fromkeys([*self._left, *slots]))
            self._known.difference_update(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Ask the draft. Returns an empty speculation if it is not running or late."""
        child = self._child
        if not self._is_in_step or child is None:
            return Speculation.empty(len(slots))
        self._is_in_step = False  # until the reply: after an interrupt the state is unknown
        asked = [slot for slot, n in zip(slots, room, strict=True) if n]
        if not self._known.issuperset(asked):  # interrupted between is_fresh and the introduction
            return Speculation.empty(len(slots))
        turn = DraftRequest(self._is_afresh, self._left, tuple(self._joined.values()), outcome, slots, room)
        spec = self._ask(child, turn)
        if spec is None:
            return Speculation.empty(len(slots))
        self._left, self._joined, self._is_afresh = [], {}, False
        self._is_in_step = True
        return spec

    def overlap(self) -> None:
        """Nothing to do: the draft prepares after its reply."""

    def close(self) -> None:
        """End the draft's process."""
        self._is_closed, self._is_in_step = True, False
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, child: Child, turn: DraftRequest) -> Speculation | None:
        """Send one request and wait for the reply; None: late or dead."""
        channel, deadline = child.channel, now() + self.timeout
        try:
            channel.post(MessageKind.TURN, channel.posted + 1, encode_request(turn))
            while (message := channel.exchange()) is None:
                if not channel.wait(deadline):
                    self.n_late += 1
                    return None
            _check(message, channel.posted)
            spec = decode_reply(message.body, len(turn.slots), self._limits)
        except (OSError, EOFError, WireError, DraftError) as e:
            self._lose(child, e)
            return None
        child.answered_at = now()
        return spec

    def _poll(self) -> None:
        """Check the state of the draft, and restart or reap it if needed, without blocking."""
        child = self._child
        if self._is_closed:
            return
        if child is None:
            if now() >= self._start_at:
                self._start()
        elif not child.is_given_up:
            try:
                self._listen(child)
            except (OSError, EOFError, WireError, DraftError) as e:
                self._lose(child, e)
        elif child.is_gone():
            self._report_end(child.why_ended(), child.answered_at - child.ready_at >= self.patience.settled)
            child.close()

    def _listen(self, child: Child) -> None:
        """Send and receive while a draft is starting or behind; at other times no message is expected."""
        channel, was_ready = child.channel, child.is_ready
        deadline = now() + self.patience.lull
        while (message := channel.exchange()) is None and channel.is_midway and channel.wait(deadline):
            pass
        if message is not None:
            _check(message, channel.posted)
            if not was_ready:
                child.ready_at = child.answered_at = now()
                self.failure = None
        elif child.is_behind and now() - channel.moved_at > self._limit(child):
            raise WireError(f"it did nothing for {self._limit(child):g} seconds")

    def _limit(self, child: Child) -> float:
        return max(self.patience.behind, 10 * self.timeout) if child.is_ready else self.patience.loading

    def _start(self) -> None:
        self.n_starts += 1
        if self.failure is not None:
            log.warning("the draft is started again, for the %d. time: %s", self.n_starts - 1, self.failure)
        try:
            config = replace(self._config, generation=self.n_starts)
            self._child = Child(self._command, config, self._threads, self._cores)
        except OSError as e:
            self._report_end(f"no process can be started: {e}", is_settled=False)

    def _lose(self, child: Child, why: Exception) -> None:
        """Give up this draft. A process that seems to exit by itself gets a grace period."""
        self._is_in_step = False
        if isinstance(why, WireError):
            child.give_up(str(why))
        else:
            child.give_up(str(why) if isinstance(why, DraftError) else None, GRACE)

    def _report_end(self, why: str, is_settled: bool) -> None:
        """Count a death and schedule the restart."""
        self.n_deaths += 1
        self.failure = why
        pauses = self.patience.pauses
        self._n_failures = 0 if is_settled else self._n_failures
        pause = pauses[min(self._n_failures, len(pauses) - 1)]
        self._n_failures, self._start_at, self._child = self._n_failures + 1, now() + pause, None


def _check(message: Message, posted: int) -> None:
    """Check that this answers the last message: READY to the first, REPLY to the others."""
    if message.kind is MessageKind.FAILED:
        raise DraftError(decode_text(message.body))
    wanted = MessageKind.READY if posted == 1 else MessageKind.REPLY
    if (message.kind, message.sequence) != (wanted, posted):
        given = f"a {message.kind.name} numbered {message.sequence}"
        raise WireError(f"it sent {given} where a {wanted.name} numbered {posted} was due")
