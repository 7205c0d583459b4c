"""Connections that do not become requests are closed, and others are served meanwhile."""

import json
import os
import re
import resource
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from saguaro import LLM
from saguaro.serve.http import listener as listener_module
from saguaro.serve.http.connection import Connection
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.listener import find_room
from tests.link.target import until
from tests.serve.http.driver import LONG, Gate, Running, running
from tests.serve.http.test_command import SERVE, serving

HALF = b"GET /health HTTP/1.1\r\nHost: a\r\n"
WHOLE = HALF + b"\r\n"
BODILESS = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"


def port_of(url: object) -> int:
    return int(str(url).rpartition(":")[2])


@contextmanager
def line_to(url: object) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port_of(url)), timeout=60) as line:
        yield line


def until_closed(line: socket.socket) -> bytes:
    """Everything that comes before the server closes the connection."""
    got = b""
    try:
        while part := line.recv(2**16):
            got += part
    except ConnectionResetError:
        pass
    return got


def ask(line: socket.socket, sent: bytes = WHOLE) -> HTTPResponse:
    """A request's response, read to its end."""
    line.sendall(sent)
    answer = HTTPResponse(line)
    answer.begin()
    answer.read()
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def error_of(answer: bytes) -> str:
    found: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return found


@pytest.fixture
def hasty(llm: LLM) -> Iterator[Running]:
    """A server with little patience."""
    with running(llm, ServerLimits(header_timeout=0.3, body_timeout=0.4, keep_alive_timeout=30)) as server:
        yield server


def test_headers_that_do_not_come_are_not_awaited(hasty: Running) -> None:
    with line_to(hasty.url) as line:
        line.sendall(HALF)
        answer = until_closed(line)
    assert status_of(answer) == 408
    assert error_of(answer) == "the request did not come within 0.3 seconds; send it faster"


def test_headers_that_trickle_in_are_not_awaited_either(hasty: Running) -> None:
    def is_closed() -> bool:
        try:
            line.sendall(b"X-A: b\r\n")
        except (BrokenPipeError, ConnectionResetError):
            return True
        return False

    with line_to(hasty.url) as line:
        line.sendall(HALF)
        until(is_closed)


def test_a_connection_without_any_request_is_closed_without_a_word(hasty: Running) -> None:
    with line_to(hasty.url) as line:
        assert until_closed(line) == b""


def test_a_second_request_must_come_as_fast(hasty: Running) -> None:
    with line_to(hasty.url) as line:
        line.sendall(WHOLE + HALF)
        first, _, second = until_closed(line).partition(b'"ok"}')
    assert (status_of(first), status_of(second)) == (200, 408)


def test_a_body_that_does_not_come_is_not_awaited(hasty: Running) -> None:
    with line_to(hasty.url) as line:
        line.sendall(BODILESS + b"{")
        answer = until_closed(line)
    assert status_of(answer) == 408
    assert error_of(answer) == "the body did not come within 0.4 seconds; send it faster"


def test_a_client_that_leaves_within_its_body_is_forgotten(hasty: Running, caplog: pytest.LogCaptureFixture) -> None:
    with line_to(hasty.url) as line:
        line.sendall(BODILESS + b"{")
    until(lambda: not hasty.server.server_state.connections)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_connection_may_be_kept_longer_than_headers_may_take(hasty: Running) -> None:
    with line_to(hasty.url) as line:
        assert ask(line).status == 200
        line.settimeout(0.6)
        with pytest.raises(TimeoutError):
            line.recv(1)


def test_a_kept_connection_that_stays_idle_is_closed(llm: LLM) -> None:
    with running(llm, ServerLimits(keep_alive_timeout=1)) as server, line_to(server.url) as line:
        assert ask(line).status == 200
        assert until_closed(line) == b""


def test_of_too_many_connections_the_longest_idle_is_closed(llm: LLM) -> None:
    with running(llm, ServerLimits(max_connections=4)) as server, ExitStack() as stack:
        lines = [stack.enter_context(line_to(server.url)) for _ in range(4)]
        for line in lines:  # one by one, so that the first is the oldest
            assert ask(line).status == 200
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
        assert until_closed(lines[0]) == b""
        assert ask(lines[3]).status == 200


def test_bodies_that_are_awaited_give_way_too(llm: LLM) -> None:
    with running(llm, ServerLimits(max_connections=4)) as server, ExitStack() as stack:
        lines = [stack.enter_context(line_to(server.url)) for _ in range(4)]
        for line in lines:
            line.sendall(BODILESS)
        until(lambda: len(server.server.server_state.connections) == 4)
        for _ in range(5):
            with httpx.Client(base_url=server.url) as client:
                assert client.get("/health").status_code == 200
        answer = until_closed(lines[0])
        assert (status_of(answer), error_of(answer)) == (503, "there are 4 connections; ask again later")


def test_who_is_served_stays_and_the_next_is_told_to_come_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm, ServerLimits(max_connections=2)) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "the", **LONG}, timeout=60)
                 for _ in range(2)]  # fmt: skip
        until(lambda: server.front.n_rows == 2)
        with line_to(server.url) as line:
            answer = until_closed(line)
        assert (status_of(answer), b"Retry-After: 1" in answer) == (503, True)
        gate.open()
        assert [one.result().status_code for one in asked] == [200, 200]
        assert server.client.get("/health").status_code == 200


def test_a_client_that_reads_nothing_is_cut_off(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "CLOSE_SECONDS", 0.2)
    with running(llm, ServerLimits(keep_alive_timeout=1)) as server, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", port_of(server.url)))
        line.settimeout(1)
        try:
            while True:  # until neither side's buffers take more
                line.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 50)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        line.settimeout(60)
        (connection,) = server.server.server_state.connections
        server.server._loop.call_soon_threadsafe(connection.transport.close)  # type: ignore[union-attr]
        until(lambda: not server.server.server_state.connections)


def test_short_answers_are_sent_at_once(server: Running) -> None:
    with line_to(server.url) as line:
        assert ask(line).status == 200
        mine = line.getsockname()
        (held,) = [
            one for one in server.server.server_state.connections if isinstance(one, Connection) and one.client == mine
        ]
        raw = held.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_room_is_what_the_limit_on_files_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_room(5) == 5
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    n_open = len(os.listdir("/dev/fd"))  # noqa: PTH208
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda _: (n_open + 60, n_open + 60))
        patch.setattr(resource, "setrlimit", lambda *_: None)
        assert 5 <= find_room(10**6) <= 13
    assert hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_half_sent_requests_under_a_low_limit_on_files_stop_nobody(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    limited = ["bash", "-c", 'ulimit -n 120; exec "$0" "$@"', *SERVE, str(folder), "--kv-memory", "2MiB"]
    with serving(log, command=limited) as (process, client), ExitStack() as stack:
        lines = [stack.enter_context(line_to(client.base_url)) for _ in range(130)]
        for line in lines:
            try:
                line.sendall(HALF)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it had to make room
        for _ in range(3):
            assert httpx.get(f"{client.base_url}/health", timeout=60).status_code == 200
        assert process.poll() is None
        assert "connections instead of 1000: `ulimit -n` is 120" in log.read_text()
        assert log.stat().st_size < 50_000


def test_when_files_run_out_it_is_said_once_and_accepting_goes_on_later(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, str(folder), "--kv-memory", "2MiB") as (process, client), ExitStack() as stack:
        assert client.get("/health").status_code == 200
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        n_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (n_open, before[1]))
        lines = [stack.enter_context(line_to(client.base_url)) for _ in range(20)]
        until(lambda: "no connection can be accepted" in log.read_text())
        assert client.get("/health").status_code == 200  # by the connection that there was
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        for line in lines:
            assert ask(line).status == 200
        said = log.read_text()
        assert len(re.findall("no connection can be accepted", said)) == 1
        assert "Traceback" not in said


def test_too_few_files_are_refused(folder: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 50; exec "$0" "$@"', *SERVE, str(folder), "--port", "0"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "`ulimit -n` is 50" in done.stderr
