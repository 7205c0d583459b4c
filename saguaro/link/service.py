"""A draft service: one draft model for the targets of several machines.

    main thread            accepts connections, counts them, logs what goes on
    a thread per session   greets, reads requests, answers (link/session.py)
    turns                  one session computes at a time (link/turns.py)

Invariant: what has not proved that it knows the key costs a connection and some bytes, for a few seconds.
"""

import contextlib
import logging
import select
import socket
import threading
import time

import torch

from saguaro.link.address import name_of, tend
from saguaro.link.handshake import Guest, Refused
from saguaro.link.session import Served, Session
from saguaro.link.turns import Turns

log = logging.getLogger(__name__)

PENDING = 32  # connections beside the sessions: greeting, or being refused
PAUSE_S = 0.1  # after the system could not accept a connection
END_S = 5.0  # for sessions to end


class Service:
    """Serves until it is stopped."""

    def __init__(self, place: socket.socket, served: Served) -> None:
        """place: a listening socket, which is closed at the end."""
        self._place, self._served, self._turns = place, served, Turns()
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._n_past = 0  # requests of sessions that have ended
        self._n_sessions = 0
        self._waker, self._wake = socket.socketpair()
        self._told = ""

    @property
    def sessions(self) -> list[Session]:
        """Those that have proved that they know the key, in the order of their connection."""
        with self._lock:
            return [each for each in self._sessions if each.guest is not None]

    @property
    def is_idle(self) -> bool:
        """Whether no session computes."""
        return self._turns.is_free

    @property
    def status(self) -> str:
        """One line.

        `2 sessions, 5 rows, 1204 requests: 1 (10.0.0.5:40112) 3 rows, 800 requests; ...`
        """
        sessions = self.sessions
        n_requests = self._n_past + sum(each.counts.n_requests for each in sessions)
        n_rows = sum(len(each.counts.slots) for each in sessions)
        every = f"{_count(len(sessions), 'session')}, {_count(n_rows, 'row')}, {_count(n_requests, 'request')}"
        each = "; ".join(
            f"{one.number} ({one.name}) {_count(len(one.counts.slots), 'row')}, "
            f"{_count(one.counts.n_requests, 'request')}"
            for one in sessions
        )
        return f"{every}: {each}" if each else every

    def run(self) -> None:
        """Accept until `stop`, then end all sessions."""
        poll, due = select.poll(), time.monotonic() + self._served.status_s
        for one in (self._place, self._wake):
            poll.register(one, select.POLLIN)
        self._place.setblocking(False)
        while True:
            ready = dict(poll.poll(max(0, 1000 * (due - time.monotonic()))))
            if self._wake.fileno() in ready:
                break
            if self._place.fileno() in ready:
                self._accept()
            if time.monotonic() >= due:
                due = time.monotonic() + self._served.status_s
                self._tell()
        self._end()

    def stop(self) -> None:
        """Make `run` return. May be called by a signal handler."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _tell(self) -> None:
        """Log the status if it has changed."""
        status = self.status
        if status != self._told:
            log.info("%s", status)
        self._told = status

    def _accept(self) -> None:
        try:
            sock, place = self._place.accept()
        except BlockingIOError:
            return
        except OSError as e:  # no descriptor or memory is left, or the client is gone already
            log.warning("a connection could not be accepted: %s", e)
            time.sleep(PAUSE_S)
            return
        with self._lock:
            is_full = len(self._sessions) >= self._served.max_sessions + PENDING
        if is_full:
            log.warning("%s is not greeted: there are too many connections", name_of(place))
            sock.close()
            return
        tend(sock)
        self._n_sessions += 1
        session = Session(
            sock, name_of(place), self._n_sessions, served=self._served, admit=self._admit, turns=self._turns
        )
        thread = threading.Thread(target=self._run, args=(session,), daemon=True, name=f"session {session.number}")
        with self._lock:
            self._sessions[session] = thread
        thread.start()

    def _run(self, session: Session) -> None:
        """A session's thread."""
        torch.get_num_threads()  # or torch would replace the number at its first use in this thread
        torch.set_num_threads(self._served.threads)
        try:
            session.run()
        except Exception:
            log.exception("session %d failed", session.number)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                self._n_past += session.counts.n_requests

    def _admit(self, session: Session, guest: Guest) -> None:
        """Make a greeted client a session. An earlier connection of the same link is over."""
        with self._lock:
            others = [each for each in self._sessions if each.guest is not None]
            earlier = [each for each in others if each.guest == guest]
            n_others = len({each.guest for each in others} - {guest})
            if n_others >= self._served.max_sessions:
                raise Refused(
                    f"it serves {_count(n_others, 'session')}, which is all it may; start it with a larger "
                    "--max-sessions, or another service"
                )
            session.guest = guest
        for each in earlier:
            log.info("session %d goes on as session %d", each.number, session.number)
            each.hang_up()

    def _end(self) -> None:
        self._place.close()
        with self._lock:
            running = dict(self._sessions)
        for session in running:
            session.hang_up()
        deadline = time.monotonic() + END_S
        for thread in running.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        for one in (self._waker, self._wake):
            one.close()


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
