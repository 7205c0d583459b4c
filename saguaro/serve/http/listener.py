"""Accepts connections one at a time, and never more than the limit.

asyncio accepts all waiting connections at once, and logs a traceback for each if no file descriptor is left. Here the
number of connections stays below `ulimit -n`. If descriptors run out anyway, one line is logged and accepting pauses
for a moment.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvicorn.server import ServerState

from saguaro.errors import ConfigError

log = logging.getLogger(__name__)

MAX_GREETED = 16  # concurrent handshakes (TLS)
SPARE_FILES = 32 + MAX_GREETED  # descriptors for other uses: restarting a draft, files of the page
RETRY_SECONDS = 0.5  # pause after accepting failed
LOG_SECONDS = 60.0  # between two log lines about it
CLOSE_SECONDS = 5.0  # for the client to read the rest, once a connection is closed


def find_room(wanted: int) -> int:
    """The possible number of connections, at most `wanted`. Raises the limit of open files if possible."""
    n_open = len(list(Path("/dev/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n_open + SPARE_FILES + wanted
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - n_open - SPARE_FILES)
    if room < 1:
        raise ConfigError(f"`ulimit -n` is {soft}, and {n_open} files are open; allow {needed}")
    if room < wanted:
        log.warning("there can be %d connections instead of %d: `ulimit -n` is %d", room, wanted, soft)
    return room


class Listener:
    """Accepts connections on a socket. Replaces asyncio's server in uvicorn."""

    def __init__(
        self,
        place: socket.socket,
        make: Callable[[], asyncio.Protocol],
        state: ServerState,
        *,
        handshake_timeout: float,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._place, self._make, self._state = place, make, state
        self._tls: dict[str, Any] = {"ssl": context, "ssl_handshake_timeout": handshake_timeout} if context else {}
        self._loop = asyncio.get_running_loop()
        self._greeted: list[asyncio.Task[None]] = []  # pending connections, oldest first
        self._closing: set[asyncio.Transport] = set()
        self._next_line = 0.0  # time of the next log line about a failure
        self._is_closed = False

    def start(self, backlog: int) -> None:
        """Start listening."""
        self._place.setblocking(False)
        self._place.listen(backlog)
        self._loop.add_reader(self._place, self._accept)
        self._sweep()

    def close(self) -> None:
        """Stop accepting. Open connections stay."""
        self._is_closed = True
        self._loop.remove_reader(self._place)
        for task in self._greeted:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns immediately."""

    def _accept(self) -> None:
        try:
            connection, _ = self._place.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            self._pause(e)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise a short answer waits 40 ms
        if len(self._greeted) >= MAX_GREETED:
            self._greeted.pop(0).cancel()
        task = self._loop.create_task(self._greet(connection))
        self._greeted.append(task)
        task.add_done_callback(self._forget)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection, **self._tls)
        except OSError:  # the client left, or the handshake failed
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise

    def _forget(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(ValueError):
            self._greeted.remove(task)

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a moment, so that connections can end."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_SECONDS
            log.error("no connection can be accepted for the moment: %s", error)
        self._loop.remove_reader(self._place)
        self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._place, self._accept)

    def _sweep(self) -> None:
        """Abort closed connections whose clients do not read the rest."""
        closing = {one.transport for one in self._state.connections if one.transport.is_closing()}
        for transport in closing & self._closing:
            transport.abort()
        self._closing = closing
        self._loop.call_later(CLOSE_SECONDS, self._sweep)
