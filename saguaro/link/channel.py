"""One end of a link: whole messages over a non-blocking socket.

Invariant: after an exception at any point (Ctrl-C too) the channel is either unchanged or known to be lost. The message
count is updated in the same assignment as the state, and an interrupted transfer is never resumed on a guess.
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
    """A message being received: n bytes of its header or body have arrived."""

    last: int  # sequence number of the last complete message; 0: none
    buffer: Array
    n: int = 0
    header: Header | None = None


@dataclass(frozen=True)
class _Writing:
    """A message being sent: its remaining parts."""

    sequence: int = 0
    parts: tuple[memoryview, ...] = ()


class Channel:
    """Sends and receives messages."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        """Bodies longer than the limit are refused before memory is allocated for them."""
        sock.setblocking(False)
        self.limit = limit
        self.moved_at = now()  # time of the last byte in either direction
        self._socket = sock
        self._reading, self._writing = _Reading(0, _room(HEADER_SIZE)), _Writing()
        self._is_in_doubt = False

    @property
    def posted(self) -> int:
        """Sequence number of the last posted message."""
        return self._writing.sequence

    @property
    def received(self) -> int:
        """Sequence number of the last complete message received."""
        return self._reading.last

    @property
    def has_answered(self) -> bool:
        """Whether any message was received."""
        return self.received > 0

    @property
    def is_owed(self) -> bool:
        """Whether the answer to the last posted message is missing."""
        return self.received != self.posted

    @property
    def is_midway(self) -> bool:
        """Whether part of a message has arrived."""
        return self._reading.header is not None or self._reading.n > 0

    def post(self, kind: MessageKind, sequence: int, parts: Sequence[memoryview]) -> None:
        """Queue a message. The one before must have been sent."""
        assert not self._writing.parts, "a message was posted before the last one was sent"
        framed = frame(kind, sequence, parts)
        self.moved_at = now()
        self._writing = _Writing(sequence, tuple(framed))

    def exchange(self) -> Message | None:
        """Send as much as possible now. Returns the next message if it is complete."""
        self.flush()
        return self.receive()

    def flush(self) -> bool:
        """Send as much as possible now. Returns whether everything was sent."""
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
        """Return the next message if it is complete. Raises EOFError if the other end is closed."""
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
        """Wait until the socket can read or write. False: the deadline (clock: now(); None: no limit) came first."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._writing.parts else 0))
        left = None if deadline is None else max(0, math.ceil((deadline - now()) * 1000))
        return bool(poll.poll(left))

    def has_news(self) -> bool:
        """Whether data arrived or the other end is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _fill(self) -> bool:
        """Read the bytes that have arrived. False: none."""
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
        """Mark the transfer as uncertain: an exception before the bytes are counted loses the count."""
        if self._is_in_doubt:
            raise WireError("an exception came between bytes and their count")
        self._is_in_doubt = True


def _room(n: int) -> Array:
    return np.empty(n, np.uint8)


def _without(parts: tuple[memoryview, ...], n: int) -> tuple[memoryview, ...]:
    """The parts that remain after n bytes."""
    for at, part in enumerate(parts):
        if n < part.nbytes:
            return (part[n:], *parts[at + 1 :])
        n -= part.nbytes
    return ()
