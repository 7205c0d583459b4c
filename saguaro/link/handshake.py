"""How a target's machine and a draft service prove to each other that they know the same key.

    service -> client   HELLO   nonce of the service, whether it has a key
    client -> service   PROOF   nonce of the client, its identity, HMAC of both nonces and the identity
    service -> client   PROOF   HMAC of the same, in the other role; or FAILED
    service -> client   OFFER   what is served (link/offer.py)

Invariant: the key is never sent. The service describes what it serves only after both proofs are right. An end reads
at most LIMIT bytes from an end that has not proved itself. The nonces are new for every connection, so a proof is of no
use for another one. Without a key the proof is of an empty one.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from saguaro.errors import ConfigError, DraftError, SaguaroError
from saguaro.link.channel import Channel
from saguaro.link.frame import VERSION, Array, MessageKind, WireError
from saguaro.link.wire import decode_text, encode_text

SECONDS = 5.0  # for the whole handshake
LIMIT = 4096  # bytes of a body before both proofs are right
MOST_OFFER = 2**22  # bytes of what is served
LEAST_KEY, MOST_KEY = 16, 4096  # bytes of a key

_HELLO = struct.Struct("<32sQ")
_PROOF = struct.Struct("<32s16s32s")
_CLIENT, _SERVICE = b"saguaro draft client", b"saguaro draft service"

now = time.monotonic


class Refused(SaguaroError):
    """A client that is not served. It is told why."""


@dataclass(frozen=True)
class Guest:
    """A client that has proved that it knows the key."""

    identity: bytes  # of the link at its end, the same after it has connected again


@dataclass(frozen=True)
class Greeted:
    """A service that has proved the same."""

    offer: Array  # [n] uint8
    round_trip_s: float


def read_key(path: str | Path | None) -> bytes:
    """The key in a file, without surrounding white space; empty without a file."""
    if path is None:
        return b""
    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(MOST_KEY + 1).strip()
    except OSError as e:
        raise ConfigError(f"the key file {path} cannot be read: {e.strerror or e}") from e
    if not LEAST_KEY <= len(key) <= MOST_KEY:
        raise ConfigError(
            f"the key in {path} has {len(key)} bytes; it must have between {LEAST_KEY} and {MOST_KEY}: make one with "
            f"`openssl rand -hex 32 > {path}`"
        )
    return key


def new_identity() -> bytes:
    """An identity for one link."""
    return secrets.token_bytes(16)


def greet_client(sock: socket.socket, key: bytes, seconds: float = SECONDS) -> tuple[Channel, Guest]:
    """The service's part up to its proof. Raises Refused, and what a channel raises."""
    deadline = now() + seconds
    channel, ours = Channel(sock, LIMIT), secrets.token_bytes(32)
    _send(channel, MessageKind.HELLO, 1, [_HELLO.pack(ours, bool(key))], deadline)
    body = _receive(channel, MessageKind.PROOF, 1, deadline, refusals=False)
    if len(body) != _PROOF.size:
        raise WireError(f"a proof of {len(body)} bytes; it has {_PROOF.size}")
    theirs, identity, proof = _PROOF.unpack(body.tobytes())
    about = (ours, theirs, identity)
    if not hmac.compare_digest(proof, _proof(key, _CLIENT, *about)):
        refuse(channel, "the key is wrong: --key-file of the service and --draft-key-file must hold the same")
    _send(channel, MessageKind.PROOF, 2, [_proof(key, _SERVICE, *about)], deadline)
    return channel, Guest(identity)


def refuse(channel: Channel, why: str) -> NoReturn:
    """Tell a client why it is not served, as far as that is possible at once. Raises Refused."""
    channel.post(MessageKind.FAILED, channel.posted + 1, encode_text(why))
    channel.flush()
    raise Refused(why)


def send_offer(channel: Channel, offer: bytes, seconds: float = SECONDS) -> None:
    """Send what is served."""
    _send(channel, MessageKind.OFFER, 3, [offer], now() + seconds)


def greet_service(sock: socket.socket, key: bytes, identity: bytes, seconds: float = SECONDS) -> Greeted:
    """The client's part. Raises DraftError if the service refuses or does not know the key."""
    deadline = now() + seconds
    channel, ours = Channel(sock, LIMIT), secrets.token_bytes(32)
    body = _receive(channel, MessageKind.HELLO, 1, deadline)
    if len(body) != _HELLO.size:
        raise WireError(f"a greeting of {len(body)} bytes; it has {_HELLO.size}")
    theirs, is_keyed = _HELLO.unpack(body.tobytes())
    if is_keyed and not key:
        raise DraftError("it asks for a key; pass the file that holds it as draft_key_file (--draft-key-file)")
    about, began = (theirs, ours, identity), now()
    proof = _proof(key, _CLIENT, *about)
    _send(channel, MessageKind.PROOF, 1, [_PROOF.pack(ours, identity, proof)], deadline)
    answer = _receive(channel, MessageKind.PROOF, 2, deadline).tobytes()
    round_trip_s = now() - began
    if not hmac.compare_digest(answer, _proof(key, _SERVICE, *about)):
        raise DraftError("it does not know the key, so it is not the service that it claims to be")
    channel.limit = MOST_OFFER
    return Greeted(_receive(channel, MessageKind.OFFER, 3, deadline), round_trip_s)


def _proof(key: bytes, role: bytes, service: bytes, client: bytes, identity: bytes) -> bytes:
    """HMAC-SHA256 of the role, the version, both nonces and the client's identity."""
    return hmac.digest(key, b"\0".join((role, struct.pack("<H", VERSION), service + client + identity)), hashlib.sha256)


def _send(channel: Channel, kind: MessageKind, number: int, parts: Sequence[bytes], deadline: float) -> None:
    channel.post(kind, number, [memoryview(part) for part in parts])
    while not channel.flush():
        _wait(channel, deadline)


def _receive(channel: Channel, kind: MessageKind, number: int, deadline: float, *, refusals: bool = True) -> Array:
    """The body of the next message, which must be of this kind. refusals: the other end may refuse: DraftError."""
    while (message := channel.receive()) is None:
        _wait(channel, deadline)
    if message.kind is MessageKind.FAILED and refusals:
        raise DraftError(decode_text(message.body))
    if (message.kind, message.sequence) != (kind, number):
        raise WireError(f"a {message.kind.name} numbered {message.sequence} came where a {kind.name} was due")
    return message.body


def _wait(channel: Channel, deadline: float) -> None:
    if not channel.wait(deadline):
        raise TimeoutError("the handshake was not completed in time")
