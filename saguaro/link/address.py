"""Addresses of draft services, and sockets to them and for them."""

import ipaddress
import re
import socket
from dataclasses import dataclass

from saguaro.config import SERVICE
from saguaro.errors import ConfigError, DraftError

PORT = 7117  # where a service listens unless told otherwise
DIAL_SECONDS = 5.0  # to reach a service
BACKLOG = 64
# A connection whose other end is gone without a word is noticed after this many seconds, idle or not.
IDLE_S, BETWEEN_S, N_PROBES = 10, 5, 2


@dataclass(frozen=True)
class Address:
    """A host and a port.

    >>> print(Address.of("box:7200"), Address.of("[::1]:7200"), Address.of("10.0.0.2"))
    box:7200 [::1]:7200 10.0.0.2:7117
    """

    host: str
    port: int

    @staticmethod
    def of(text: str) -> "Address":
        """Parse HOST, HOST:PORT or [IPv6]:PORT."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]@]+))(?::(\d{1,5}))?", text)
        if match is None or int(match[3] or 0) >= 2**16:
            raise ConfigError(f"{text!r} is no address; write HOST:PORT, such as 10.0.0.2:{PORT} or [::1]:{PORT}")
        return Address(match[1] or match[2], PORT if match[3] is None else int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ServiceName:
    """A draft service as a draft is named: tcp://HOST:PORT, perhaps with /MODEL, the model that it must serve.

    >>> ServiceName.of("tcp://box:7200/small").model, ServiceName.of("tcp://box").model
    ('small', None)
    """

    address: Address
    model: str | None

    @staticmethod
    def of(text: str) -> "ServiceName":
        """Parse the name."""
        place, _, model = text.removeprefix(SERVICE).partition("/")
        try:
            return ServiceName(Address.of(place), model or None)
        except ConfigError as e:
            raise ConfigError(f"draft is {text!r}; write {SERVICE}HOST:PORT, or {SERVICE}HOST:PORT/MODEL") from e

    def __str__(self) -> str:
        return f"{SERVICE}{self.address}" + (f"/{self.model}" if self.model else "")


def is_service(draft: str | None) -> bool:
    """Whether a draft is a service.

    >>> is_service("tcp://box:7117"), is_service("drop:3"), is_service(None)
    (True, False, False)
    """
    return draft is not None and draft.startswith(SERVICE)


def dial(address: Address, seconds: float = DIAL_SECONDS) -> socket.socket:
    """Connect. Raises DraftError in plain words."""
    try:
        sock = socket.create_connection((address.host, address.port), seconds)
    except socket.gaierror as e:
        raise DraftError(f"the host {address.host!r} is not known ({e.strerror}); check the address") from e
    except UnicodeError as e:
        raise DraftError(f"{address.host!r} cannot be the name of a host; check the address") from e
    except TimeoutError as e:
        remedy = "check the address, the network between the machines, and firewalls"
        raise DraftError(f"{address} does not answer within {seconds:g} seconds; {remedy}") from e
    except ConnectionRefusedError as e:
        remedy = f"start one there with `saguaro draft MODEL --listen {address}`, or check the address"
        raise DraftError(f"no draft service listens on {address}; {remedy}") from e
    except OSError as e:
        raise DraftError(f"{address} cannot be reached: {e.strerror or e}; check the address and the network") from e
    tend(sock)
    return sock


def tend(sock: socket.socket) -> None:
    """Send messages at once, and notice an end that is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    dead_ms = 1000 * (IDLE_S + BETWEEN_S * N_PROBES)
    options = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPALIVE": IDLE_S, "TCP_KEEPINTVL": BETWEEN_S}
    options |= {"TCP_KEEPCNT": N_PROBES, "TCP_USER_TIMEOUT": dead_ms}
    for name, value in options.items():
        if hasattr(socket, name):  # systems differ in the names that they have
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen(address: Address, is_keyed: bool) -> socket.socket:
    """Listen. Without a key only on an address that other machines cannot reach."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as e:
        raise ConfigError(f"listen is {address}, and the host {address.host!r} is not known ({e})") from e
    family, _, _, _, place = found[0]
    if not is_keyed and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"listen is {address}, which other machines can reach, and there is no key; make one with `openssl rand "
            "-hex 32 > draft.key` and pass --key-file draft.key here and --draft-key-file draft.key to the target, or "
            f"listen on 127.0.0.1:{address.port}"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"cannot listen on {address}: {e.strerror or e}; choose another --listen, or end what listens there"
        ) from e
    return sock


def name_of(place: object) -> str:
    """A socket's address for messages.

    >>> name_of(("10.0.0.2", 7117)), name_of(("::1", 7117, 0, 0))
    ('10.0.0.2:7117', '[::1]:7117')
    """
    assert isinstance(place, tuple)
    return str(Address(str(place[0]), int(place[1])))
