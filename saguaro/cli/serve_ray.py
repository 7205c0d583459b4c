"""`saguaro serve --ray`: serves the model with replicas in a Ray cluster until a signal ends it."""

import os
from dataclasses import asdict

from saguaro.cli import commands
from saguaro.cli.served import check_proxied, settings_of
from saguaro.cluster.args import ReplicaSettings
from saguaro.cluster.entrance import Entrance
from saguaro.config import ModelSource
from saguaro.serve.address import check_certificate


def serve_ray(command: commands.Serve) -> int:
    """Serve with replicas in a Ray cluster until a signal ends them."""
    from saguaro.cluster.launch import serve_on_ray  # needs ray

    server = settings_of(command)
    check_proxied(command)
    check_certificate(command.ssl_certfile, command.ssl_keyfile)
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
