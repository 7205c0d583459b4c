"""A real server on a real socket, in a thread of this process."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from httpx import Response

from saguaro import LLM
from saguaro.engine.results import Delta
from saguaro.serve.address import bind
from saguaro.serve.front import Front
from saguaro.serve.http.app import create_app
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.service import Service
from saguaro.serve.server import Server, uvicorn_config
from saguaro.serve.tools.parsers import Parsers

NAME = "tiny"
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 150}


class _Told(Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config, service)
        self.listens = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@dataclass
class Running:
    """A server under test."""

    url: str
    service: Service
    server: Server
    client: httpx.Client

    @property
    def front(self) -> Front:
        return self.service.front

    def post(self, path: str, body: Any, **kwargs: Any) -> Response:
        return self.client.post(path, json=body, **kwargs)

    def complete(self, prompt: Any = "the end", **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": prompt, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chat(self, content: str = "the end", **body: Any) -> dict[str, Any]:
        """A chat that must succeed."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream; [DONE] is checked and left out."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, last = list(read_events(answer))
        assert last == "[DONE]"
        return events

    def metric(self, name: str, **labels: str) -> float:
        """A figure as /metrics tells it."""
        value = self.service.metrics.registry.get_sample_value(
            name, {"model_name": self.service.names[0], "engine": "0", **labels}
        )
        assert value is not None, f"no {name} with {labels}"
        return value


def read_events(answer: Response) -> Iterator[Any]:
    """Events of a stream, decoded; [DONE] as it is."""
    for line in answer.iter_lines():
        if line:
            kind, _, data = line.partition(": ")
            assert kind == "data"
            yield data if data == "[DONE]" else json.loads(data)


class Gate:
    """Holds the engine's steps back until it is opened, or left, and tells when one wants to begin.

    Entered after a pool of clients, it is open before the pool is waited for, so that a test that fails does not hang.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._steps, self._wanted = threading.Semaphore(0), threading.Semaphore(0)
        self._is_open = False
        step = llm.engine.step

        def held() -> list[Delta]:
            if not self._is_open:
                self._wanted.release()
                assert self._steps.acquire(timeout=30)
            return step()

        monkeypatch.setattr(llm.engine, "step", held)

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def let(self, n: int = 1) -> None:
        """Let so many steps be played."""
        for _ in range(n):
            assert self._wanted.acquire(timeout=30)
            self._steps.release()

    def wait(self) -> None:
        """Wait until a step wants to begin: what was asked before has reached the engine."""
        assert self._wanted.acquire(timeout=30)
        self._wanted.release()

    def open(self) -> None:
        """Hold nothing back any more."""
        self._is_open = True
        self._steps.release(10_000)


@contextmanager
def running(
    llm: LLM,
    limits: ServerLimits | None = None,
    parsers: Parsers | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve a model's engine; at the end no page is held and the books balance."""
    service = Service(llm.engine, [NAME], limits or ServerLimits(), parsers, defaults)
    app = create_app(service, **options)
    place = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    server = _Told(uvicorn_config(app, service, log_level="warning", lifespan="on"), service)
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    try:
        assert server.listens.wait(30)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(url, service, server, client)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
    engine = llm.engine
    engine.pool.check(engine.scheduler.tables())
    assert engine.pool.n_free == engine.pool.n_pages, "pages are held by nobody"
    front = service.front
    assert (front.n_rows, front._tickets, engine._jobs, engine._by_request) == (0, {}, {}, {})
    assert front.failure or (front._works, front._jobs) == ({}, {}), "the front has not forgotten who left"


def tiny_llm(folder: Path, **settings: Any) -> LLM:
    """A tiny model of four layers with a draft of three, in this process."""
    drafted = {"draft": "drop:2", "method": "ssd-uniform", "link": "inline", "lookahead": 3, "budget": 4}
    return LLM(folder, device="cpu", **{**drafted, "kv_memory": "2MiB", **settings})
