"""The address of an OpenAI-compatible server, and its key."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from saguaro.errors import ConfigError, short

TIMEOUT = 300.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go."""

    url: str
    """Its base URL, such as http://127.0.0.1:8000/v1; without a path, /v1 is added."""
    key: str | None = None
    """Sent as a bearer token."""
    timeout: float = TIMEOUT
    """Most seconds without a byte from it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", normalized(self.url))
        if not 0 < self.timeout <= 86400:
            raise ConfigError(f"timeout is {self.timeout:g}; it must be more than 0 and at most 86400 seconds")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable() and self.key):
            raise ConfigError("the API key is empty or holds characters that a header cannot; check the variable")


def normalized(url: str) -> str:
    """A checked base URL, without a slash at its end.

    >>> normalized("http://localhost:8000"), normalized("https://example.org/api/v1/")
    ('http://localhost:8000/v1', 'https://example.org/api/v1')
    """
    parts = urlsplit(url)
    try:
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_known = False
    if not is_known or parts.query or parts.fragment or not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError(f"the URL is {short(url)}; write http://HOST:PORT/v1, or https://")
    if parts.username is not None:
        raise ConfigError("the URL holds a user name; a key belongs into an environment variable that is named")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
