"""Bytes that nobody sends who means well, and the stages of a connection at which they are sent."""

import contextlib
import socket
import struct
import zlib

import numpy as np
import pytest
from hypothesis import strategies as st

from saguaro.errors import DraftError
from saguaro.link import frame
from saguaro.link.address import Address
from saguaro.link.channel import Channel
from saguaro.link.frame import MessageKind, WireError
from saguaro.link.handshake import greet_service, new_identity
from saguaro.link.offer import Offer, decode_offer, encode_offer, sums_of
from saguaro.link.wire import DraftRequest, encode_request, encode_settings
from saguaro.types import Joined
from tests.link.service import KEY, TERMS
from tests.link.target import draft_config

SETTINGS = b"".join(encode_settings(draft_config()))
TURN = b"".join(encode_request(DraftRequest(joined=[Joined(0, [1, 2])], slots=[0], room=[3])))
OFFER = encode_offer(Offer(TERMS, sums_of({0: "a", 3: "é"})))


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message as it should be, with some bytes changed or cut off."""
    kind = draw(st.sampled_from([*MessageKind]))
    body = draw(st.sampled_from([SETTINGS, TURN, b"", bytes(80), bytes(40)]) | st.binary(max_size=200))
    whole = bytearray(b"".join(frame.frame(kind, draw(st.integers(0, 3)), [memoryview(body)])))
    for at in draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = draw(st.integers(0, 255))
    if draw(st.booleans()):  # a header that is right by its checksum
        whole[28:32] = struct.pack("<I", zlib.crc32(whole[:28]))
    return bytes(whole[: draw(st.integers(0, len(whole)))]) if draw(st.booleans()) else bytes(whole)


@st.composite
def offers(draw: st.DrawFn) -> bytes:
    """An offer with some bytes changed or cut off."""
    body = bytearray(OFFER)
    for at in draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)))]) if draw(st.booleans()) else bytes(body)


sent = st.lists(messages(), min_size=1, max_size=3).map(b"".join) | st.binary(max_size=300)


def before_the_proof(address: Address, data: bytes) -> None:
    """As the first words of a client."""
    with socket.create_connection((address.host, address.port)) as sock:
        _ends(sock, data)


def after_the_proof(address: Address, data: bytes) -> None:
    """In place of the settings."""
    with socket.create_connection((address.host, address.port)) as sock:
        greet_service(sock, KEY, new_identity())
        _ends(sock, data)


def in_place_of_a_request(address: Address, data: bytes) -> None:
    """After the settings."""
    with socket.create_connection((address.host, address.port)) as sock:
        greet_service(sock, KEY, new_identity())
        channel = Channel(sock, 10**6)
        channel.post(MessageKind.SETTINGS, 1, [memoryview(SETTINGS)])
        while channel.exchange() is None:
            channel.wait(None)
        _ends(sock, data)


STAGES = (before_the_proof, after_the_proof, in_place_of_a_request)


def to_a_client(data: bytes) -> None:
    """As the words of a service."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, DraftError, EOFError, OSError)):
            greet_service(ours, KEY, new_identity())


def as_an_offer(body: bytes) -> None:
    """It is one, or it is refused."""
    try:
        offer = decode_offer(np.frombuffer(body, np.uint8))
    except WireError:
        return
    assert offer.terms.n_vocab >= 0
    assert len(offer.sums) == 4


def _ends(sock: socket.socket, data: bytes) -> None:
    """After these bytes and no more the other end closes, whatever it may have said before."""
    with contextlib.suppress(OSError):
        sock.setblocking(True)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(2**16):
            pass
