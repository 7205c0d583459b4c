"""One client of a draft service, from its connection to its end.

Invariant: rows, trees and pages belong to the session, and are freed when it ends, however it ends.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from saguaro.config import DraftConfig
from saguaro.errors import SaguaroError
from saguaro.link.answer import GONE, IsLate, Side, answer, send, words_of
from saguaro.link.channel import Channel
from saguaro.link.frame import MessageKind, WireError
from saguaro.link.handshake import SECONDS, Guest, Refused, greet_client, refuse, send_offer
from saguaro.link.offer import Offer, encode_offer
from saguaro.link.turns import Turns
from saguaro.link.wire import MAX_WORDS, encode_text
from saguaro.types import Joined, Outcome, Speculation

now = time.monotonic
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What a session has done, and what it holds."""

    n_requests: int = 0
    slots: set[int] = field(default_factory=set)  # rows known
    n_tokens: int = 0  # of KV memory


class Counted:
    """A draft side (link.answer.Side) whose requests and rows are counted."""

    def __init__(self, side: Side, counts: Counts) -> None:
        self._side, self._counts = side, counts

    def admit(self, joined: Sequence[Joined]) -> None:
        """See Side."""
        self._side.admit(joined)
        self._counts.slots |= {row.slot for row in joined}

    def retire(self, slots: Sequence[int]) -> None:
        """See Side."""
        self._side.retire(slots)
        self._counts.slots -= set(slots)

    def respond(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        """See Side."""
        self._counts.n_requests += 1
        return self._side.respond(outcome, slots, room)

    def prepare(self, is_late: IsLate) -> None:
        """See Side."""
        self._side.prepare(is_late)

    def keep(self) -> None:
        """See Side."""
        self._side.keep()


class Session:
    """Greets one client and answers it, in a thread of its own."""

    def __init__(
        self, sock: socket.socket, name: str, number: int, *, served: "Served", admit: "Admit", turns: Turns
    ) -> None:
        """admit: see Admit; name: the client's address."""
        self.name, self.number, self.counts = name, number, Counts()
        self.guest: Guest | None = None  # once it was admitted
        self._socket, self._began = sock, now()
        self._served, self._admit, self._turns = served, admit, turns

    def run(self) -> None:
        """Greet, and answer until the other end closes."""
        try:
            self._greet()
            self._answer()
        except Refused as e:
            log.warning("%s is refused: %s", self.name, e)
        except GONE:
            self._log_end("it was closed")
        except WireError as e:
            self._log_end(f"it sent what cannot be: {e}")
        except OSError as e:
            self._log_end(f"the connection was lost: {e.strerror or e}")
        finally:
            self.counts = replace(self.counts, slots=set(), n_tokens=0)
            self._socket.close()

    def hang_up(self) -> None:
        """Close the connection from another thread. Its own thread ends soon after."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _greet(self) -> None:
        channel, guest = greet_client(self._socket, self._served.key, self._served.greeting_s)
        try:
            self._admit(self, guest)
        except Refused as e:
            refuse(channel, str(e))
        send_offer(channel, encode_offer(self._served.offer), self._served.greeting_s)
        log.info("session %d: %s is connected", self.number, self.name)

    def _build(self, config: DraftConfig) -> Side:
        side, self.counts.n_tokens = self._served.build(config)
        return Counted(side, self.counts)

    def _answer(self) -> None:
        channel = Channel(self._socket, MAX_WORDS)
        try:
            answer(channel, self._build, self._turns)
        except (OSError, EOFError, WireError):
            raise
        except Exception as e:
            is_known = isinstance(e, SaguaroError)
            log.warning("session %d: %s", self.number, words_of(e), exc_info=not is_known)
            send(channel, MessageKind.FAILED, encode_text(words_of(e)))
            self._log_end("it was refused" if is_known else "it failed")

    def _log_end(self, why: str) -> None:
        if self.guest is None:
            log.warning("%s is not greeted: %s", self.name, why)
            return
        facts = f"{now() - self._began:.1f} s, {self.counts.n_requests} requests"
        log.info("session %d: %s has left (%s) after %s", self.number, self.name, why, facts)


Admit = Callable[[Session, Guest], None]  # makes it a session; raises Refused if there is no room
Build = Callable[[DraftConfig], tuple[Side, int]]  # the draft side for a client's settings, and its KV tokens


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served, and how."""

    offer: Offer
    key: bytes
    build: Build
    max_sessions: int
    status_s: float  # seconds between two lines about sessions, if something has happened
    threads: int  # that a session computes with
    greeting_s: float = SECONDS  # for a client to prove that it knows the key
