"""Checks before a request is handled: its Host header, its key, and the size and speed of its body."""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saguaro.config import format_bytes
from saguaro.errors import Unavailable
from saguaro.serve.front import Front
from saguaro.serve.http.body import SMALL
from saguaro.serve.http.errors import APIError, api_error
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.page import FILES
from saguaro.serve.http.sse import ClientGone

# Without a key: health checks, and the page, which contains no secrets.
OPEN = ("/health", "/ping", *FILES)

LOCAL = (".localhost", ".local", ".internal", ".home.arpa")  # never in the public DNS
MAX_BODIES = 16  # bodies of the largest size that may be held at once


class HostGuard:
    """Accepts requests whose Host header is one of the server's names.

    With DNS rebinding, a web page elsewhere resolves its own name to this machine, and its browser treats the server as
    part of that page; but the request still has the page's host. An IP address cannot be rebound, and names without a
    dot or below LOCAL do not exist in the public DNS, so these are always accepted.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        own = {socket.gethostname(), socket.getfqdn()}
        self._app, self._names = app, {name.lower().rstrip(".") for name in (*names, *own)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 421 to any other name."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_own(host_name(host)):
            await self._app(scope, receive, send)
            return
        message = f"this server is not known as {host[:100]!r}; start it with --allowed-hosts {host_name(host)[:100]}"
        await APIError(421, message, code="unknown_host").response()(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        if "*" in self._names or name in self._names or "." not in name or name.endswith(LOCAL):
            return True
        parents = (name[at:] for at, letter in enumerate(name) if letter == ".")
        return _is_address(name) or any(f"*{parent}" in self._names for parent in parents)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets.

    >>> host_name("Example.com:8000"), host_name("[::1]:80"), host_name("localhost.")
    ('example.com', '::1', 'localhost')
    """
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return bare.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KeyGuard:
    """Requires one of the keys. The comparison takes constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 without a valid key."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        message = "no API key, or a wrong one; send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        await APIError(401, message, code="invalid_api_key").response()(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        bearer = given if kind.lower() == "bearer" else ""
        said = [
            text.strip().encode("latin-1") for text in (bearer, headers.get("x-api-key", ""))
        ]  # the bytes that came
        known = [hmac.compare_digest(each, key) for each in said for key in self._keys]  # all of them: constant time
        return any(known)


class BodyGuard:
    """Refuses a body that is too large or too slow, and limits the memory of all bodies.

    If they hold too much, the oldest large body that is still arriving is dropped; if there is none, the new one.
    """

    def __init__(self, app: ASGIApp, front: Front, limits: ServerLimits) -> None:
        self._app, self._front = app, front
        self._max_bytes, self._seconds = limits.max_body_bytes, limits.body_timeout
        self._bodies: dict[_Body, None] = {}  # of all open requests, oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, 408 or 503 instead of the application."""
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        body = _Body()
        self._bodies[body] = None
        try:
            try:
                await self._front.while_serving(self._read(scope, receive, body))
            except ClientGone:
                return
            except APIError as e:
                await e.response()(scope, receive, send)
            except Unavailable as e:
                await api_error(e).response()(scope, receive, send)
            else:
                await self._app(scope, body.again(receive), send)
        finally:
            del self._bodies[body]

    async def _read(self, scope: Scope, receive: Receive, body: "_Body") -> None:
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > 20 or int(length) > self._max_bytes):
            raise self._too_large(length)
        try:
            async with asyncio.timeout(self._seconds) as body.deadline:
                while not body.is_whole:
                    body.take(await receive())
                    if body.size > self._max_bytes:
                        raise self._too_large(body.size)
                    if body.size > SMALL:
                        self._make_room(body)
                    if body.is_given_up:
                        raise self._given_up()
        except TimeoutError as e:
            if body.is_given_up:
                raise self._given_up() from e
            raise APIError(408, f"the body did not come within {self._seconds:g} seconds; send it faster") from e

    def _make_room(self, body: "_Body") -> None:
        """Drop a large body if needed. Small ones are always accepted: connections limit their number."""
        large = [one for one in self._bodies if one.size > SMALL]
        if sum(one.size for one in large) > MAX_BODIES * self._max_bytes:
            next((one for one in large if not one.is_whole), body).give_up()

    def _given_up(self) -> APIError:
        return APIError(503, "large bodies of other requests are being served; ask again later")

    def _too_large(self, size: int | str) -> APIError:
        limit = format_bytes(self._max_bytes)
        return APIError(
            413, f"the body has {size} bytes or more, at most {limit} are read; send less, or raise --max-body"
        )


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class _Body:
    """The bytes of one body, as they arrive."""

    def __init__(self) -> None:
        self.size, self.is_whole, self.is_given_up = 0, False, False
        self.deadline: asyncio.Timeout | None = None
        self._bytes = bytearray()

    def take(self, message: Message) -> None:
        """Add a message's bytes."""
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._bytes += message.get("body", b"")
        self.size = len(self._bytes)
        self.is_whole = not message.get("more_body", False)

    def give_up(self) -> None:
        """Stop reading, and release the bytes."""
        assert self.deadline is not None
        self.is_given_up = True
        self.size = 0
        self._bytes.clear()
        self.deadline.reschedule(asyncio.get_running_loop().time())

    def again(self, receive: Receive) -> Receive:
        """A receive function that returns the body again, then later messages."""
        left: list[Message] = [{"type": "http.request", "body": bytes(self._bytes), "more_body": False}]
        self._bytes.clear()

        async def next_message() -> Message:
            return left.pop() if left else await receive()

        return next_message
