"""Peers by URL: `openai=http://HOST:PORT/v1[,model=NAME][,key-env=VARIABLE][,name=LABEL][,timeout=SECONDS]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from saguaro.client.endpoint import TIMEOUT, Endpoint
from saguaro.errors import ConfigError

KIND = "openai="
OPTIONS = ("model", "key-env", "name", "timeout")


@dataclass(frozen=True, kw_only=True)
class PeerURL:
    """A server to measure."""

    name: str  # in tables
    endpoint: Endpoint
    model: str | None  # None: the first that it lists


def is_peer_url(peer: str) -> bool:
    """Whether a peer is given by its URL.

    >>> is_peer_url("openai=http://localhost:8000/v1"), is_peer_url("transformers")
    (True, False)
    """
    return peer.startswith(KIND)


def parse_peer_url(peer: str, environment: Mapping[str, str]) -> PeerURL:
    """Parse a peer, and read its key from the environment.

    >>> found = parse_peer_url("openai=http://a:1/v1,model=m,key-env=KEY", {"KEY": "secret"})
    >>> found.name, found.model, found.endpoint.url, found.endpoint.key
    ('a:1', 'm', 'http://a:1/v1', 'secret')
    """
    url, *given = peer.removeprefix(KIND).split(",")
    options: dict[str, str] = {}
    for option in given:
        name, _, value = option.partition("=")
        if name not in OPTIONS or not value or name in options:
            raise ConfigError(
                f"peer option {option!r} is not understood; write each of {', '.join(OPTIONS)} once, as KEY=VALUE"
            )
        options[name] = value
    variable = options.get("key-env")
    key = read_key(variable, environment) if variable is not None else None
    endpoint = Endpoint(url=url, key=key, timeout=_seconds(options.get("timeout")))
    return PeerURL(
        name=options.get("name", urlsplit(endpoint.url).netloc), endpoint=endpoint, model=options.get("model")
    )


def read_key(variable: str, environment: Mapping[str, str]) -> str:
    """The API key in a variable of the environment."""
    key = environment.get(variable, "").strip()
    if not key:
        raise ConfigError(f"key-env is {variable!r}, and there is no such variable; export {variable}=KEY")
    return key


def _seconds(value: str | None) -> float:
    try:
        return TIMEOUT if value is None else float(value)
    except ValueError as e:
        raise ConfigError(f"timeout is {value!r}; write a number of seconds") from e
