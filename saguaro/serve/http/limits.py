"""Limits of a client's requests."""

import math
from dataclasses import dataclass

from saguaro.config import parse_bytes
from saguaro.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a request may be, and how long it may take."""

    max_waiting: int = 128
    """Most outputs that wait while --max-num-seqs others are decoded; further requests get 429."""
    max_body: str = "4MiB"
    """Largest body of a request."""
    max_n: int = 16
    """Most outputs for one prompt."""
    max_prompts: int = 64
    """Most prompts in one request for completions."""
    max_connections: int = 1000
    """Most connections at a time; beyond them the longest idle one is closed. Fewer if `ulimit -n` allows fewer."""
    header_timeout: float = 10.0
    """Seconds that a request's line and headers may take to come."""
    body_timeout: float = 30.0
    """Seconds that its body may take to come."""
    keep_alive_timeout: int = 5
    """Seconds that a connection stays open after a response for another request."""
    request_timeout: float = 600.0
    """Seconds that a request may take, reading and waiting included."""
    drain_seconds: float = 30.0
    """Seconds that requests get to finish when the server is told to end."""

    def __post_init__(self) -> None:
        for name in ("max_n", "max_prompts", "max_connections"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}; it must be 0 or more")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "request_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body is {self.max_body!r}; it must be at least 1KiB")

    @property
    def max_body_bytes(self) -> int:
        """Bytes of the largest body."""
        return parse_bytes(self.max_body, "max_body")
