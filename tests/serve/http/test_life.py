"""The life of a request: clients leave, crowds come, engines break, servers end. Everybody gets one last event."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from saguaro import LLM
from saguaro.serve import front as front_module
from saguaro.serve.http import answer as answer_module
from saguaro.serve.http.limits import ServerLimits
from tests.link.target import until
from tests.serve.http.driver import LONG, Gate, Running, read_events, running

TEXT = "/v1/completions"
ASKED = {"prompt": "the end", **LONG}


def in_thread_of(front: Any, function: Callable[[], Any]) -> Any:
    """The result of a function in the engine's thread, between two steps."""
    done = threading.Event()
    found: list[Any] = []

    def call() -> None:
        found.append(function())
        done.set()

    front._commands.put(call)
    assert done.wait(30)
    return found[0]


def all_free(server: Running) -> bool:
    pool = server.service.engine.pool
    return in_thread_of(server.front, lambda: pool.n_free == pool.n_pages)  # type: ignore[no-any-return]


@contextmanager
def loop_held(server: Running) -> Iterator[None]:
    """The event loop does nothing meanwhile."""
    loop = server.front._loop
    assert loop is not None
    blocked, free = threading.Event(), threading.Event()
    loop.call_soon_threadsafe(lambda: blocked.set() or free.wait(30))  # type: ignore[func-returns-value]
    assert blocked.wait(30)
    try:
        yield
    finally:
        free.set()


def until_gone(server: Running) -> None:
    """Wait until the server has noticed that everybody left: it is asked again and again, over a socket."""
    until(lambda: server.client.get("/version").status_code == 200 and not server.front.n_rows)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        with ExitStack() as stack:
            body = httpx.Request("POST", server.url + TEXT, json={**ASKED, "stream": stream, "n": 2})
            line = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            stack.callback(line.close)
            head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: {len(body.content)}\r\n\r\n".encode() + body.content)
            gate.let(5)
            gate.wait()
            assert llm.engine.pool.n_free < llm.engine.pool.n_pages
        until_gone(server)
        gate.open()
        assert all_free(server)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        assert server.complete("the", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_crowd_is_told_to_come_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows and two places to wait: the seventh is refused at once, and served when there is room."""
    gate = Gate(llm, monkeypatch)
    monkeypatch.setattr(llm.engine, "config", type(llm.engine.config)(max_batch_rows=4))
    with running(llm, ServerLimits(max_waiting=2)) as server, ThreadPoolExecutor(7) as pool, gate:
        asked = [pool.submit(server.complete, "the", **LONG) for _ in range(6)]
        until(lambda: server.front.n_rows == 6)
        answer = pool.submit(server.post, TEXT, ASKED).result(timeout=30)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "6 outputs are in the making, of at most 6" in answer.json()["error"]["message"]
        assert server.post(TEXT, {**ASKED, "n": 7}).status_code == 400
        assert server.client.get("/health").status_code == 200
        gate.open()
        assert len({one.result()["choices"][0]["text"] for one in asked}) == 1
        assert server.post(TEXT, ASKED).status_code == 200


def test_a_request_that_takes_too_long_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm, ServerLimits(request_timeout=0.3)) as server:
        with ThreadPoolExecutor(2) as pool, gate:
            whole = pool.submit(server.post, TEXT, ASKED)
            events = pool.submit(server.events, TEXT, ASKED)
            assert whole.result().status_code == 504
            assert "longer than 0.3 seconds" in whole.result().json()["error"]["message"]
            assert events.result()[-1]["error"]["code"] == 504
        gate.open()
        assert all_free(server)


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_falls_behind_is_left(llm: LLM, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Each of n outputs may be 8 pieces behind: 6 that are read in time are nothing, 10 that are not are too many."""
    monkeypatch.setattr(front_module, "MAX_BEHIND", 8)
    gate = Gate(llm, monkeypatch)
    body = {"prompt": "the end", **LONG, "n": n, "stream": True, "speculation": False}
    with running(llm) as server, gate, server.client.stream("POST", TEXT, json=body) as answer:
        (ticket,) = server.front._tickets.values()
        for _ in range(3):
            with loop_held(server):
                gate.let(6)
                gate.wait()
            until(lambda: not ticket._events)
            assert not ticket._is_over
        with loop_held(server):
            gate.let(10)
            gate.wait()
        *_, error, last = read_events(answer)
        assert last == "[DONE]"
        assert f"{8 * n} pieces of text were not read in time" in error["error"]["message"]
        gate.open()
        assert all_free(server)


def test_a_reader_that_reads_nothing_is_left_when_its_time_is_over(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream cannot be written, so it is not told of the end either."""
    monkeypatch.setattr(answer_module, "GRACE", 0.2)
    body = json.dumps({"prompt": "the end", **LONG, "n": 4, "logprobs": 20, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with running(llm, ServerLimits(request_timeout=2)) as server, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        line.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        line.sendall(head.encode())
        until(lambda: bool(server.server.server_state.connections))
        (held,) = server.server.server_state.connections
        held.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        line.sendall(b"\r\n" + body)
        until(lambda: server.front.n_rows == 4)
        until(lambda: held.flow.write_paused)  # type: ignore[union-attr]
        until(lambda: server.front.n_rows == 0)
        assert all_free(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_breaks_ends_who_was_running_and_nobody_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        with ThreadPoolExecutor(1) as pool, gate:
            ask: Any = server.events if stream else server.post
            asked = pool.submit(ask, TEXT, ASKED)
            gate.let(3)
            gate.wait()
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.round, "play", lambda: 1 / 0)
                gate.let()
                gate.open()
                found: Any = asked.result()
        error = found[-1] if stream else found.json()
        assert "the engine could not go on with this request" in error["error"]["message"]
        assert stream or found.status_code == 500
        assert server.client.get("/health").status_code == 200
        assert server.complete("the", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_when_the_engine_dies_everybody_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        with ThreadPoolExecutor(1) as pool, gate, monkeypatch.context() as patch:
            ask: Any = server.events if stream else server.post
            asked = pool.submit(ask, TEXT, ASKED)
            gate.let(3)
            gate.wait()
            patch.setattr(llm.engine, "take", lambda: 1 / 0)
            gate.open()
            found: Any = asked.result()
        error = found[-1] if stream else found.json()
        assert error["error"]["code"] == 503
        assert "the engine has broken down: ZeroDivisionError" in error["error"]["message"]
        for answer in (server.client.get("/health"), server.post(TEXT, ASKED)):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert server.client.get("/metrics").status_code == 200
        llm.engine.discard("ticket-1-0")  # which nobody else can any more


def test_steps_that_break_for_ever_are_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs yet, so nobody is ended by a broken step: the one who waits must not wait for ever."""
    monkeypatch.setattr(llm.engine.round, "play", lambda: 1 / 0)
    with running(llm) as server:
        answer = server.post(TEXT, ASKED)
        assert answer.status_code == 503
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert server.client.get("/health").status_code == 503
        llm.engine.discard("ticket-1-0")


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_ends_lets_requests_finish(llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server, ThreadPoolExecutor(1) as pool, gate:
        ask: Any = server.events if stream else server.post
        asked = pool.submit(ask, TEXT, {**ASKED, "max_tokens": 20})
        gate.let(2)
        gate.wait()
        server.server.handle_exit(15, None)
        until(lambda: server.front.is_draining)
        gate.open()
        found = asked.result()
        assert found[-1]["choices"][0]["finish_reason"] == "length" if stream else found.status_code == 200


def test_a_server_that_ends_ends_what_takes_too_long(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm, ServerLimits(drain_seconds=0)) as server, ThreadPoolExecutor(2) as pool, gate:
        asked = pool.submit(server.events, TEXT, ASKED)
        gate.let(2)
        gate.wait()
        server.server.handle_exit(15, None)
        error = asked.result()[-1]["error"]
        assert (error["code"], error["type"]) == (503, "server_error")
        assert "the server is ending" in error["message"]
        gate.open()


def test_while_it_drains_nobody_is_taken_in(llm: LLM) -> None:
    with running(llm) as server:
        server.front.drain()
        for answer in (server.client.get("/health"), server.post(TEXT, ASKED)):
            assert answer.status_code == 503
            assert "takes no more requests" in answer.json()["error"]["message"]


def test_while_it_drains_it_says_so_to_whoever_connects(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a load balancer asks by a new connection each time, and one request is still served."""
    gate = Gate(llm, monkeypatch)
    with running(llm) as server, ThreadPoolExecutor(1) as pool, gate:
        asked = pool.submit(server.post, TEXT, {**ASKED, "max_tokens": 20})
        gate.let(2)
        gate.wait()
        server.server.handle_exit(15, None)
        until(lambda: server.front.is_draining)
        for _ in range(3):
            answer = httpx.get(f"{server.url}/health", timeout=60)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert httpx.post(f"{server.url}{TEXT}", json=ASKED, timeout=60).status_code == 503
            assert httpx.get(f"{server.url}/metrics", timeout=60).status_code == 200
        gate.open()
        assert asked.result().status_code == 200


def test_a_body_that_is_still_coming_when_the_server_ends_is_not_awaited(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server, ThreadPoolExecutor(1) as pool, gate:
        asked = pool.submit(server.post, TEXT, {**ASKED, "max_tokens": 20})
        gate.let(2)
        gate.wait()
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as line:
            line.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
            until(lambda: len(server.server.server_state.tasks) == 2)
            server.server.handle_exit(15, None)
            assert line.recv(2**16).startswith(b"HTTP/1.1 503 ")
        gate.open()
        assert asked.result().status_code == 200


@contextmanager
def slow_reading(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Prompts are read for as long as this lasts; the semaphore tells how many are."""
    begun, free = threading.Semaphore(0), threading.Event()
    encode = server.service.tokenizer.encode

    def slow(*args: Any, **kwargs: Any) -> list[int]:
        begun.release()
        assert free.wait(60)
        return encode(*args, **kwargs)

    monkeypatch.setattr(server.service.tokenizer, "encode", slow)
    try:
        yield begun
    finally:
        free.set()


READ: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "the"}),
    (TEXT, {"prompt": "the", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
    ("/tokenize", {"prompt": "the"}),
]


@pytest.mark.parametrize(("path", "body"), READ)
def test_the_time_limit_covers_reading(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    with running(llm, ServerLimits(request_timeout=0.3)) as server, slow_reading(server, monkeypatch):
        answer = server.post(path, body)
        assert answer.status_code == 504
        assert "longer than 0.3 seconds" in answer.json()["error"]["message"]
        assert server.front.n_rows == 0


def test_what_is_still_being_read_at_the_end_of_a_drain_is_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        running(llm, ServerLimits(drain_seconds=0.2)) as server,
        ThreadPoolExecutor(4) as pool,
        slow_reading(server, monkeypatch) as begun,
    ):
        asked = [pool.submit(server.post, path, body) for path, body in READ]
        assert all(begun.acquire(timeout=30) for _ in READ)
        server.server.handle_exit(15, None)
        for one in asked:
            assert one.result().status_code == 503
            assert "was not done after 0.2 seconds more" in one.result().json()["error"]["message"]


def test_a_client_that_leaves_while_it_is_read_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm) as server, slow_reading(server, monkeypatch) as begun:
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(TEXT, json=ASKED, timeout=0.2)
        assert begun.acquire(timeout=30)
        until(lambda: server.front.n_rows == 0)


def test_a_step_that_hangs_does_not_keep_the_server_from_ending(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "JOIN_SECONDS", 0.2)
    gate = Gate(llm, monkeypatch)

    def serve() -> None:
        with running(llm, ServerLimits(drain_seconds=0)) as server:
            asked = pool.submit(server.post, TEXT, ASKED)
            gate.let(2)
            gate.wait()
            server.server.handle_exit(15, None)
            assert asked.result().status_code == 503

    with ThreadPoolExecutor(1) as pool, gate, pytest.raises(AssertionError, match="pages are held"):
        serve()
