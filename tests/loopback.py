"""An HTTP server on a real socket, in threads of this process: what tests of clients connect to."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    def handle_error(self, *where: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that leaves is no error
            super().handle_error(*where)


class Quiet(BaseHTTPRequestHandler):
    """Answers without a log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def listening(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the end; the server's address."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
