"""Bytes that nobody sends who means well, at every stage of a connection: refused, and others are served on.

`python -m bench.hostile` runs the same with many more examples.
"""

import contextlib
import socket
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from tests.link.service import KEY, TERMS, connect, serving
from tests.link.target import AGES, Target, draft_config

N_EXAMPLES = 25
few = settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SETTINGS = b"".join(encode_settings(draft_config()))
TURN = b"".join(encode_request(DraftRequest(joined=[Joined(0, [1, 2])], slots=[0], room=[3])))


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message as it should be, with some bytes changed, cut off or repeated; or any bytes."""
    kind = draw(st.sampled_from([*MessageKind]))
    body = draw(st.sampled_from([SETTINGS, TURN, b"", bytes(80), bytes(40)]) | st.binary(max_size=200))
    whole = bytearray(b"".join(frame.frame(kind, draw(st.integers(0, 3)), [memoryview(body)])))
    for at in draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = draw(st.integers(0, 255))
    if draw(st.booleans()):  # a header that is right by its checksum
        whole[28:32] = struct.pack("<I", zlib.crc32(whole[:28]))
    return bytes(whole[: draw(st.integers(0, len(whole)))]) if draw(st.booleans()) else bytes(whole)


sent = st.lists(messages(), min_size=1, max_size=3).map(b"".join) | st.binary(max_size=300)


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    """A service; after all, it serves somebody who means well."""
    with serving() as (_, address):
        yield address
        with contextlib.closing(connect(address)) as link:
            link.wait_ready(AGES)
            target = Target(link)
            target.play_until(lambda: target.n_spoken > 3)
            assert (link.n_starts, link.n_deaths) == (1, 0)


def ends(sock: socket.socket, data: bytes) -> None:
    """After these bytes and no more the other end closes, whatever it may have said before."""
    with contextlib.suppress(OSError):
        sock.setblocking(True)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(2**16):
            pass


@few
@given(sent)
def test_before_the_proof(address: Address, data: bytes) -> None:
    with socket.create_connection((address.host, address.port)) as sock:
        ends(sock, data)


@few
@given(sent)
def test_after_the_proof(address: Address, data: bytes) -> None:
    with socket.create_connection((address.host, address.port)) as sock:
        greet_service(sock, KEY, new_identity())
        ends(sock, data)


@few
@given(sent)
def test_in_place_of_a_request(address: Address, data: bytes) -> None:
    with socket.create_connection((address.host, address.port)) as sock:
        greet_service(sock, KEY, new_identity())
        channel = Channel(sock, 10**6)
        channel.post(MessageKind.SETTINGS, 1, [memoryview(SETTINGS)])
        while channel.exchange() is None:
            channel.wait(None)
        ends(sock, data)


@few
@given(sent)
def test_what_a_client_hears(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((WireError, DraftError, EOFError, OSError)):
            greet_service(ours, KEY, new_identity())


OFFER = encode_offer(Offer(TERMS, sums_of({0: "a", 3: "é"})))


@settings(max_examples=200)
@given(st.data())
def test_an_offer_is_whole_or_refused(data: st.DataObject) -> None:
    body = bytearray(OFFER)
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    try:
        offer = decode_offer(np.frombuffer(bytes(body), np.uint8))
    except WireError:
        return
    assert offer.terms.n_vocab >= 0
    assert len(offer.sums) == 4


def test_an_offer_comes_out_as_it_went_in() -> None:
    found = decode_offer(np.frombuffer(OFFER, np.uint8))
    assert found.terms == TERMS
    assert found.sums.tolist() == sums_of({0: "a", 3: "é"}).tolist()
