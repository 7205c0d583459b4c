"""`saguaro serve`: serves the model over HTTP until a signal ends it."""

import faulthandler
import logging
import os
import sys

from saguaro.cli import commands
from saguaro.errors import ConfigError
from saguaro.serve.http.app import create_app
from saguaro.serve.http.service import Service
from saguaro.serve.server import LAST_SECONDS, SPARE_SECONDS, Server, bind, check_certificate, uvicorn_config

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.001  # how long the event loop waits for a computing thread; Python's default is 0.005


def serve(command: commands.Serve) -> int:
    """Serve until a signal ends the server."""
    sys.setswitchinterval(SWITCH_SECONDS)
    limits, parsers = command.limits.limits(), command.parsers.parsers()
    keys = command.api_key or tuple(filter(None, [os.environ.get("SAGUARO_API_KEY")]))
    if any(not key.strip() for key in keys):
        raise ConfigError("the API key is empty; give one with letters, or none")
    logging.basicConfig(level=command.log_level.upper(), stream=sys.stderr, format="%(levelname)s:     %(message)s")
    which = command.which
    check_certificate(command.ssl_certfile, command.ssl_keyfile)
    place = bind(command.host, command.port)
    llm = commands.load(which, command.engine, is_logged=True, generation_config=command.generation_config)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in llm.engine.startup.items())
    log.info("loaded, in seconds: %s", parts)
    log.info("%s", llm.engine.preparation)
    names = command.served_model_name or (llm.engine.loaded.name,)
    service = Service(llm.engine, names, limits, parsers, llm.recommended)
    if llm.recommended:
        told = ", ".join(f"{name} {value}" for name, value in llm.recommended.items())
        print(f"saguaro: requests that do not say get the model's own {told}", file=sys.stderr)
    hosts = hosts_of(command, has_keys=bool(keys))
    app = create_app(service, api_keys=keys, allowed_origins=command.allowed_origins, allowed_hosts=hosts)
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
    service.warm()
    # Last resort if a library holds the GIL: print a traceback and end the process.
    last = limits.drain_seconds + SPARE_SECONDS + LAST_SECONDS
    server = Server(config, service, on_drain=lambda: faulthandler.dump_traceback_later(last, exit=True))
    server.run([place])
    faulthandler.cancel_dump_traceback_later()
    if service.front.lost is not None:
        raise service.front.lost
    return 0


def hosts_of(command: commands.Serve, has_keys: bool) -> tuple[str, ...]:
    """Host names accepted in requests: any with API keys, because a page elsewhere has no key.

    >>> hosts_of(commands.Serve(host="box.example"), False), hosts_of(commands.Serve(), True)
    (('box.example',), ('*',))
    >>> hosts_of(commands.Serve(allowed_hosts=("a.example",)), True)
    ('127.0.0.1', 'a.example')
    """
    return ("*",) if has_keys and not command.allowed_hosts else (command.host, *command.allowed_hosts)
