"""`saguaro serve`: serves the model over HTTP until a signal ends it."""

import faulthandler
import logging
import sys

from saguaro.cli import commands
from saguaro.cli.served import settings_of
from saguaro.serve.address import bind, check_certificate
from saguaro.serve.build import build_server
from saguaro.serve.server import LAST_SECONDS, Server, uvicorn_config
from saguaro.serve.settings import SPARE_SECONDS


def serve(command: commands.Serve) -> int:
    """Serve until a signal ends the server."""
    settings = settings_of(command)
    logging.basicConfig(level=command.log_level.upper(), stream=sys.stderr, format="%(levelname)s:     %(message)s")
    check_certificate(command.ssl_certfile, command.ssl_keyfile)
    place = bind(command.host, command.port)
    llm = commands.load(command.which, command.engine, is_logged=True, generation_config=command.generation_config)
    if llm.recommended:
        told = ", ".join(f"{name} {value}" for name, value in llm.recommended.items())
        print(f"saguaro: requests that do not say get the model's own {told}", file=sys.stderr)
    service, app = build_server(llm, settings)
    config = uvicorn_config(
        app,
        service,
        host=command.host,
        port=place.getsockname()[1],
        log_level=command.log_level,
        access_log=command.access_log,
        forwarded_allow_ips=command.forwarded_allow_ips,
        ssl_certfile=command.ssl_certfile,
        ssl_keyfile=command.ssl_keyfile,
    )
    # Last resort if a library holds the GIL: print a traceback and end the process.
    last = service.limits.drain_seconds + SPARE_SECONDS + LAST_SECONDS
    server = Server(config, service, on_drain=lambda: faulthandler.dump_traceback_later(last, exit=True))
    server.run([place])
    faulthandler.cancel_dump_traceback_later()
    if service.front.lost is not None:
        raise service.front.lost
    return 0
