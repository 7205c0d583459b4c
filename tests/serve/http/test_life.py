"""The life of a request: clients leave, crowds come, engines break, servers end. Everybody gets one last event."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from saguaro import LLM
from saguaro.serve import front as front_module
from saguaro.serve.http.limits import Limits
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


def until_gone(server: Running) -> None:
    """Wait until the server has noticed that everybody left: it is asked again and again, over a socket."""
    while server.front.n_rows:
        server.client.get("/version")


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
    with running(llm, Limits(max_waiting=2)) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.complete, "the", **LONG) for _ in range(6)]
        gate.wait()
        while server.front.n_rows < 6:
            server.client.get("/version")
        answer = server.post(TEXT, ASKED)
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
    with running(llm, Limits(request_timeout=0.3)) as server:
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.post, TEXT, ASKED)
            events = pool.submit(server.events, TEXT, ASKED)
            assert whole.result().status_code == 504
            assert "longer than 0.3 seconds" in whole.result().json()["error"]["message"]
            assert events.result()[-1]["error"]["code"] == 504
        gate.open()
        assert all_free(server)


def test_a_reader_that_does_not_read_is_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "MAX_BEHIND", 8)
    gate = Gate(llm, monkeypatch)
    with running(llm) as server, server.client.stream("POST", TEXT, json={**ASKED, "stream": True}) as answer:
        loop = server.front._loop
        assert loop is not None
        blocked, free = threading.Event(), threading.Event()
        loop.call_soon_threadsafe(lambda: blocked.set() or free.wait(30))  # type: ignore[func-returns-value]
        assert blocked.wait(30)
        gate.let(20)
        gate.wait()
        free.set()
        *_, error, last = read_events(answer)
        assert last == "[DONE]"
        assert "8 pieces of text were not read in time" in error["error"]["message"]
        gate.open()
        assert all_free(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_breaks_ends_who_was_running_and_nobody_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm) as server:
        with ThreadPoolExecutor(1) as pool:
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
        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
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
    with running(llm) as server, ThreadPoolExecutor(1) as pool:
        ask: Any = server.events if stream else server.post
        asked = pool.submit(ask, TEXT, {**ASKED, "max_tokens": 20})
        gate.let(2)
        gate.wait()
        server.server.handle_exit(15, None)
        while not server.front.is_draining:
            threading.Event().wait(0.001)
        gate.open()
        found = asked.result()
        assert found[-1]["choices"][0]["finish_reason"] == "length" if stream else found.status_code == 200


def test_a_server_that_ends_ends_what_takes_too_long(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(llm, monkeypatch)
    with running(llm, Limits(drain_seconds=0)) as server, ThreadPoolExecutor(2) as pool:
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
