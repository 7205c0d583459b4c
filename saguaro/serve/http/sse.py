"""Server-sent events, to a client that may disconnect or stop reading."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has disconnected."""


def sse(data: Any) -> bytes:
    r"""One event.

    >>> sse({"text": "é"})
    b'data: {"text":"\xc3\xa9"}\n\n'
    """
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T], seconds: float | None = None) -> T:
    """Await the work. Cancel it and raise ClientGone if the client disconnects or the time is over."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Writes events as they come. Each is written before the next is requested, so the client sets the pace."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], seconds: float) -> None:
        self._events, self._close, self._seconds = events, close, seconds  # seconds: for the whole stream
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, unless the client disconnects."""
        try:
            await unless_gone(receive, self._send(send), self._seconds)
        except ClientGone:
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
