"""`saguaro serve`: the model behind HTTP, until it is told to end."""

import asyncio
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from saguaro.errors import ConfigError, Unavailable
from saguaro.serve import cli
from saguaro.serve.http.app import create_app
from saguaro.serve.http.service import Service

SPARE_SECONDS = 5.0  # after the time to drain: for responses to be sent


class Server(uvicorn.Server):
    """Told to end, it takes no more requests, lets those there are finish, and ends what has not in time."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        name, method = self._service.names[0], self._service.engine.method.name
        print(f"saguaro: serving {name} with {method} on http://{self.config.host}:{self.config.port}", file=sys.stderr)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain; a second Ctrl-C ends at once."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        elif not self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)
        self.should_exit = True

    def _drain(self) -> None:
        front, seconds = self._service.front, self._service.limits.drain_seconds
        front.drain()
        error = Unavailable(f"the server is ending, and the request was not done after {seconds:g} seconds more")
        asyncio.get_running_loop().call_later(seconds, front.end, error)


def serve(command: cli.Serve) -> int:
    """Serve until told to end."""
    limits = command.limits.limits()
    keys = command.api_key or tuple(filter(None, [os.environ.get("SAGUARO_API_KEY")]))
    if any(not key.strip() for key in keys):
        raise ConfigError("the API key is empty; give one with letters, or none")
    logging.basicConfig(level=command.log_level.upper(), stream=sys.stderr, format="%(levelname)s:     %(message)s")
    which = cli.ModelArgs(
        model=command.model, tokenizer=command.tokenizer, revision=command.revision, cache_dir=command.cache_dir
    )
    place = bind(command.host, command.port)
    llm = cli.load(which, command.engine)
    service = Service(llm.engine, command.served_model_name or (llm.engine.loaded.name,), limits)
    app = create_app(service, api_keys=keys, allowed_origins=command.allowed_origins)
    config = uvicorn.Config(
        app,
        host=command.host,
        port=place.getsockname()[1],
        log_level=command.log_level,
        access_log=command.access_log,
        timeout_graceful_shutdown=int(limits.drain_seconds + SPARE_SECONDS),
        server_header=False,
    )
    Server(config, service).run([place])
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A place to listen, taken before the model is loaded; nobody is heard there until then."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"port is {port}; it must be between 0 (any that is free) and 65535")
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
    except OSError as e:
        place.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}; choose another --host or --port") from e
    return place
