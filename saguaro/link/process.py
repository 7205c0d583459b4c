"""The link to a draft in a process of its own.

Invariant: the target never waits longer than the timeout, whatever the draft does. A late draft is left alone until it
has caught up, a dead one is started again in the background; either then knows no row, and is_fresh() says so once.

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
    """How long a draft is waited for; all in seconds."""

    behind: float = 20.0
    """Longest that a late draft may neither send nor take a byte (at least ten timeouts); then it is killed."""
    loading: float = 1800.0
    """The same for one that is starting."""
    pauses: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    """Before the first restart, the second, ...; the last is for all that follow."""
    settled: float = 10.0
    """A draft that has answered for so long starts with the first pause again."""
    lull: float = 0.005
    """Longest wait in a round for the rest of a late reply that is on its way."""


PATIENCE = Timeouts()


class Process:
    """Asks a draft in another process. For one thread."""

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
        """Start the draft, and return at once; it gets these cores (None: any) and threads."""
        self.n_starts = self.n_deaths = self.n_late = 0
        self.failure: str | None = None  # why the last draft died, until the next is ready
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
        """Whether the draft is loaded and owes no answer, as far as was last seen."""
        child = self._child
        return child is not None and not child.is_buried and child.is_ready and not child.is_behind

    @property
    def pid(self) -> int | None:
        """The draft's process; None while there is none."""
        return None if self._child is None else self._child.pid

    def wait_ready(self, seconds: float) -> None:
        """Wait until the draft is loaded. DraftError: it cannot be, or not within these seconds."""
        deadline = now() + seconds
        while not self.is_ready:
            if self.failure is not None:
                raise DraftError(f"the draft {self._config.draft!r} could not be started: {self.failure}")
            if now() >= deadline:
                remedy = "wait longer, or choose a smaller draft"
                raise DraftError(f"the draft {self._config.draft!r} is not ready after {seconds:g} seconds; {remedy}")
            if self._child is None or self._child.is_buried:
                time.sleep(0.005)
            else:
                self._child.channel.wait(min(deadline, now() + 0.1))
            self._poll()

    def is_fresh(self) -> bool:
        """Whether the draft is there and knows no row; asked once, it counts on the rows being introduced."""
        self._poll()
        if self._is_in_step or not self.is_ready:
            return False
        self._left, self._joined, self._known = [], {}, set()
        self._is_afresh = self._is_in_step = True
        return True

    def admit(self, rows: Sequence[Joined]) -> None:
        """Introduce these rows in the next turn."""
        if self._is_in_step:
            self._joined.update({row.slot: row for row in rows})
            self._known.update(row.slot for row in rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Tell in the next turn that these rows left."""
        if self._is_in_step:
            self._joined = {slot: row for slot, row in self._joined.items() if slot not in slots}
            self._left = list(dict.fromkeys([*self._left, *slots]))
            self._known.difference_update(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """Ask the draft; empty if it is not there or does not answer in time."""
        child = self._child
        if not self._is_in_step or child is None:
            return Speculation.empty(len(slots))
        self._is_in_step = False  # until it has answered: an interrupt must not leave it believed to be in step
        asked = [slot for slot, n in zip(slots, room, strict=True) if n]
        if not self._known.issuperset(asked):  # an interrupt came between is_fresh and the introduction
            return Speculation.empty(len(slots))
        turn = DraftRequest(self._is_afresh, self._left, tuple(self._joined.values()), outcome, slots, room)
        spec = self._ask(child, turn)
        if spec is None:
            return Speculation.empty(len(slots))
        self._left, self._joined, self._is_afresh = [], {}, False
        self._is_in_step = True
        return spec

    def overlap(self) -> None:
        """The draft prepares by itself, as soon as it has answered."""

    def close(self) -> None:
        """End the draft's process."""
        self._is_closed, self._is_in_step = True, False
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _ask(self, child: Child, turn: DraftRequest) -> Speculation | None:
        """One turn and its answer; None: late or dead."""
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
        """See what happened to the draft, and do what can be done about it without waiting."""
        child = self._child
        if self._is_closed:
            return
        if child is None:
            if now() >= self._start_at:
                self._start()
        elif not child.is_buried:
            try:
                self._listen(child)
            except (OSError, EOFError, WireError, DraftError) as e:
                self._lose(child, e)
        elif child.is_gone():
            self._mourn(child.epitaph(), child.answered_at - child.ready_at >= self.patience.settled)
            child.close()

    def _listen(self, child: Child) -> None:
        """Send and take what can be, for a draft that is starting or behind; otherwise nothing should come."""
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
            self._mourn(f"no process can be started: {e}", is_settled=False)

    def _lose(self, child: Child, why: Exception) -> None:
        """Nothing more from this one; a process that seems to end by itself is left a moment to do so."""
        self._is_in_step = False
        if isinstance(why, WireError):
            child.bury(str(why))
        else:
            child.bury(str(why) if isinstance(why, DraftError) else None, GRACE)

    def _mourn(self, why: str, is_settled: bool) -> None:
        """Count a death, and say when the next draft is to be started."""
        self.n_deaths += 1
        self.failure = why
        pauses = self.patience.pauses
        self._n_failures = 0 if is_settled else self._n_failures
        pause = pauses[min(self._n_failures, len(pauses) - 1)]
        self._n_failures, self._start_at, self._child = self._n_failures + 1, now() + pause, None


def _check(message: Message, posted: int) -> None:
    """The answer to the last message posted: ready to the first, a reply to the others."""
    if message.kind is MessageKind.FAILED:
        raise DraftError(decode_text(message.body))
    wanted = MessageKind.READY if posted == 1 else MessageKind.REPLY
    if (message.kind, message.sequence) != (wanted, posted):
        given = f"a {message.kind.name} numbered {message.sequence}"
        raise WireError(f"it sent {given} where a {wanted.name} numbered {posted} was due")
