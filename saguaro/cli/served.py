"""The settings of `saguaro serve`, in this process or in a cluster."""

import os

from saguaro.cli import commands
from saguaro.cluster.settings import check_limits
from saguaro.errors import ConfigError
from saguaro.serve.settings import ServerSettings, accepted_hosts


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


def check_proxied(command: commands.Serve) -> None:
    """Refuse the settings of our own connections: those of a cluster belong to Ray Serve's proxies."""
    check_limits(command.limits.limits())
    if command.forwarded_allow_ips is not None:
        raise ConfigError(
            f"forwarded_allow_ips is {command.forwarded_allow_ips!r}; Ray Serve's log names no clients: leave it out"
        )
    if command.ssl_certfile is not None and command.ssl_keyfile is None:
        raise ConfigError("--ssl-keyfile is missing; Ray Serve's proxies read certificate and key from two files")
