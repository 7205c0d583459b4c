"""One end of a link: whole messages over a socket, without ever blocking.

Invariant: an exception at any point (Ctrl-C too) leaves the channel where it was, or known to be lost: messages are
counted in the same store that finishes them, and an interrupted transfer of bytes is never resumed on a guess.
"""

import math
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saguaro.link.frame import (
    HEADER_SIZE,
    Array,
    Header,
    Message,
    MessageKind,
    WireError,
    frame,
    read_header,
    read_message,
)

now = time.monotonic


@dataclass(frozen=True)
class _Reading:
    """A message that is coming in: its header or its body, of which n bytes are there."""

    last: int  # sequence number of the last whole message; 0: none came yet
    buffer: Array
    n: int = 0
    header: Header | None = None


@dataclass(frozen=True)
class _Writing:
    """A message that is going out: what is left of it."""

    sequence: int = 0
    parts: tuple[memoryview, ...] = ()


class Channel:
    """Posts and receives messages."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        """Bodies longer than the limit are refused before room is made for them."""
        sock.setblocking(False)
        self.limit = limit
        self.moved_at = now()  # when a byte last went either way
        self._socket = sock
        self._reading, self._writing = _Reading(0, _room(HEADER_SIZE)), _Writing()
        self._is_in_doubt = False

    @property
    def posted(self) -> int:
        """Sequence number of the last message posted."""
        return self._writing.sequence

    @property
    def received(self) -> int:
        """Sequence number of the last whole message received."""
        return self._reading.last

    @property
    def is_midway(self) -> bool:
        """Whether a message has begun to come in."""
        return self._reading.header is not None or self._reading.n > 0

    def post(self, kind: MessageKind, sequence: int, parts: Sequence[memoryview]) -> None:
        """Make this the message to be sent; the one before must be gone."""
        assert not self._writing.parts, "a message was posted before the last one was sent"
        framed = frame(kind, sequence, parts)
        self.moved_at = now()
        self._writing = _Writing(sequence, tuple(framed))

    def exchange(self) -> Message | None:
        """Send what can be sent now; the next message, if all of it is there."""
        self.flush()
        return self.receive()

    def flush(self) -> bool:
        """Send what can be sent now; whether everything is."""
        while self._writing.parts:
            self._begin()
            try:
                n = self._socket.sendmsg(self._writing.parts)
            except BlockingIOError:
                self._is_in_doubt = False
                return False
            self._writing = _Writing(self._writing.sequence, _without(self._writing.parts, n))
            self._is_in_doubt, self.moved_at = False, now()
        return True

    def receive(self) -> Message | None:
        """The next message, if all of it is there. EOFError: the other end is closed."""
        while True:
            if self._reading.n < len(self._reading.buffer) and not self._fill():
                return None
            reading = self._reading
            if reading.n < len(reading.buffer):
                continue
            header = reading.header or read_header(reading.buffer.data, self.limit)
            if reading.header is None and header.n_body:
                self._reading = _Reading(reading.last, _room(header.n_body), 0, header)
                continue
            message = read_message(header, reading.buffer if reading.header else _room(0))
            self._reading = _Reading(header.sequence, _room(HEADER_SIZE))
            return message

    def wait(self, deadline: float | None) -> bool:
        """Wait until a byte can go either way (now() is the clock; None: for ever); False: the deadline came first."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._writing.parts else 0))
        left = None if deadline is None else max(0, math.ceil((deadline - now()) * 1000))
        return bool(poll.poll(left))

    def has_news(self) -> bool:
        """Whether something arrived, or the other end is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _fill(self) -> bool:
        """Take what has arrived; False: nothing."""
        reading = self._reading
        self._begin()
        try:
            n = self._socket.recv_into(reading.buffer.data[reading.n :])
        except BlockingIOError:
            self._is_in_doubt = False
            return False
        if n == 0:
            raise EOFError("the other end was closed")
        self._reading = _Reading(reading.last, reading.buffer, reading.n + n, reading.header)
        self._is_in_doubt, self.moved_at = False, now()
        return True

    def _begin(self) -> None:
        """From here until the bytes are counted, an exception loses count."""
        if self._is_in_doubt:
            raise WireError("an exception came between bytes and their count")
        self._is_in_doubt = True


def _room(n: int) -> Array:
    return np.empty(n, np.uint8)


def _without(parts: tuple[memoryview, ...], n: int) -> tuple[memoryview, ...]:
    """What is left of these after n bytes."""
    for at, part in enumerate(parts):
        if n < part.nbytes:
            return (part[n:], *parts[at + 1 :])
        n -= part.nbytes
    return ()
