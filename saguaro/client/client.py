"""A client of OpenAI-compatible servers: the list of models, and streamed chats and completions.

Invariant: every failure of the other server is a PeerError of one sentence, and no read waits longer than the
endpoint's timeout.
"""

import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from saguaro.client.endpoint import Endpoint
from saguaro.client.sse import event_data
from saguaro.errors import PeerError, short

MAX_LINE = 2**20  # bytes of a line of a stream
MAX_ERROR = 2**16  # bytes read of an error's body
MAX_WORDS = 300  # characters shown of it
MAX_LIST = 2**24  # bytes of the list of models

_REMEDIES = {
    401: "give its API key",
    403: "give its API key",
    404: "check the URL and the model's name",
    429: "it has too many requests: lower the concurrency, or raise its limit",
}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of one request, as the server counts them."""

    prompt: int
    completion: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One event of a stream."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class Client:
    """Requests to one server; each has a connection of its own, so threads may share a client."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._open: set[_Reply] = set()
        self._lock = threading.Lock()

    def abort(self) -> None:
        """End all requests, from any thread: reads that wait fail at once."""
        with self._lock:
            replies = list(self._open)
        for reply in replies:
            reply.abort()

    def models(self) -> list[str]:
        """The names of its models; empty if the server has no such list."""
        reply = self._send("GET", "/models", None)
        try:
            if reply.response.status == 404:
                return []
            reply.check()
            found = json.loads(reply.read(MAX_LIST))
            return [str(model["id"]) for model in found["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise PeerError(f"{self.endpoint.url}/models is no list of models; is this an OpenAI server?") from e
        finally:
            reply.close()

    def chat(self, body: Mapping[str, Any]) -> "Stream":
        """Stream an answer to a conversation."""
        return self._stream("/chat/completions", body)

    def complete(self, body: Mapping[str, Any]) -> "Stream":
        """Stream the continuation of a prompt."""
        return self._stream("/completions", body)

    def _stream(self, path: str, body: Mapping[str, Any]) -> "Stream":
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reply = self._send("POST", path, json.dumps(asked).encode())
        try:
            reply.check()
            kind = reply.response.headers.get_content_type()
            if kind != "text/event-stream":
                raise PeerError(
                    f"{reply.url} answers with {kind}; a stream of events is needed: is this an OpenAI server?"
                )
        except BaseException:
            reply.close()
            raise
        return Stream(reply)

    def _send(self, verb: str, path: str, body: bytes | None) -> "_Reply":
        reply = _Reply(self.endpoint, path, on_close=self._forget)
        with self._lock:
            self._open.add(reply)
        try:
            reply.send(verb, body)
        except BaseException:
            reply.close()
            raise
        return reply

    def _forget(self, reply: "_Reply") -> None:
        with self._lock:
            self._open.discard(reply)


class Stream:
    """The chunks of one answer, to be iterated once. Closing it ends the request."""

    def __init__(self, reply: "_Reply") -> None:
        self._reply = reply
        self.began = reply.began  # time.perf_counter() when the request was sent; the connection was there

    def __iter__(self) -> Iterator[Chunk]:
        is_finished, n = False, 0
        for data in event_data(self._reply.lines()):
            if data.strip() == "[DONE]":
                return
            chunk = read_chunk(data, self._reply.url)
            is_finished, n = is_finished or chunk.finish_reason is not None, n + 1
            yield chunk
        if not is_finished:
            raise PeerError(
                f"{self._reply.url} closed the stream after {n} events, before the answer was complete; see its log"
            )

    def close(self) -> None:
        """End the request."""
        self._reply.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_chunk(data: str, url: str) -> Chunk:
    """The chunk of an event of a chat or a completion.

    >>> read_chunk('{"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}', "").text
    'a'
    >>> read_chunk('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}', "").usage
    Usage(prompt=3, completion=2)
    """
    try:
        found = json.loads(data)
        if "error" in found:
            raise PeerError(f"{url} ended the stream with an error: {_words(found)}")
        counted = found.get("usage")
        usage = counted and Usage(prompt=int(counted["prompt_tokens"]), completion=int(counted["completion_tokens"]))
        if not found.get("choices"):
            return Chunk(usage=usage or None)
        choice = found["choices"][0]
        delta = choice.get("delta") or choice
        return Chunk(
            text=str(delta.get("content") or delta.get("text") or ""),
            reasoning=str(delta.get("reasoning_content") or delta.get("reasoning") or ""),
            finish_reason=choice.get("finish_reason"),
            usage=usage or None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        raise PeerError(f"{url} sent {short(data)}, which is no chunk of an answer; is this an OpenAI server?") from e


class _Reply:
    """One request and the response to it."""

    response: http.client.HTTPResponse

    def __init__(self, endpoint: Endpoint, path: str, on_close: Callable[["_Reply"], None]) -> None:
        self.endpoint, self._parts = endpoint, urlsplit(endpoint.url)
        self.url = endpoint.url + path
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        host = self._parts.hostname
        assert host is not None
        self._connection = kind(host, self._parts.port, timeout=endpoint.timeout)
        self._path = self._parts.path + path
        self._socket: socket.socket | None = None
        self._on_close, self._is_aborted = on_close, False
        self.began = 0.0

    def send(self, verb: str, body: bytes | None) -> None:
        """Send the request and read the response's head."""
        headers = {"Accept": "text/event-stream, application/json", "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.endpoint.key is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"
        with _explained(self):
            self._connection.connect()
            self._socket = self._connection.sock
            if self._is_aborted:
                raise ConnectionAbortedError("the request was aborted")
            self.began = time.perf_counter()
            self._connection.request(verb, self._path, body, headers)
            self.response = self._connection.getresponse()

    def check(self) -> None:
        """Raise unless the status is 200."""
        status = self.response.status
        if status == 200:
            return
        said, remedy = _words(self.read(MAX_ERROR)), _REMEDIES.get(status)
        raise PeerError(f"{self.url} answered {status}{said and f': {said}'}" + (f"; {remedy}" if remedy else ""))

    def read(self, n: int) -> bytes:
        """At most n bytes of the body."""
        with _explained(self):
            return self.response.read(n)

    def lines(self) -> Iterator[bytes]:
        """The lines of the body."""
        while True:
            with _explained(self):
                line = self.response.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE:
                raise PeerError(f"{self.url} sent a line of more than {MAX_LINE} bytes; is this an OpenAI server?")
            yield line

    def close(self) -> None:
        """Close the connection."""
        if hasattr(self, "response"):
            self.response.close()
        self._connection.close()
        self._on_close(self)

    def abort(self) -> None:
        """Let a read in another thread fail."""
        self._is_aborted = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                return


@contextmanager
def _explained(reply: _Reply) -> Iterator[None]:
    """In this context, errors of the network become a PeerError."""
    url = reply.url
    try:
        yield
    except TimeoutError as e:
        seconds = reply.endpoint.timeout
        raise PeerError(f"{url} sent nothing for {seconds:g} seconds; see its log, or wait longer") from e
    except ConnectionRefusedError as e:
        raise PeerError(f"{url} cannot be reached: connection refused; start the server, or correct the URL") from e
    except socket.gaierror as e:
        raise PeerError(f"{url} cannot be reached: {e.strerror}; correct the host's name") from e
    except ssl.SSLError as e:
        raise PeerError(f"{url} cannot be reached over TLS: {e.reason or e}; check its certificate, or use http") from e
    except (OSError, http.client.HTTPException, ValueError) as e:
        why = str(e) or type(e).__name__
        raise PeerError(f"{url} closed the connection or does not speak HTTP ({why}); see its log") from e


def _words(body: bytes | Mapping[str, Any]) -> str:
    """What an error's body says, in one line."""
    try:
        found: Any = json.loads(body) if isinstance(body, bytes) else body
        found = found.get("error", found)
        said = found if isinstance(found, str) else found.get("message") or found.get("detail") or found
    except (ValueError, AttributeError):
        said = body.decode("utf-8", errors="replace") if isinstance(body, bytes) else body
    line = " ".join(str(said).split())
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 3] + "..."
