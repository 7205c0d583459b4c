"""Bodies as large as they may be, made of what costs most: each is refused soon, shortly, and others do not wait."""

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from saguaro import LLM
from saguaro.serve.http import guard as guard_module
from saguaro.serve.http import service as service_module
from saguaro.serve.http.body import MAX_NUMBERS, MAX_VALUES, SMALL, check_size, read_body
from saguaro.serve.http.errors import MAX_MESSAGE, MAX_PARAM, APIError
from saguaro.serve.http.limits import ServerLimits
from tests.serve.http.cores import core_seconds
from tests.serve.http.driver import Gate, Running, running
from tests.serve.http.test_command import serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MOST = 4 * 2**20
PATIENCE = 5.0  # seconds that the server may compute while /health waits; without bounds it took 25
MEMORY = 400  # MiB that all of it may take; without bounds it took 5,200

HELLO = '"messages": [{"role": "user", "content": "the"}]'


def full(start: str, item: str, end: str) -> bytes:
    """A body of --max-body bytes, with as many items as it can hold."""
    n_items = (MOST - len(start) - len(end)) // (len(item) + 1)
    return (start + ",".join([item] * n_items) + end).encode()


def keys(item: str) -> str:
    """Many fields, each of another name."""
    return ",".join(f'"k{at}": {item}' for at in range(MOST // (len(item) + 12)))


def long_keys(n_keys: int) -> str:
    """As many names, as long as they can be."""
    return ",".join(f'"k{at:a<{MOST // n_keys - 50}}": 1' for at in range(n_keys))


ATTACKS: dict[str, tuple[str, bytes, str]] = {  # path, body, part of the message
    "prompt of objects": (TEXT, full('{"prompt": [', "{}", "]}"), "more than 65536 values"),
    "prompt of lists": (TEXT, full('{"prompt": [', "[]", "]}"), "more than 65536 values"),
    "prompt of texts": (TEXT, full('{"prompt": [', '""', "]}"), "more than 65536 values"),
    "prompt of nothing": (TEXT, full('{"prompt": [', "null", "]}"), "more than 65536 values"),
    "prompt of numbers": (TEXT, full('{"prompt": [', "0", "]}"), "more than 524288 numbers"),
    "prompt of many tokens": (TEXT, full('{"prompt": [', "99999999", "]}"), "prompt names token 99999999"),
    "prompt of long lists": (TEXT, full('{"prompt": [[', "99999999", "], {}]}"), "prompt"),
    "messages of numbers": (
        CHAT,
        full('{"messages": [', "0.1234567", "]}"),
        "messages.0: Input should be a valid dict",
    ),
    "messages": (CHAT, full('{"messages": [', '{"role": 1}', "]}"), "more than 65536 values"),
    "stop": (TEXT, full('{"prompt": "a", "stop": [', "1.1234567", "]}"), "stop"),
    "parts": (CHAT, full('{"messages": [{"role": "user", "content": [', "0.1234567", "]}]}"), "messages.0.content"),
    "tools": (CHAT, full("{" + HELLO + ', "functions": [', "0.1234567", "]}"), "functions is [0.1234567, "),
    "bad tokens": ("/detokenize", full('{"tokens": [', "0.1234567", "]}"), "tokens.0: Input should be a valid integer"),
    "many tokens": ("/detokenize", full('{"tokens": [', "99999999", "]}"), "at most 131072 at a time"),
    "deep lists": (TEXT, b"[" * MOST, "more than 65536 values"),
    "deep objects": (TEXT, b'{"a":' * 10_000, "recursion limit exceeded"),
    "a huge number": (TEXT, b'{"prompt": "a", "seed": ' + b"9" * (MOST - 30) + b"}", "number out of range"),
    "one name many times": (TEXT, full("{", '"prompt": "a"', "}"), "more than 65536 values"),
    "many names": (TEXT, ("{" + keys("1") + "}").encode(), "more than 65536 values"),
    "bias with long names": (
        CHAT,
        ("{" + HELLO + ', "logit_bias": {' + long_keys(1000) + "}}").encode(),
        "logit_bias is",
    ),
    "bias of many names": (CHAT, ("{" + HELLO + ', "logit_bias": {' + keys("1") + "}}").encode(), "65536 values"),
    "bias of bad names": (
        CHAT,
        ("{" + HELLO + ', "logit_bias": {' + long_keys(20_000) + "}}").encode(),
        "at most 1024",
    ),
    "bias of objects": (CHAT, full("{" + HELLO + ', "logit_bias": {"a": [', "0.1234567", "]}}"), "logit_bias.a"),
    "a long name": (TEXT, b'{"prompt": "a", "' + b"n" * (MOST - 30) + b'": 1}', "unknown parameter 'nnn"),
    "a long model": (TEXT, b'{"prompt": "a", "model": "' + b"n" * (MOST - 30) + b'"}', "is not served here"),
    "a long role": (CHAT, b'{"messages": [{"role": "' + b"n" * (MOST - 50) + b'"}]}', "has no text"),
    "a long grammar": (
        TEXT,
        b'{"prompt": "a", "structured_outputs": {"regex": "' + b"n" * (MOST - 60) + b'"}}',
        "at most 131072",
    ),
    "spaces": (TEXT, b" " * MOST, "not JSON"),
    "quotes": (TEXT, b'"\\' * (MOST // 2), "not JSON"),
}


@pytest.fixture(scope="module")
def process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    log = tmp_path_factory.mktemp("bodies") / "log"
    with serving(log, str(folder), "--kv-memory", "2MiB") as (process, client):
        yield process.pid, client


def peak(pid: int) -> int:
    """MiB that a process has held at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


@contextmanager
def watching(pid: int, url: httpx.URL) -> Iterator[list[float]]:
    """How long the server computed while /health waited, asked without a pause."""
    taken: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not (taken and done.wait(0.01)):
                before = core_seconds(pid)
                assert client.get("/health").status_code == 200
                taken.append(core_seconds(pid) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_bad_body_is_refused_in_a_sentence_and_others_do_not_wait(
    process: tuple[int, httpx.Client], name: str
) -> None:
    pid, client = process
    path, body, message = ATTACKS[name]
    before = peak(pid)
    assert len(body) <= MOST
    with watching(pid, client.base_url) as taken:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text[:1000]
    error = answer.json()["error"]
    assert message in error["message"]
    assert len(error["message"]) <= MAX_MESSAGE
    assert len(error["param"] or "") <= MAX_PARAM
    assert max(taken) < PATIENCE
    assert peak(pid) - before < MEMORY


def test_what_people_send_is_counted_as_little() -> None:
    check_size(json.dumps({"prompt": '[{,"' * 10**6}).encode())
    check_size(json.dumps({"prompt": [[12345] * 8000] * 64}).encode())
    many = [{"role": "user", "content": "the", "name": "me"}] * (MAX_VALUES // 7 - 1)
    check_size(json.dumps({"messages": many, "stream": True}, indent=2).encode())


@pytest.mark.parametrize("item", ["[]", "{}", '""', "true", "[0]", r'"\\"', '[1,"a"]'])
def test_values_are_counted_whatever_they_are(item: str) -> None:
    n_values = {"[0]": 2, '[1,"a"]': 3}.get(item, 1)
    fits = (MAX_VALUES - 1) // n_values
    padding = " " * MAX_VALUES
    check_size(f"[{','.join([item] * fits)}]{padding}".encode())
    with pytest.raises(APIError, match="more than 65536 values"):
        check_size(f"[{','.join([item] * (fits + 1))}]{padding}".encode())


def test_numbers_are_counted_over_all_lists() -> None:
    half = [0] * (MAX_NUMBERS // 2)
    check_size(json.dumps([half, half]).encode())
    with pytest.raises(APIError, match="more than 524288 numbers"):
        check_size(json.dumps([half, half, 1]).encode())


def test_a_large_body_is_read_as_a_small_one_is(server: Running) -> None:
    small: dict[str, Any] = {"prompt": "the end", "max_tokens": 5, "temperature": 0, "seed": 3}
    large = {**small, "user": "x" * 10**6}
    first, second = (server.post(TEXT, body).json()["choices"] for body in (small, large))
    assert first == second
    tokens = list(range(200)) * 10
    answer = server.post(TEXT, {"prompt": [tokens] * 20})
    assert "the prompt has 2000 tokens, at most 255 fit" in answer.json()["error"]["message"]


def test_large_bodies_are_parsed_beside_the_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is parsed, for however long, everybody else is served."""
    begun, free = threading.Event(), threading.Event()

    def held(kind: Any, raw: bytes) -> Any:
        if len(raw) > SMALL:
            begun.set()
            assert free.wait(60)
        return read_body(kind, raw)

    monkeypatch.setattr(service_module, "read_body", held)
    with running(llm) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.complete, "the", max_tokens=1, user="x" * (SMALL + 1))
        try:
            assert begun.wait(30)
            assert server.client.get("/health", timeout=20).status_code == 200
            assert server.complete("the", max_tokens=1)
            assert not asked.done()
        finally:
            free.set()
        assert asked.result()


def test_bodies_are_bounded_in_sum_and_forgotten_with_their_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may be held at a time: for a third one of those that are coming is given up. Small ones are not kept out."""
    monkeypatch.setattr(guard_module, "MAX_BODIES", 2)
    with running(llm, ServerLimits(max_body="64KiB")) as server, ExitStack() as stack:

        def send(n_bytes: int) -> socket.socket:
            """A connection that has sent so much of a body of 64 KiB."""
            line = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)
            stack.callback(line.close)
            head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {2**16}\r\n"
            line.sendall(f"{head}\r\n".encode() + b"x" * n_bytes)
            return line

        for _ in range(3):
            lines = [send(2**16 - 1000) for _ in range(3)]
            (refused,), _, _ = select.select(lines, [], [], 60)
            assert refused.recv(2**16).startswith(b"HTTP/1.1 503 ")
            assert server.complete("the", max_tokens=1)
            for line in lines:
                if line is not refused:
                    line.sendall(b"x" * 1000)
                    assert line.recv(2**16).startswith(b"HTTP/1.1 400 ")


def test_a_large_body_waits_for_those_that_are_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is coming that could be given up, so the new one is refused; small ones are not."""
    monkeypatch.setattr(guard_module, "MAX_BODIES", 1)
    gate = Gate(llm, monkeypatch)
    large = {"prompt": "the", "max_tokens": 1, "user": "x" * 40_000}
    with running(llm, ServerLimits(max_body="64KiB")) as server, ThreadPoolExecutor(1) as pool:
        with gate:
            first = pool.submit(server.post, TEXT, large)
            gate.wait()
            second = server.post(TEXT, large)
            assert (second.status_code, second.headers["retry-after"]) == (503, "1")
            assert "large bodies of other requests are being served" in second.json()["error"]["message"]
            assert server.post("/tokenize", {"prompt": "the"}).status_code == 200
        assert first.result().status_code == 200
        assert server.post(TEXT, large).status_code == 200
