"""The framing of messages: a header, then a body. Little-endian, never pickle.

Invariant: bytes that are not a whole, undamaged message of a possible length are refused. The length is verified before
the body is awaited.

    |magic 4|version 2|kind 2|sequence 8|body length 8|checksum of the body 4|checksum of the header 4|body ...|

A message is answered by one with the same sequence number: SETTINGS by READY, TURN by REPLY, either by FAILED. Between
machines HELLO, PROOF and OFFER come first (link/handshake.py).
"""

import enum
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

MAGIC, VERSION = b"SAGU", 6
HEADER_SIZE = 32
CHECKED = 2**20  # bytes of a body covered by its checksum; checking all of a large q would take too long

_HEADER = struct.Struct("<4sHHQQI")
_CHECKSUM = struct.Struct("<I")

Array = NDArray[Any]


class WireError(Exception):
    """Invalid bytes or an invalid message. The link treats the sender as dead."""


class MessageKind(enum.IntEnum):
    """The kind of a message."""

    SETTINGS = 1
    READY = 2
    TURN = 3
    REPLY = 4
    FAILED = 5
    HELLO = 6
    PROOF = 7
    OFFER = 8


class Header(NamedTuple):
    """The header of a message, known before its body arrives."""

    kind: MessageKind
    sequence: int
    n_body: int
    checksum: int


class Message(NamedTuple):
    """A received message. The caller owns the body."""

    kind: MessageKind
    sequence: int
    body: Array  # [n] uint8


def frame(kind: MessageKind, sequence: int, parts: Sequence[memoryview]) -> list[memoryview]:
    """A message as consecutive parts. Large parts are not copied."""
    n_body = sum(part.nbytes for part in parts)
    head = _HEADER.pack(MAGIC, VERSION, kind, sequence, n_body, _checksum(parts))
    return [memoryview(head + _CHECKSUM.pack(zlib.crc32(head))), *parts]


def read_header(data: memoryview | bytes, limit: int) -> Header:
    """Parse a header, and check that its body does not exceed the limit."""
    magic, version, kind, sequence, n_body, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"a message begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"a message of version {version}; this end speaks version {VERSION}")
    if zlib.crc32(data[: _HEADER.size]) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
        raise WireError("a header was damaged on its way")
    if kind not in tuple(MessageKind):
        raise WireError(f"a message of kind {kind}; the last known is {max(MessageKind)}")
    if n_body > limit:
        raise WireError(f"a body of {n_body} bytes, where at most {limit} can be meant")
    return Header(MessageKind(kind), sequence, n_body, checksum)


def read_message(header: Header, body: Array) -> Message:
    """Build a message from its header and body, and check the body's checksum."""
    if _checksum([body.data]) != header.checksum:
        raise WireError("a body was damaged on its way")
    return Message(header.kind, header.sequence, body)


def _checksum(parts: Sequence[memoryview]) -> int:
    """The checksum of the first bytes of a body."""
    checksum, left = 0, CHECKED
    for part in parts:
        checksum = zlib.crc32(part[:left], checksum)
        left -= min(left, part.nbytes)
    return checksum
