"""Two replicas on two nodes, as a user serves them; then a replica dies, a node, and all of it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError

from saguaro import LLM, SamplingParams
from saguaro.model.tiny import write_tiny
from tests.cluster.driver import AGES, NAME, Nodes, Served, command_of, nodes, serving, session_for, until, with_key
from tests.link.target import is_running

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

LONG = 3500  # tokens of a stream that is still being made when something dies
N_STREAMS = 4  # for each replica
GREEDY: dict[str, Any] = {"prompt": "the end", "temperature": 0.0}
SERVES = ("ray::ServeReplica", "ray::ServeController", "ray::ProxyActor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("served") / NAME, "llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


@pytest.fixture(scope="module")
def flags(folder: Path, cluster: Nodes) -> list[str]:
    flags = [str(folder), "--served-model-name", NAME, "--ray-address", cluster.address, "--device", "cpu"]
    return [*flags, "--threads", "1", "--kv-memory", "16MiB", "--max-body", "4KiB", "--draft", "suffix"]


@pytest.fixture(scope="module")
def served(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(log, *flags, "--replicas", "2", "--allowed-hosts", "a.example") as found:
        yield found


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself."""
    command = [sys.executable, "-m", "saguaro", "serve", "--ray", "--port", "0", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=AGES, env=with_key())


class Stream:
    """A completion that is being streamed in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, served: Served, session: str) -> None:
        self.begun = threading.Event()
        self._served, self._session = served, session
        self.text: Future[str] = pool.submit(self._read)

    def _read(self) -> str:
        """All its text; raises if it is not whole."""
        text, reason = "", None
        extra = {"ignore_eos": True, "speculation": False}
        with self._served.openai(self._session) as client:
            stream = client.completions.create(model=NAME, **GREEDY, max_tokens=LONG, stream=True, extra_body=extra)
            for chunk in stream:
                self.begun.set()
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason
        assert reason == "length", "the stream ended without an error, and is not whole"
        return text


def ask(served: Served, session: str | None = None) -> str:
    with served.openai(session) as client:
        text: str = client.completions.create(model=NAME, **GREEDY, max_tokens=4).choices[0].text
    return text


def test_what_no_node_has_room_for_is_told_in_one_line(flags: list[str]) -> None:
    done = run(*flags, "--threads", "2", "--ray-wait", "1")
    assert done.returncode == 2
    assert "saguaro: replicas need 1 x 2 CPUs, each on one node, which were not free within 1 seconds; " in done.stderr
    assert "the nodes have 1 CPU, 1 CPU, of which 2 CPUs are free" in done.stderr


def test_a_replica_that_cannot_start_says_why(flags: list[str], tmp_path: Path) -> None:
    done = run(str(tmp_path / "none"), *flags[1:])
    assert done.returncode == 2
    assert f"saguaro: a replica cannot start: '{tmp_path}/none' is no folder" in done.stderr


def test_every_replica_streams_the_models_own_tokens(served: Served, folder: Path) -> None:
    llm = LLM(folder, device="cpu", draft="suffix", kv_memory="16MiB")
    ids = served.ids()
    assert len(ids) == 2
    for params in (SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=1, seed=7, max_tokens=24)):
        (expected,) = llm.generate("the end", params)
        for replica in ids:
            before = served.metrics("vllm:request_success_total")
            with served.openai(session_for(replica, ids)) as client:
                stream = client.completions.create(
                    model=NAME,
                    prompt="the end",
                    temperature=params.temperature,
                    seed=params.seed,
                    max_tokens=24,
                    stream=True,
                    extra_body={"return_token_ids": True},
                )
                chunks = [chunk.choices[0] for chunk in stream]
            tokens = [token for choice in chunks for token in choice.model_extra["token_ids"]]  # type: ignore[index]
            assert tokens == expected.outputs[0].token_ids
            after = served.metrics("vllm:request_success_total")
            assert after.get(replica, 0) == before.get(replica, 0) + 1, "another replica has answered"
    llm.close()


def test_a_stream_is_not_held_back_and_ends_with_its_client(served: Served) -> None:
    aborted = sum(served.metrics("vllm:request_success_total", finished_reason="abort").values())
    body = {"model": NAME, **GREEDY, "max_tokens": LONG, "ignore_eos": True, "speculation": False, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert sum(served.metrics("vllm:num_requests_running").values()) == 1
    until(lambda: sum(served.metrics("vllm:num_requests_running").values()) == 0)
    assert sum(served.metrics("vllm:request_success_total", finished_reason="abort").values()) == aborted + 1


def test_refusals_are_those_of_the_server(served: Served) -> None:
    post = {"model": NAME, "prompt": "the"}
    client = served.http
    assert client.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get("/v1/models", headers={"Host": "b.example"}).status_code == 421
    assert client.get("/v1/models", headers={"Host": "a.example"}).json()["data"][0]["id"] == NAME
    assert client.post("/v1/completions", json={**post, "prompt": "a" * 5000}).status_code == 413
    assert client.post("/v1/completions", content=(b"a" * 1000 for _ in range(9))).status_code == 413
    assert client.post("/v1/completions", content=b"{", headers={"Content-Type": "text/plain"}).status_code == 415
    assert client.post("/v1/completions", json={**post, "max_tokens": 0}).status_code == 400
    assert client.post("/v1/embeddings", json=post).json()["error"]["message"].startswith("/v1/embeddings: this server")
    assert "saguaro" not in client.get("/").headers.get("server", "")


def test_a_second_server_in_the_cluster_is_refused(served: Served, flags: list[str]) -> None:
    assert served.process.poll() is None
    done = run(*flags)
    assert done.returncode == 2
    assert "saguaro: Ray Serve runs in this cluster already" in done.stderr


def survives(served: Served, lose: Callable[[], object]) -> str:
    """Lose one of two replicas: its streams end with an error, those of the other are whole, and new requests of both
    sessions are served. Returns the text of a whole stream."""
    ids = served.ids()
    sessions = {replica: session_for(replica, ids) for replica in ids}
    with ThreadPoolExecutor(len(ids) * N_STREAMS) as pool:
        streams = {replica: [Stream(pool, served, sessions[replica]) for _ in range(N_STREAMS)] for replica in ids}
        for stream in (one for each in streams.values() for one in each):
            assert stream.begun.wait(AGES)
        lose()
        deadline = time.monotonic() + 30
        for session in sessions.values():
            while not is_served(served, session):
                assert time.monotonic() < deadline, "new requests are not served"
        errors = {replica: [one.text.exception() for one in each] for replica, each in streams.items()}
    (alive,) = (replica for replica in ids if not any(errors[replica]))
    (dead,) = (replica for replica in ids if all(isinstance(error, APIError) for error in errors[replica]))
    assert alive != dead
    until(lambda: dead not in served.ids() and alive in served.ids())
    (text,) = {one.text.result() for one in streams[alive]}
    return text


def is_served(served: Served, session: str) -> bool:
    """Whether a new request gets an answer instead of an error."""
    try:
        return bool(ask(served, session))
    except APIError:
        return False


def test_a_replica_that_is_killed_takes_its_own_streams_alone_and_is_replaced(served: Served, cluster: Nodes) -> None:
    victim, _ = cluster.replicas()
    survives(served, lambda: os.kill(victim, signal.SIGKILL))
    until(lambda: len(served.ids()) == 2)
    until(lambda: not is_running(victim))


def test_a_node_that_is_lost_takes_its_own_streams_alone(served: Served, cluster: Nodes) -> None:
    survives(served, cluster.lose)
    assert len(cluster.replicas()) == 1


def test_a_signal_lets_streams_finish_and_leaves_nothing(served: Served, cluster: Nodes) -> None:
    """With a node that is gone, too."""
    with ThreadPoolExecutor(1) as pool:
        stream = Stream(pool, served, "any")
        assert stream.begun.wait(AGES)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.http.get("/health").status_code == 503)
        refused = served.http.post("/v1/completions", json={"model": NAME, **GREEDY})
        assert "the server is ending" in refused.json()["error"]["message"]
        assert len(stream.text.result()) > 0
    assert served.process.wait(AGES) == 0
    until(lambda: not any(command_of(pid).startswith(SERVES) for pid in cluster.look()))
