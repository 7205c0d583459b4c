"""The link to a draft elsewhere: in its own process, or on another machine.

Invariant: the target never waits longer than the timeout. A late draft gets no messages until it has caught up; a dead
one is started or reached again in the background. Both have lost their rows then, and is_fresh() reports it once.

    starting --ready--> in step --late--> behind --caught up--> fresh --introduced--> in step
        ^                  |                |                      |
        +--- after a pause +--- dead -------+                      +-- wake -- resting <-- rest -- in step
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from saguaro.config import DraftConfig
from saguaro.errors import DraftError
from saguaro.link.channel import Channel
from saguaro.link.frame import Message, MessageKind, SilenceError, WireError
from saguaro.link.peer import Peer, Peers
from saguaro.link.wire import DraftRequest, WireLimits, decode_reply, decode_text, encode_request
from saguaro.types import Joined, Outcome, Speculation

now = time.monotonic
clock = time.perf_counter  # of the times of a reply
log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class _Asked:
    """A request whose reply is not collected yet."""

    peer: Peer
    channel: Channel
    n_rows: int
    began: float  # clock: perf_counter
    deadline: float  # clock: monotonic


class Apart:
    """Talks to a draft elsewhere. Not thread-safe."""

    def __init__(self, config: DraftConfig, peers: Peers, *, timeout: float, patience: Timeouts = PATIENCE) -> None:
        """Start or reach the draft without waiting for it."""
        self.n_starts = self.n_deaths = self.n_late = 0
        self.failure: str | None = None  # why the last draft died; None once the next is ready
        self.timeout = timeout  # seconds
        self._config, self._limits, self.patience = config, WireLimits.of(config), patience
        self._peers = peers
        self._peer: Peer | None = None
        self._asked: _Asked | None = None
        self._ready_at = self._answered_at = 0.0  # of this peer: when it was ready, and when it last replied
        self._is_closed = self._is_in_step = self._is_afresh = self._is_resting = False
        self.n_ready = 0  # times a draft was ready
        self.was_asked = False  # in the last round
        self._n_failures, self._start_at = 0, now()
        self._left: list[int] = []
        self._joined: dict[int, Joined] = {}
        self._known: set[int] = set()
        self._poll()

    @property
    def is_ready(self) -> bool:
        """Whether the draft was loaded and owed no reply when last polled."""
        channel = self._channel
        return channel is not None and channel.has_answered and not channel.is_owed

    @property
    def is_in_step(self) -> bool:
        """Whether the draft knows all rows that were introduced to it, and may be asked."""
        return self._is_in_step

    @property
    def _channel(self) -> Channel | None:
        """The channel of a peer that was reached and not given up."""
        peer = self._peer
        return None if peer is None or peer.is_given_up else peer.channel

    @property
    def pid(self) -> int | None:
        """The draft's process id; None if it is not running, or on another machine."""
        return None if self._peer is None else self._peer.pid

    def wait_ready(self, seconds: float) -> None:
        """Wait until the draft is loaded. Raises DraftError if it fails or takes longer."""
        deadline = now() + seconds
        while not self.is_ready:
            if self.failure is not None:
                raise DraftError(f"the draft {self._peers.name!r} {self._peers.verbs[0]}: {self.failure}")
            if now() >= deadline:
                remedy = "wait longer, or choose a smaller draft"
                raise DraftError(f"the draft {self._peers.name!r} is not ready after {seconds:g} seconds; {remedy}")
            channel = self._channel
            if channel is None:
                time.sleep(0.005)
            else:
                channel.wait(min(deadline, now() + 0.1))
            self._poll()

    def is_fresh(self) -> bool:
        """Whether the draft runs and has no rows. After True, the caller must introduce all rows."""
        self._poll()
        if self._is_in_step or self._is_resting or not self.is_ready:
            return False
        self._left, self._joined, self._known = [], {}, set()
        self._is_afresh = self._is_in_step = True
        return True

    def rest(self) -> None:
        """Ask nothing until wake(). The draft stays connected, and loses its rows."""
        self._is_resting, self._is_in_step = True, False

    def wake(self) -> None:
        """Ask again, once all rows are introduced."""
        self._is_resting = False

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
        self.ask(outcome, slots, room)
        return self.collect() or Speculation.empty(len(slots))

    def ask(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> None:
        """Send a request for the next speculation. It is to be collected before anything else."""
        self._asked, self.was_asked = None, False
        peer, channel = self._peer, self._channel
        if not self._is_in_step or peer is None or channel is None:
            return
        self._is_in_step = False  # until the reply: after an interrupt the state is unknown
        asked = [slot for slot, n in zip(slots, room, strict=True) if n]
        if not self._known.issuperset(asked):  # interrupted between is_fresh and the introduction
            return
        turn = DraftRequest(self._is_afresh, self._left, tuple(self._joined.values()), outcome, slots, room)
        began, deadline = clock(), now() + self.timeout
        try:
            channel.post(MessageKind.TURN, channel.posted + 1, encode_request(turn))
            channel.flush()
        except OSError as e:
            self._lose(peer, e)
            return
        self._asked, self.was_asked = _Asked(peer, channel, len(slots), began, deadline), True

    def collect(self) -> Speculation | None:
        """The reply to what was asked; None: late, dead, or nothing was asked."""
        asked, self._asked = self._asked, None
        spec = None if asked is None else self._wait_for(asked)
        if spec is not None:
            self._left, self._joined, self._is_afresh = [], {}, False
            self._is_in_step = True
        return spec

    def overlap(self) -> None:
        """Nothing to do: the draft prepares after its reply."""

    def close(self) -> None:
        """End the draft's process, or the connection to it."""
        self._is_closed, self._is_in_step = True, False
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()

    def _wait_for(self, asked: "_Asked") -> Speculation | None:
        peer, channel = asked.peer, asked.channel
        try:
            while (message := channel.exchange()) is None:
                if not channel.wait(asked.deadline):
                    self.n_late += 1
                    return None
            _check(message, channel.posted)
            spec = decode_reply(message.body, asked.n_rows, self._limits)
            if spec.times is not None:
                spec = replace(spec, times=peer.local(spec.times, (asked.began, clock())))
        except (OSError, EOFError, WireError, DraftError) as e:
            self._lose(peer, e)
            return None
        self._answered_at = now()
        return spec

    def _poll(self) -> None:
        """Check the state of the draft, and restart or reap it if needed, without blocking."""
        peer = self._peer
        if self._is_closed:
            return
        if peer is None:
            if now() >= self._start_at:
                self._start()
        elif not peer.is_given_up:
            try:
                channel = peer.reach()
                if channel is not None:
                    self._listen(channel)
            except (OSError, EOFError, WireError, DraftError) as e:
                self._lose(peer, e)
        elif peer.is_gone():
            self._report_end(peer.why_ended(), self._answered_at - self._ready_at >= self.patience.settled)
            peer.close()

    def _listen(self, channel: Channel) -> None:
        """Send and receive while a draft is starting or behind; at other times no message is expected."""
        was_ready, deadline = channel.has_answered, now() + self.patience.lull
        while (message := channel.exchange()) is None and channel.is_midway and channel.wait(deadline):
            pass
        if message is not None:
            _check(message, channel.posted)
            if not was_ready:
                self._ready_at = self._answered_at = now()
                self.failure = None
                self.n_ready += 1
        elif channel.is_owed and now() - channel.moved_at > self._limit(channel):
            raise SilenceError(f"it did nothing for {self._limit(channel):g} seconds")

    def _limit(self, channel: Channel) -> float:
        return max(self.patience.behind, 10 * self.timeout) if channel.has_answered else self.patience.loading

    def _start(self) -> None:
        self.n_starts += 1
        if self.failure is not None:
            again = (self._peers.name, self._peers.verbs[1], self.n_starts - 1, self.failure)
            log.warning("the draft %s %s, for the %d. time: %s", *again)
        self._ready_at = self._answered_at = 0.0
        try:
            self._peer = self._peers.open(replace(self._config, generation=self.n_starts))
        except OSError as e:
            self._report_end(str(e), is_settled=False)

    def _lose(self, peer: Peer, why: Exception) -> None:
        """Give up this draft."""
        self._is_in_step = False
        peer.give_up(why)

    def _report_end(self, why: str, is_settled: bool) -> None:
        """Count a death and schedule the restart."""
        self.n_deaths += 1
        self.failure = why
        pauses = self.patience.pauses
        self._n_failures = 0 if is_settled else self._n_failures
        pause = pauses[min(self._n_failures, len(pauses) - 1)]
        self._n_failures, self._start_at, self._peer = self._n_failures + 1, now() + pause, None


def _check(message: Message, posted: int) -> None:
    """Check that this answers the last message: READY to the first, REPLY to the others."""
    if message.kind is MessageKind.FAILED:
        raise DraftError(decode_text(message.body))
    wanted = MessageKind.READY if posted == 1 else MessageKind.REPLY
    if (message.kind, message.sequence) != (wanted, posted):
        given = f"a {message.kind.name} numbered {message.sequence}"
        raise WireError(f"it sent {given} where a {wanted.name} numbered {posted} was due")
