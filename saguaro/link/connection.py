"""A connection to a draft service on another machine: a Peer (link/peer.py).

Invariant: no method waits for the network. A thread finds the host, connects, and goes through the handshake; then the
connection is a channel like that of a child process.
"""

import logging
import math
import socket
import threading
from dataclasses import dataclass, replace

from saguaro.config import DraftConfig
from saguaro.errors import DraftError
from saguaro.link.address import DIAL_SECONDS, ServiceName, dial
from saguaro.link.apart import PATIENCE, Apart, Timeouts
from saguaro.link.channel import Channel
from saguaro.link.frame import MessageKind, WireError
from saguaro.link.handshake import greet_service, new_identity
from saguaro.link.offer import Expected, check_offer, decode_offer
from saguaro.link.wire import WireLimits, encode_settings
from saguaro.types import DraftTimes, Interval

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """Connects to one service, again and again (Peers)."""

    at: ServiceName
    key: bytes
    expected: Expected
    identity: bytes  # by which the service knows that a new connection takes an old one's place
    verbs = ("cannot be used", "is connected again")

    @property
    def name(self) -> str:
        """See Peers."""
        return str(self.at)

    def open(self, config: DraftConfig) -> "Connection":
        """See Peers."""
        return Connection(self, config)


class Connection:
    """One connection, from the first attempt to its end."""

    pid = None

    def __init__(self, service: Service, config: DraftConfig) -> None:
        """Begin to connect."""
        self.channel: Channel | None = None
        self._service, self._config = service, config
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # connected, and greeted
        self._trouble: DraftError | None = None
        self._is_closed, self._reason = False, ""
        threading.Thread(target=self._connect, daemon=True, name="draft connection").start()

    @property
    def is_given_up(self) -> bool:
        """See Peer."""
        return bool(self._reason)

    def reach(self) -> Channel | None:
        """See Peer."""
        if self.channel is None:
            with self._lock:
                sock, trouble = self._socket, self._trouble
            if trouble is not None:
                raise trouble
            if sock is not None:
                channel = Channel(sock, WireLimits.of(self._config).n_reply)
                channel.post(MessageKind.SETTINGS, 1, encode_settings(without_paths(self._config)))
                self.channel = channel
        return self.channel

    def give_up(self, why: Exception) -> None:
        """See Peer."""
        if not self._reason:
            self._reason = _words_of(why)
            self.close()

    def is_gone(self) -> bool:
        """See Peer: the process on the other machine is not ours to end."""
        return self.is_given_up

    def why_ended(self) -> str:
        """See Peer."""
        return self._reason

    def local(self, times: DraftTimes, exchange: Interval) -> DraftTimes:
        """See Peer. The other machine's clock is not ours: its answer is put in the middle of the exchange."""
        each = (*times.respond, *times.prepare)
        took = times.respond[1] - times.respond[0]
        if not all(map(math.isfinite, each)) or took < 0:
            raise WireError(f"times that cannot be: {each}")
        ends = exchange[1] - max(0.0, exchange[1] - exchange[0] - took) / 2
        by = ends - times.respond[1]
        (respond, responded), (prepare, prepared) = times.respond, times.prepare
        return replace(times, respond=(respond + by, responded + by), prepare=(prepare + by, prepared + by))

    def close(self) -> None:
        """See Peer."""
        with self._lock:
            self._is_closed = True
            if self._socket is not None:
                self._socket.close()

    def _connect(self) -> None:
        """Runs in a thread of its own, for at most the time limits of reaching and greeting."""
        sock = None
        try:
            sock = dial(self._service.at.address, DIAL_SECONDS)
            self._greet(sock)
        except Exception as e:
            if sock is not None:
                sock.close()
            with self._lock:
                self._trouble = DraftError(_words_of(e))
            return
        with self._lock:
            self._socket = sock
            if self._is_closed:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        service = self._service
        greeted = greet_service(sock, service.key, service.identity)
        offer = decode_offer(greeted.offer)
        check_offer(offer, service.expected)
        words = "draft %s serves %s, %.2f ms away"
        log.info(words, service.at, offer.terms.model, 1e3 * greeted.round_trip_s)


def without_paths(config: DraftConfig) -> DraftConfig:
    """The settings without what only this machine knows: the service has its own paths, device and files."""
    return replace(config, draft=None, target="", tokenizer="", device="", dtype="", learnt="", learnt_facts="{}")


def draft_service(
    config: DraftConfig,
    at: ServiceName,
    key: bytes,
    expected: Expected,
    *,
    timeout: float,
    patience: Timeouts = PATIENCE,
) -> Apart:
    """A link to a draft service. It is reached without waiting for it."""
    return Apart(config, Service(at, key, expected, new_identity()), timeout=timeout, patience=patience)


def _words_of(why: Exception) -> str:
    """Why a connection ended, in plain words."""
    match why:
        case DraftError():
            return str(why)
        case WireError():
            return f"it does not speak as a draft service of this version does: {why}"
        case EOFError() | ConnectionResetError() | BrokenPipeError():
            return "it closed the connection"
        case TimeoutError() if why.errno is None:
            return f"it accepts connections and says nothing: {why}; is a draft service there?"
        case OSError():
            return f"the connection was lost: {why.strerror or why}"
    return f"{type(why).__name__}: {why}"
