"""`saguaro serve`: serves the model over HTTP until a signal ends it."""

import faulthandler
import logging
import os
import sys
from dataclasses import asdict

from saguaro.cli import commands
from saguaro.config import ModelSource
from saguaro.errors import ConfigError
from saguaro.serve.build import build_server
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.server import LAST_SECONDS, SPARE_SECONDS, Server, bind, check_certificate, uvicorn_config
from saguaro.serve.settings import ServerSettings, accepted_hosts


def serve(command: commands.Serve) -> int:
    """Serve until a signal ends the server."""
    settings = settings_of(command)
    if command.ray.ray:
        return serve_in_cluster(command, settings)
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


def settings_of(command: commands.Serve) -> ServerSettings:
    """The server's settings; without a key among them, that of SAGUARO_API_KEY.

    >>> settings_of(commands.Serve(host="box.example", api_key=("k",))).allowed_hosts
    ('*',)
    """
    keys = command.api_key or tuple(filter(None, [os.environ.get("SAGUARO_API_KEY")]))
    return ServerSettings(
        served_model_name=command.served_model_name,
        api_key=keys,
        allowed_origins=command.allowed_origins,
        allowed_hosts=accepted_hosts(command.allowed_hosts, (command.host,), has_keys=bool(keys)),
        limits=command.limits.limits(),
        parsers=command.parsers.parsers(),
    )


def serve_in_cluster(command: commands.Serve, server: ServerSettings) -> int:
    """Serve with replicas in a Ray cluster until a signal ends them."""
    check_for_proxies(command)
    check_certificate(command.ssl_certfile, command.ssl_keyfile)
    from saguaro.cluster.args import ReplicaSettings
    from saguaro.cluster.entrance import Entrance
    from saguaro.cluster.launch import serve_on_ray

    settings = ReplicaSettings(
        which=ModelSource(**asdict(command.which)),
        generation_config=command.generation_config,
        engine=command.engine.config(),
        server=server,
        access_log=command.access_log,
        log_level=command.log_level,
    )
    entrance = Entrance(
        ray_address=command.ray.ray_address or os.environ.get("RAY_ADDRESS"),
        every_node=command.ray.ray_every_node,
        wait_s=command.ray.ray_wait,
        host=command.host,
        port=command.port,
        ssl_certfile=command.ssl_certfile,
        ssl_keyfile=command.ssl_keyfile,
    )
    return serve_on_ray(settings, command.ray.cluster(), entrance)


def check_for_proxies(command: commands.Serve) -> None:
    """Refuse the settings of our own connections: those of a cluster belong to Ray Serve's proxies."""
    limits, usual = command.limits.limits(), ServerLimits()
    for name in ("max_connections", "header_timeout"):
        if getattr(limits, name) != getattr(usual, name):
            raise ConfigError(
                f"{name} is {getattr(limits, name)}; Ray Serve's proxies have no such limit: leave it out"
            )
    if command.forwarded_allow_ips is not None:
        raise ConfigError(
            f"forwarded_allow_ips is {command.forwarded_allow_ips!r}; Ray Serve's log names no clients: leave it out"
        )
    if command.ssl_certfile is not None and command.ssl_keyfile is None:
        raise ConfigError("--ssl-keyfile is missing; Ray Serve's proxies read certificate and key from two files")
