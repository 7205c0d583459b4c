"""An OpenAI-compatible server that follows a script, on a real socket: what other servers may do."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.loopback import Quiet, listening

Act = Callable[["Exchange"], None]  # answers one POST


class Exchange(Quiet):
    """One request to the server, and what may be answered."""

    protocol_version = "HTTP/1.1"
    body: dict[str, Any]

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """A complete answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin(self) -> None:
        """Begin a stream; it ends where the connection does."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()

    def event(self, data: object) -> None:
        """Send an event: a text as it is, anything else as JSON."""
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def piece(self, text: str, finish_reason: str | None = None) -> None:
        """Send a piece of an answer."""
        self.event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


@contextmanager
def scripted(acts: Mapping[str, Act], models: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Serve; the server's address. An act's base URL is that and /NAME/v1. Without models there is no list of them."""

    class Handler(Exchange):
        def do_GET(self) -> None:
            found = models is not None and self.path.endswith("/v1/models")
            self.reply(200 if found else 404, json.dumps(models).encode() if found else b"nothing here")

        def do_POST(self) -> None:
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            acts[self.path.split("/")[1]](self)

    with listening(Handler) as address:
        yield address
