"""Errors in the format of the OpenAI API: {"error": {"message", "type", "param", "code"}}, and their status codes."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from saguaro.errors import ConfigError, Overloaded, ReaderTooSlow, RequestError, SaguaroError, TimedOut, Unavailable

RETRY_AFTER = {"Retry-After": "1"}  # seconds
MAX_MESSAGE, MAX_PARAM = 1000, 100  # characters: limits how much of the client's input is sent back

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_STATUS: Mapping[type[SaguaroError], int] = {
    Overloaded: 429,
    Unavailable: 503,
    TimedOut: 504,
    ReaderTooSlow: 504,
    ConfigError: 400,
    RequestError: 400,
}
# Messages of ConfigError begin with the parameter and a location in it.
_NAMED = re.compile(r"(?!structured)([a-z_]+)(?:\[[^\]]*\]|\.[a-z_]+)* (?:is|has|holds|names) ")


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorResponse(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorBody


class APIError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(_cut(message, MAX_MESSAGE))
        self.status, self.param, self.code = status, _cut(param, MAX_PARAM) if param else param, code

    @property
    def headers(self) -> dict[str, str] | None:
        """Additional headers."""
        return {429: RETRY_AFTER, 503: RETRY_AFTER, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = self.code if self.code is not None else self.status
        error = ErrorBody(message=str(self), type=kind, param=self.param, code=code)
        return ErrorResponse(error=error).model_dump()

    def response(self) -> JSONResponse:
        """The JSON response."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def api_error(error: SaguaroError) -> APIError:
    """Convert our errors: errors caused by the request become 400."""
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400)
    named = _NAMED.match(str(error)) if isinstance(error, ConfigError) else None
    return APIError(status, str(error), param=named[1] if named else None)


def install_handlers(app: FastAPI) -> None:
    """Use this format for every error."""

    @app.exception_handler(APIError)
    async def on_api_error(_: Request, e: APIError) -> JSONResponse:
        return e.response()

    @app.exception_handler(SaguaroError)
    async def on_own_error(_: Request, e: SaguaroError) -> JSONResponse:
        return api_error(e).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, e: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {e.detail}" if e.status_code in (404, 405) else str(e.detail)
        response = APIError(e.status_code, message).response()
        response.headers.update(e.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(_: Request, e: Exception) -> JSONResponse:
        return APIError(500, f"internal error: {type(e).__name__}").response()


def _cut(text: str, most: int) -> str:
    """Shorten a text in the middle; the end is kept, as it has the remedy.

    >>> _cut("stop is 'aaaaaaaaaaaaaaaa'; shorten it", 30)
    "stop is 'aaaa ... ; shorten it"
    """
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[: most - 5 - half]} ... {text[-half:]}"
