"""A draft service and its faults: real sockets, real processes; what is speculated is right or nothing."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saguaro.config import EngineConfig
from saguaro.errors import ConfigError, DraftError
from saguaro.link import frame, service
from saguaro.link.address import Address, listen, name_of
from saguaro.link.apart import Apart, Timeouts
from saguaro.link.asked import check_asked
from saguaro.link.channel import Channel
from saguaro.link.connection import Connection, without_paths
from saguaro.link.frame import MessageKind
from saguaro.link.handshake import MOST_KEY, greet_service, new_identity, read_key
from saguaro.link.offer import Offer, TargetShape, Terms, sums_of
from saguaro.link.wire import DraftRequest, encode_request, encode_settings, encode_text
from saguaro.types import DraftTimes
from tests.link.service import KEY, SHAPE, TERMS, Relay, ServiceProcess, connect, key_file, served, serving
from tests.link.target import AGES, ROWS, Target, V, draft_config, until


@contextlib.contextmanager
def relay(to: Address) -> Iterator[Relay]:
    with contextlib.closing(Relay(to)) as one:
        yield one


def failure(address: Address, **others: Any) -> str:
    """Why a service cannot be used."""
    with contextlib.closing(connect(address, **others)) as link, pytest.raises(DraftError) as e:
        link.wait_ready(AGES)
    text = str(e.value)
    begins = f"the draft 'tcp://{address}' cannot be used: "
    assert text.startswith(begins)
    return text.removeprefix(begins)


def used(link: Apart) -> Target:
    """A target that has heard from the draft."""
    link.wait_ready(AGES)
    target = Target(link)
    target.play_until(lambda: target.n_spoken > 3)
    return target


def goes_on(target: Target, n: int = 5) -> None:
    """The draft is of use again."""
    spoken = target.n_spoken
    target.play_until(lambda: target.n_spoken > spoken + n)


# The service is lost, and comes back


def test_a_service_that_is_killed_and_started_again() -> None:
    with ServiceProcess() as first, contextlib.closing(connect(first.address)) as link:
        target = used(link)
        first.kill()
        assert target.play().tokens.shape[1] == 0
        target.play_until(lambda: "no draft service listens on" in (link.failure or ""))
        with first.again():
            goes_on(target)
        assert (link.failure, link.n_late, target.n_fresh) == (None, 0, 2)


def test_a_service_that_is_stopped_is_late_once_and_then_left_alone_until_it_has_caught_up() -> None:
    with ServiceProcess() as one, contextlib.closing(connect(one.address)) as link:
        target = used(link)
        os.kill(one.popen.pid, signal.SIGSTOP)
        link.timeout = 0.2
        assert target.play().tokens.shape[1] == 0
        link.timeout = AGES  # which nobody waits for any more
        for _ in range(50):
            assert target.play().tokens.shape[1] == 0
        os.kill(one.popen.pid, signal.SIGCONT)
        goes_on(target)
        assert (link.n_late, link.n_starts, link.n_deaths, target.n_fresh) == (1, 1, 0, 2)


def test_a_link_that_is_cut() -> None:
    with serving() as (host, address), relay(address) as between:
        with contextlib.closing(connect(between.address)) as link:
            target = used(link)
            for n in range(3):
                between.cut()
                target.play_until(lambda n=n: link.n_deaths == n + 1)  # type: ignore[misc]
                goes_on(target)
            assert target.n_fresh == 4
        until(lambda: not host.sessions)


def test_a_half_open_connection_is_noticed_and_its_session_replaced() -> None:
    """Nothing arrives any more, at either end, and neither is told."""
    patience = Timeouts(pauses=(0.0,), behind=0.3)
    with contextlib.ExitStack() as stack:
        host, address = stack.enter_context(serving(served(max_sessions=1)))
        between = stack.enter_context(relay(address))
        link = stack.enter_context(contextlib.closing(connect(between.address, timeout=0.03, patience=patience)))
        link.wait_ready(AGES)
        target = Target(link)
        target.play_until(lambda: target.n_spoken > 0)
        (before,) = host.sessions
        between.swallow()
        target.play_until(lambda: link.n_deaths > 0)
        assert link.failure == "it did nothing for 0.3 seconds"
        link.timeout = AGES
        goes_on(target)
        until(lambda: before not in host.sessions)
        assert len(host.sessions) == 1, "the service would serve one only"


WATCHED = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 20_000}


def test_connections_are_watched_by_the_system_too() -> None:
    """An idle one, with which nothing is lost but a session, is ended after 20 seconds."""
    with serving() as (_, address), contextlib.closing(connect(address)) as link:
        link.wait_ready(AGES)
        assert isinstance(link._peer, Connection)
        sock = link._peer._socket
        assert sock is not None
        ours = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in WATCHED}
        assert (ours, sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == (WATCHED, 1)


# What is refused, and the words for it


def test_a_wrong_key_and_a_missing_one() -> None:
    with serving() as (host, address):
        assert "the key is wrong" in failure(address, key=b"another key of many bytes")
        assert "it asks for a key" in failure(address, key=b"")
        until(lambda: not host.sessions)
        with contextlib.closing(connect(address)) as link:
            used(link)


def test_a_service_that_does_not_know_the_key() -> None:
    with serving(served(key=b"")) as (_, address):
        assert "the key is wrong" in failure(address)
    with served_by(pretend) as address:
        assert "it does not know the key, so it is not the service that it claims to be" in failure(address)


def pretend(sock: socket.socket) -> None:
    """A service that makes up its proof."""
    channel = Channel(sock, 4096)
    talk(channel, MessageKind.HELLO, 1, b"n" * 32 + struct.pack("<Q", 1))
    assert hear(channel).kind is MessageKind.PROOF
    talk(channel, MessageKind.PROOF, 2, b"p" * 32)


def talk(channel: Channel, kind: MessageKind, number: int, body: bytes) -> None:
    """Send a message."""
    channel.post(kind, number, [memoryview(body)])
    while not channel.flush():
        channel.wait(None)


def hear(channel: Channel) -> frame.Message:
    """Wait for a message."""
    while (message := channel.receive()) is None:
        channel.wait(None)
    return message


@contextlib.contextmanager
def served_by(talks: Callable[[socket.socket], object]) -> Iterator[Address]:
    """A server of one connection that says what it is told to."""
    place = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def run() -> None:
        with place.accept()[0] as sock:
            talks(sock)
            over.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield Address.of(name_of(place.getsockname()))
    finally:
        over.set()
        thread.join()
        place.close()


def test_another_version_and_no_draft_service_at_all() -> None:
    other = bytearray(b"".join(frame.frame(MessageKind.HELLO, 1, [memoryview(bytes(40))])))
    other[4] = frame.VERSION + 1
    with served_by(lambda sock: sock.sendall(other)) as address:
        text = failure(address)
        assert f"a message of version {frame.VERSION + 1}; this end speaks version {frame.VERSION}" in text
    with served_by(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6 and more than a header\r\n")) as address:
        text = failure(address)
        assert "it does not speak as a draft service of this version does: a message begins with b'SSH-'" in text


def test_a_client_of_another_version_is_not_greeted(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (_, address), socket.create_connection((address.host, address.port)) as sock:
        message = bytearray(b"".join(frame.frame(MessageKind.PROOF, 1, [memoryview(bytes(80))])))
        message[4] = frame.VERSION + 1
        sock.sendall(message)
        read_to_the_end(sock)
    assert f"a message of version {frame.VERSION + 1}" in caplog.text


def read_to_the_end(sock: socket.socket) -> bytes:
    """What the other end says until it closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(4096):
            found += data
    return found


def test_wrong_models() -> None:
    sums = sums_of({token: f"t{token}" for token in range(V)})
    terms = replace(TERMS, target=SHAPE)
    with serving(served(offer=Offer(terms, sums))) as (_, address):
        assert "it serves the model 'echo', and 'small' is asked for" in failure(address, model="small")
        text = failure(address, n_vocab=V + 1)
        assert f"its model 'echo' knows {V} tokens, the target says {V + 1}; a draft must have the target's" in text
        assert "this target has 5 layers of 64" in failure(address, target=TargetShape(5, 64, V))
        text = failure(address, spelling={token: f"u{token}" for token in range(100)})
        assert "100 of 100 tokens mean something else to its model 'echo'" in text
        assert "the first is token 0, 'u0' to the target" in text
        own = {token: f"t{token}" for token in range(V)} | {3: "<other>"}
        with contextlib.closing(connect(address, model="echo", spelling=own)) as link:
            used(link)


def test_a_service_that_comes_back_with_another_vocabulary_is_not_used() -> None:
    with serving() as (_, address), relay(address) as between, contextlib.closing(connect(between.address)) as link:
        target = used(link)
        with serving(served(offer=Offer(Terms("other", 7, ROWS, 9), np.zeros(0, np.uint16)))) as (_, other):
            between.to = other
            between.cut()
            target.play_until(lambda: "its model 'other' knows 7 tokens" in (link.failure or ""))
            assert target.play().tokens.shape[1] == 0


def test_too_many_sessions() -> None:
    with serving(served(max_sessions=2)) as (host, address), contextlib.ExitStack() as stack:
        links = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(2)]
        for link in links:
            used(link)
        text = "it serves 2 sessions, which is all it may; start it with a larger --max-sessions, or another service"
        assert failure(address) == text
        links[0].close()
        until(lambda: len(host.sessions) == 1)
        with contextlib.closing(connect(address)) as link:
            used(link)


def test_addresses_that_cannot_be() -> None:
    assert "the host 'no-such-host.invalid' is not known" in failure(Address("no-such-host.invalid", 1))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as place:
        taken = Address.of(name_of(place.getsockname()))
        with pytest.raises(ConfigError, match=f"cannot listen on {taken}: Address already in use; choose another"):
            listen(taken, is_keyed=False)
    assert f"no draft service listens on {taken}; start one there" in failure(taken)
    with pytest.raises(ConfigError, match="which other machines can reach, and there is no key; make one with"):
        listen(Address("0.0.0.0", 0), is_keyed=False)
    listen(Address("0.0.0.0", 0), is_keyed=True).close()
    with pytest.raises(ConfigError, match=r"the host 'no-such-host\.invalid' is not known"):
        listen(Address("no-such-host.invalid", 0), is_keyed=True)
    for text in ("box:70000", "box:http", "", "a/b", "[1"):
        with pytest.raises(ConfigError, match="is no address; write HOST:PORT"):
            Address.of(text)


def test_keys_in_files(tmp_path: Path) -> None:
    assert read_key(None) == b""
    assert read_key(key_file(tmp_path)) == KEY
    for key in (b"short", b"k" * (MOST_KEY + 1)):
        with pytest.raises(ConfigError, match="it must have between 16 and 4096: make one with `openssl rand"):
            read_key(key_file(tmp_path, key))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft": "drop:3", "draft_key_file": "k"}, "which asks for no key"),
        ({"draft": "tcp://box", "link": "process"}, "link is 'process'.* which runs where it is served"),
        ({"draft": "tcp://box", "draft_threads": 2}, "draft_threads is 2"),
        ({"draft": "suffix+tcp://box", "draft_device": "cpu"}, "set device and threads with `saguaro draft`"),
    ],
)
def test_settings_that_a_service_has_itself(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**settings)


# What a client may ask for


ASKED = replace(draft_config(), n_tokens=1000, max_rows=2)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"growth": "wild"}, "growth is 'wild', which must be one of nothing"),
        ({"fallback": "auto"}, "fallback is 'auto'"),
        ({"lookahead": 65}, "lookahead is 65, which must be between 1 and 64"),
        ({"budget": 0}, "budget is 0"),
        ({"n_vocab": V + 1}, f"n_vocab is {V + 1}"),
        ({"ends": (V,)}, "ends is"),
        ({"n_features": 1}, "a draft that reads them"),
        ({"fan_out": (1, 2)}, "fan_out is"),
        ({"growth": "list"}, "fan_out is"),
        ({"suffix_store": 10**6}, "suffix_store is 1000000, which must be at most 20000"),
        ({"max_rows": 5}, "at most 4 rows; lower max_batch_rows .* or start the service with --max-rows 5"),
        ({"n_tokens": 20_000}, "a session has at most 20000; lower kv_memory .* with --max-tokens 20"),
        ({"budget": 256, "growth": "best", "lookahead": 60}, "places of trees, and a session has at most 20000"),
        ({"read_s": float("nan")}, "read_s is nan"),
    ],
)
def test_settings_beyond_the_limits(asked: dict[str, Any], said: str) -> None:
    terms = Terms("echo", V, ROWS, 20_000)
    check_asked(ASKED, terms)
    with pytest.raises(DraftError, match=said):
        check_asked(replace(ASKED, **asked), terms)


def test_a_large_vocabulary_under_rejection_is_bounded() -> None:
    terms = Terms("large", 2**18, 64, 2**20)
    asked = replace(ASKED, n_vocab=2**18, n_text=2**18, growth="best", lookahead=8, max_rows=64)
    check_asked(asked, terms)
    with pytest.raises(DraftError, match=r"rejection keeps .* lower max_batch_rows"):
        check_asked(replace(asked, verification="rejection"), terms)


def test_paths_do_not_travel() -> None:
    config = replace(draft_config(), target="/secret/target", tokenizer="/secret/words", learnt="/secret/learnt")
    assert b"secret" not in b"".join(encode_settings(without_paths(config)))


# Who does not speak as agreed


def test_who_says_nothing_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with serving(served(greeting_s=0.05)) as (_, at), socket.create_connection((at.host, at.port)) as sock:
        read_to_the_end(sock)
    assert "is not greeted: the connection was lost: the handshake was not completed in time" in caplog.text


def test_a_client_cannot_write_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Only a service may refuse with words; and these are escaped where they are shown."""
    with serving() as (_, at), socket.create_connection((at.host, at.port)) as sock:
        sock.sendall(b"".join(frame.frame(MessageKind.FAILED, 1, encode_text("\x1b[31mroot logged in"))))
        read_to_the_end(sock)
    assert "a FAILED numbered 1 came where a PROOF was due" in caplog.text
    assert "root" not in caplog.text
    with served_by(lambda sock: talk(Channel(sock, 99), MessageKind.FAILED, 1, b"\x1b[31mno")) as address:
        assert failure(address) == "\\x1b[31mno"


def test_there_are_not_more_connections_than_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PENDING", 2)
    with serving(served(max_sessions=1)) as (_, address), contextlib.ExitStack() as stack:
        others = [stack.enter_context(socket.create_connection((address.host, address.port))) for _ in range(3)]
        for other in others:
            assert other.recv(1), "greeted"
        with socket.create_connection((address.host, address.port)) as sock:
            assert sock.recv(1) == b"", "closed at once"
        others[0].close()
        with contextlib.closing(connect(address)) as link:
            until(link.is_fresh)


def test_a_large_body_is_refused_before_it_is_read() -> None:
    """Before the proof 4 KiB, then what the settings allow."""
    head = struct.pack("<4sHHQQI", b"SAGU", frame.VERSION, MessageKind.PROOF, 1, 10**9, 0)
    with serving() as (_, address), socket.create_connection((address.host, address.port)) as sock:
        sock.sendall(head + struct.pack("<I", zlib.crc32(head)))
        read_to_the_end(sock)
    with serving() as (host, address), guest(address) as (sock, channel):
        talk(channel, MessageKind.SETTINGS, 1, b"".join(encode_settings(replace(draft_config(), n_tokens=100))))
        assert hear(channel).kind is MessageKind.READY
        head = struct.pack("<4sHHQQI", b"SAGU", frame.VERSION, MessageKind.TURN, 2, 10**9, 0)
        sock.setblocking(True)
        sock.sendall(head + struct.pack("<I", zlib.crc32(head)))
        assert read_to_the_end(sock) == b""
        until(lambda: not host.sessions)


@contextlib.contextmanager
def guest(address: Address) -> Iterator[tuple[socket.socket, Channel]]:
    """A client that was greeted, and may say what it likes."""
    with socket.create_connection((address.host, address.port)) as sock:
        greet_service(sock, KEY, new_identity())
        yield sock, Channel(sock, 10**6)


def test_a_client_that_goes_mad_ends_its_own_session_only() -> None:
    with serving() as (host, address), contextlib.closing(connect(address)) as link:
        target = used(link)
        with guest(address) as (_, channel):
            talk(channel, MessageKind.SETTINGS, 1, b"".join(encode_settings(draft_config())))
            assert hear(channel).kind is MessageKind.READY
            talk(channel, MessageKind.TURN, 2, b"".join(encode_request(DraftRequest(slots=[ROWS], room=[1]))))
            with pytest.raises((EOFError, ConnectionResetError)):
                hear(channel)
        until(lambda: len(host.sessions) == 1)
        goes_on(target)
        assert link.n_deaths == 0


def test_a_draft_that_fails_says_why_and_is_begun_anew() -> None:
    with serving(served("raise:4")) as (_, address), contextlib.closing(connect(address)) as link:
        link.wait_ready(AGES)
        target = Target(link)
        target.play_until(lambda: link.n_deaths > 0)
        assert link.failure == "RuntimeError: the draft lost its thread"
        target.play_until(lambda: target.n_spoken > 5)


# Clocks


def test_times_of_another_clock_are_put_into_the_exchange() -> None:
    with serving() as (_, address), contextlib.closing(connect(address)) as link:
        link.wait_ready(AGES)
        assert isinstance(link._peer, Connection)
        shifted = link._peer.local(DraftTimes((1000.0, 1002.0), (900.0, 999.0)), (50.0, 56.0))
        assert shifted.respond == (52.0, 54.0), "the answer takes 2 of 6 seconds, in the middle"
        assert shifted.prepare == (-48.0, 51.0)
        target = used(link)
        began = time.perf_counter()
        found = [times for _ in range(9) if (times := target.play().times) is not None]
        assert found
        assert all(began <= each.respond[0] <= each.respond[1] <= time.perf_counter() for each in found)


@pytest.mark.parametrize("respond", [(1.0, float("inf")), (float("nan"), 1.0), (2.0, 1.0)])
def test_times_that_cannot_be_are_refused(respond: tuple[float, float]) -> None:
    with serving() as (_, address), contextlib.closing(connect(address)) as link:
        link.wait_ready(AGES)
        assert isinstance(link._peer, Connection)
        with pytest.raises(frame.WireError, match="times that cannot be"):
            link._peer.local(DraftTimes(respond, (0.0, 0.0)), (0.0, 1.0))


# Several targets


def test_several_targets_have_sessions_of_their_own() -> None:
    with serving() as (host, address), contextlib.ExitStack() as stack:
        links = [stack.enter_context(contextlib.closing(connect(address))) for _ in range(3)]
        targets = [used(link) for link in links]
        for _ in range(50):
            for target in targets:
                target.play()
        assert all((link.n_deaths, link.n_late) == (0, 0) for link in links)
        assert host.status.startswith("3 sessions, ")
        assert host.status.count("requests") == 4
        links[1].close()
        until(lambda: len(host.sessions) == 2)
        goes_on(targets[0])
        goes_on(targets[2])
