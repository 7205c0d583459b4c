"""Where a cluster is, where its proxies listen, and what the command that serves there is told."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from saguaro.errors import ClusterError, ConfigError

CONNECT_SECONDS = 5.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # of HTTP/2, with empty settings
SETTINGS = b"\x04"  # the kind of frame that a gRPC server answers with


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """Where the cluster is, and where its proxies listen."""

    ray_address: str | None
    """HOST:PORT, auto, local, or None: the cluster of this machine, else a new one."""
    every_node: bool
    """Whether a proxy listens on every node that has a replica, or on the head node alone."""
    wait_s: float
    """Seconds that the cluster may take to have room."""
    host: str
    port: int
    ssl_certfile: Path | None
    ssl_keyfile: Path | None

    def url(self, port: int) -> str:
        """The address for clients."""
        return f"{'http' if self.ssl_certfile is None else 'https'}://{self.host}:{port}"


def check_reachable(address: str) -> None:
    """Refuse an address where no Ray cluster answers: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"ray_address is {address!r}; give auto, local, or the HOST:PORT at which `ray start --head` lets nodes "
            "join, and run the command on a node of the cluster"
        )
    remedy = "start one with `ray start --head`, and give its --ray-address"
    try:
        with socket.create_connection((host, int(port)), CONNECT_SECONDS) as line:
            line.settimeout(CONNECT_SECONDS)
            line.sendall(PREFACE)
            is_grpc = os.environ.get("RAY_USE_TLS", "0") != "0" or line.recv(9)[3:4] == SETTINGS
    except (OSError, OverflowError) as e:
        raise ClusterError(f"no Ray cluster answers at {address}: {e}; {remedy}") from e
    if not is_grpc:
        raise ClusterError(f"what answers at {address} is no Ray cluster; {remedy}")


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets. A second Ctrl-C interrupts."""
    is_told = threading.Event()

    def tell(number: int, _: object) -> None:
        if is_told.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        is_told.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason_of(message: str) -> str:
    r"""Our own error at the end of a traceback, else its last line.

    >>> reason_of("It failed:\nTraceback:\n  raise ...\nsaguaro.errors.ModelNotFound: 'm' is no folder\n")
    "'m' is no folder"
    >>> reason_of("Traceback:\n  raise ...\nMemoryError: 3 GiB\n"), reason_of("")
    ('MemoryError: 3 GiB', 'Ray does not say why')
    """
    ours = re.search(r"^saguaro\.errors\.\w+: (.*)", message, re.MULTILINE | re.DOTALL)
    return (ours[1] if ours else (message.strip().splitlines() or ["Ray does not say why"])[-1]).strip()
