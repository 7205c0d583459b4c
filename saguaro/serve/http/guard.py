"""What a request must pass before anything is done for it: the key, and the size and pace of its body."""

import asyncio
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saguaro.config import format_bytes
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.page import FILES

OPEN = ("/health", *FILES)  # without a key: whether the server lives, and the page, which holds nothing but itself


class KeyGuard:
    """Lets in who knows one of the keys. It takes as long for any wrong one."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without a key."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        message = "no API key, or a wrong one; send the header 'Authorization: Bearer KEY'"
        await APIError(401, message, code="invalid_api_key").response()(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        said = given.strip().encode("latin-1")  # the bytes that came
        known = [hmac.compare_digest(said, key) for key in self._keys]  # all of them, whichever it is
        return kind.lower() == "bearer" and any(known)


class BodyGuard:
    """Refuses a body that is too large, or that does not come."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 or 408 in place of the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except APIError as e:
            await e.response()(scope, receive, send)
            return
        await self._app(scope, _again(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> list[Message]:
        """The messages of the body."""
        length = Headers(scope=scope).get("content-length", "0")
        size, messages = 0, list[Message]()
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large(int(length))
        try:
            async with asyncio.timeout(self._seconds):
                while not messages or messages[-1].get("more_body", False):
                    messages.append(await receive())
                    size += len(messages[-1].get("body", b""))
                    if size > self._max_bytes:
                        raise self._too_large(size)
        except TimeoutError as e:
            raise APIError(408, f"the body did not come within {self._seconds:g} seconds; send it faster") from e
        return messages

    def _too_large(self, size: int) -> APIError:
        limit = format_bytes(self._max_bytes)
        return APIError(
            413, f"the body has {size} bytes or more, at most {limit} are read; send less, or raise --max-body"
        )


def _again(messages: list[Message], receive: Receive) -> Receive:
    """Gives the messages once more, then what comes."""
    left = list(reversed(messages))

    async def next_message() -> Message:
        return left.pop() if left else await receive()

    return next_message
