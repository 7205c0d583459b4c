"""What a server is beside its model, as plain values that can be sent to another machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from saguaro.errors import ConfigError
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.tools.parsers import Parsers

SPARE_SECONDS = 5  # after draining: for responses to be sent


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names, keys, hosts and limits."""

    served_model_name: tuple[str, ...] = ()
    """Names that clients may call the model by; the first is the one in responses. Without any, the model's own."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which clients must know; without any, everybody is served."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may ask; * is any."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that the server is reached by, beside IP addresses and names that only a local network knows; * is any."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """What a request may be, and how long it may take."""
    parsers: Parsers = field(default_factory=Parsers)
    """How the model's output is read."""

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("the API key is empty; give one with letters, or none")


def accepted_hosts(allowed: Sequence[str], own: Sequence[str], has_keys: bool) -> tuple[str, ...]:
    """Host names accepted in requests: any with API keys, because a page elsewhere has no key.

    >>> accepted_hosts((), ("box.example",), False), accepted_hosts((), ("box.example",), True)
    (('box.example',), ('*',))
    >>> accepted_hosts(("a.example",), ("127.0.0.1",), True)
    ('127.0.0.1', 'a.example')
    """
    return ("*",) if has_keys and not allowed else (*own, *allowed)
