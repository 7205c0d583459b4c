"""One client's connection: uvicorn's h11 protocol, with additional limits.

    made --- header_timeout ---> headers are there --- body_timeout ---> served ---> answered --- keep_alive ---> closed
                                   ^------------------ header_timeout, from its first byte -------|

If there are too many connections, one that is not being served is closed for the new one: first those that wait for a
request, then those that wait for a body, oldest first. If all are being served, the new one gets a 503.
"""

import asyncio
import http
import json
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from saguaro.serve.http.errors import APIError

IDLE, RECEIVING, SERVED = range(3)


class Connection(H11Protocol):
    """HTTP/1.1 from one client."""

    def __init__(self, max_connections: int, header_timeout: float, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._max_connections, self._header_timeout = max_connections, header_timeout
        self._timer: asyncio.TimerHandle | None = None  # runs while a request's headers are awaited
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. If there are too many, close one."""
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > self._max_connections:
            others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
            waiting = [one for one in others if one.phase != SERVED and not one.transport.is_closing()]
            min(waiting, key=lambda one: (one.phase, one._since), default=self).give_up()

    @property
    def phase(self) -> int:
        """Waiting for a request, waiting for its body, or serving."""
        if self.cycle is None or self.cycle.response_complete:
            return IDLE
        return RECEIVING if self.cycle.more_body else SERVED

    def data_received(self, data: bytes) -> None:
        """Handle bytes of a request, or of a refused body."""
        if self.phase == IDLE:
            self._expect()
        super().data_received(data)

    def handle_events(self) -> None:
        """Handle a request once its headers are complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._since = time.monotonic()
            self._stop_timer()

    def on_response_complete(self) -> None:
        """Wait for the next request. Bytes of it, or of a refused body, may have arrived already."""
        self._since = time.monotonic()
        super().on_response_complete()
        if self.phase == IDLE and (self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY):
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the client disconnected."""
        self._stop_timer()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Close the connection in favour of another."""
        is_kept = self.phase == IDLE and self.cycle is not None and self._timer is None
        self._close(
            None if is_kept else APIError(503, f"there are {self._max_connections} connections; ask again later")
        )

    def _expect(self) -> None:
        """Start the timer for a request's headers."""
        if self._timer is None:
            self._since = time.monotonic()
            self._timer = self.loop.call_later(self._header_timeout, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        message = f"the request did not come within {self._header_timeout:g} seconds; send it faster"
        has_begun = bool(self.conn.trailing_data[0])  # browsers open connections that they may never use
        self._close(APIError(408, message) if has_begun else None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, error: APIError | None) -> None:
        """Close the connection, with a response unless one is being sent or none is expected."""
        is_answered = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if error is not None and not is_answered and not self.transport.is_closing():
            self.transport.write(_response(error))
        self.transport.close()


def _response(error: APIError) -> bytes:
    body = json.dumps(error.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in {**headers, **(error.headers or {})}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
