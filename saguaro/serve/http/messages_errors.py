"""Errors of /v1/messages in Anthropic's shape: {"type": "error", "error": {"type", "message"}}."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error, also used as an event.

    >>> anthropic_error(404, "no such model")
    {'type': 'error', 'error': {'type': 'not_found_error', 'message': 'no such model'}}
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrors:
    """Converts the errors of /v1/messages, whether from guards, routes or the endpoint."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, except that errors are converted."""
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Rewording(send))


class _Rewording:
    def __init__(self, send: Send) -> None:
        self._send, self._body = send, b""
        self._start: Message | None = None  # of an error

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._reword(self._start)

    async def _reword(self, start: Message) -> None:
        body = json.dumps(anthropic_error(start["status"], _said(self._body)), ensure_ascii=False).encode()
        changed = (b"content-length", b"content-type")
        headers = [(name, value) for name, value in start["headers"] if name.lower() not in changed]
        headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _said(body: bytes) -> str:
    """The message of an error in the other endpoints' format."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
