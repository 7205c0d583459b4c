"""The HTTP server: start, draining and shutdown."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from saguaro.serve.front import JOIN_SECONDS
from saguaro.serve.http.connection import Connection
from saguaro.serve.http.listener import Listener, find_room
from saguaro.serve.http.service import Service
from saguaro.serve.settings import SPARE_SECONDS

log = logging.getLogger(__name__)

LAST_SECONDS = JOIN_SECONDS + 5.0  # after that: for the engine to end


class Server(uvicorn.Server):
    """After a signal it refuses new requests, waits for the open ones, and ends those that take too long.

    signal --- draining: /health and new requests get 503 --- idle, or drain_seconds --- connections close --- end
    """

    def __init__(self, config: uvicorn.Config, service: Service, on_drain: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._service, self._on_drain = service, on_drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_told = False
        service.front.on_lost = self._end_at_once

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address."""
        assert sockets is not None, "the server is given its sockets"
        self._loop = asyncio.get_running_loop()
        limits = self._service.limits
        room = find_room(limits.max_connections)
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)

        def connection() -> Connection:
            return Connection(
                room, limits.header_timeout, config=self.config, server_state=self.server_state,
                app_state=self.lifespan.state, _loop=self._loop
            )  # fmt: skip

        more: dict[str, Any] = {"handshake_timeout": limits.header_timeout, "context": self.config.ssl}
        self.servers = [Listener(place, connection, self.server_state, **more) for place in sockets]  # type: ignore[misc]
        for listener in self.servers:
            listener.start(self.config.backlog)  # type: ignore[attr-defined]
        self.started = True
        name, method = self._service.names[0], self._service.engine.method.name
        scheme = "https" if self.config.is_ssl else "http"
        url = f"{scheme}://{self.config.host}:{self.config.port}"
        print(f"saguaro: serving {name} with {method} on {url}", file=sys.stderr)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on a signal; end immediately on a second Ctrl-C."""
        if self._loop is None:
            self.should_exit = True
        elif not self._is_told:
            self._is_told = True
            self._on_drain()
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _end_at_once(self) -> None:
        """The engine cannot continue: requests have ended; send what is left and end."""
        self.should_exit = True

    async def _drain(self) -> None:
        """Finish open requests while the listeners still answer; then let uvicorn close everything."""
        await self._service.drain()
        self.should_exit = True


def uvicorn_config(
    app: FastAPI, service: Service, *, forwarded_allow_ips: str | None = None, **more: Any
) -> uvicorn.Config:
    """The uvicorn settings that Connection and Listener require."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        timeout_keep_alive=service.limits.keep_alive_timeout,
        timeout_graceful_shutdown=SPARE_SECONDS,
        server_header=False,
        proxy_headers=forwarded_allow_ips is not None,
        forwarded_allow_ips=forwarded_allow_ips,
        **more,
    )
