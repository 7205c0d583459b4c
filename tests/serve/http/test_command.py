"""`saguaro serve` as a user runs it: a process, flags, signals."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from saguaro.model.tiny import write_tiny
from saguaro.serve.http.service import READERS
from tests.cli.here import Here
from tests.link.target import is_running, until
from tests.serve.http.driver import read_events

SERVE = [sys.executable, "-m", "saguaro", "serve"]
ASKED = {"prompt": "the end", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(
    log: Path, *args: str, command: Sequence[str] = SERVE, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The command, once it listens."""
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *args, "--port", "0"], stderr=out, env={**os.environ, **environment})
    try:
        until(lambda: process.poll() is not None or "saguaro: serving" in log.read_text())
        found = re.search(r" on (https?://[\d.:]+)", log.read_text())
        assert found is not None, log.read_text()
        with httpx.Client(base_url=found[1], timeout=60) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def test_flags_environment_and_a_clean_end(folder: Path, tmp_path: Path) -> None:
    args = (
        str(folder),
        "--served-model-name",
        "mine",
        "--served-model-name",
        "yours",
        "--max-num-seqs",
        "3",
        "--max-waiting",
        "2",
    )
    with serving(tmp_path / "log", *args, "--max-model-len", "128", SAGUARO_API_KEY="key") as (process, client):
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer key"
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("mine", 128), ("yours", 128)]
        found = client.post("/v1/completions", json={"prompt": "the", "model": "yours"}).json()
        assert found["model"] == "yours"
        too_many = client.post("/v1/completions", json={"prompt": "the", "n": 6})
        assert "6 outputs in one request; at most 5" in too_many.json()["error"]["message"]
        finishes_a_stream(process, client, signal.SIGINT, max_tokens=100)
        assert process.wait(30) == 0


def test_a_signal_lets_streams_finish(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(folder)) as (process, client):
        finishes_a_stream(process, client, signal.SIGTERM)
        assert process.wait(30) == 0


def finishes_a_stream(
    process: "subprocess.Popen[bytes]", client: httpx.Client, sign: signal.Signals, **asked: Any
) -> None:
    """Send the signal within a stream: it goes on to its end."""
    with client.stream("POST", "/v1/completions", json={**ASKED, **asked, "stream": True}) as answer:
        events = read_events(answer)
        next(events)
        process.send_signal(sign)
        *_, end, last = events
        assert (end["choices"][0]["finish_reason"], last) == ("length", "[DONE]")


PATIENT = """
import sys
from saguaro.cli import main
from saguaro.serve.isolated import Budget
from saguaro.serve.vetted import VettedTemplates
VettedTemplates.__init__.__defaults__ = (Budget(core_seconds=3600.0, seconds=3600.0),)
main.main(sys.argv[1:])
"""


def test_it_ends_in_time_whatever_is_being_read(tmp_path: Path) -> None:
    """A chat template that does not end, and that no limit ends, once for every thread that reads."""
    folder = write_tiny(tmp_path / "model", "llama", num_hidden_layers=2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(endless)
    command = [sys.executable, "-c", PATIENT, "serve", str(folder), "--kv-memory", "2MiB", "--drain-seconds", "1"]
    asked = {"messages": [{"role": "user", "content": "the"}]}
    with serving(tmp_path / "log", command=command) as (process, client), ThreadPoolExecutor(READERS + 1) as pool:
        before = computed(process.pid)
        answers = [pool.submit(client.post, "/v1/chat/completions", json=asked) for _ in range(READERS + 1)]
        until(lambda: computed(process.pid) > before + 1.0)
        assert client.get("/health").status_code == 200
        process.terminate()
        until(lambda: client.get("/health").status_code == 503 or process.poll() is not None)
        assert {answer.result().status_code for answer in answers} == {503}
        assert process.wait(60) == 0


READING = """
import asyncio, threading
from saguaro.serve.http.readers import Readers

def read():
    begun.set()
    threading.Event().wait()

async def main():
    readers = Readers(1, "readers")
    asyncio.ensure_future(readers.call(read))
    await asyncio.to_thread(begun.wait)
    readers.close()

begun = threading.Event()
asyncio.run(main())
"""


def test_a_thread_that_reads_for_ever_does_not_keep_the_process() -> None:
    assert subprocess.run([sys.executable, "-c", READING], check=False, timeout=60).returncode == 0


HANGING = """
import sys, time
from saguaro.cli import main, serve
from saguaro.serve.http.service import Service
serve.SPARE_SECONDS, serve.LAST_SECONDS = 1, 1.0
async def close(self): time.sleep(1000)
Service.close = close
main.main(sys.argv[1:])
"""


def test_a_process_that_hangs_ends_itself_and_says_where(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", HANGING, "serve", str(folder), "--kv-memory", "2MiB", "--drain-seconds", "0"]
    with serving(log, command=command) as (process, _):
        process.terminate()
        assert process.wait(60) == 1
    assert re.search(r"Timeout \(.*\)!\n(.*\n)* *File \"<string>\", line 6 in close", log.read_text())


def computed(pid: int) -> float:
    """Seconds that a process and those it has started have computed."""
    stats = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in (pid, *children(pid))]
    return sum(int(ticks) for stat in stats for ticks in stat[11:13]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("flags", "named"), [((), "127.0.0.1"), (("--forwarded-allow-ips", "127.0.0.1"), "6.6.6.6")])
def test_the_log_names_a_forwarded_client_only_if_the_proxy_is_known(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    args = ("--kv-memory", "2MiB", "--allowed-hosts", "a.example", "--allowed-hosts", "b.example", *flags)
    command = ["bash", "-c", f'exec "$0" "$@" > {out}', *SERVE, str(folder)]
    with serving(log, *args, command=command) as (_, client):
        for host, status in {"a.example": 200, "b.example:80": 200, "c.example": 421}.items():
            answer = client.get("/version", headers={"Host": host, "X-Forwarded-For": "6.6.6.6"})
            assert answer.status_code == status
        until(lambda: out.read_text().count("GET /version") == 3)
        assert out.read_text().count(f" {named}:") == 3


def test_a_draft_that_is_killed_is_nothing_to_clients(folder: Path, tmp_path: Path) -> None:
    args = ("--draft", "drop:2", "--method", "ssd-uniform", "--link", "process", "--kv-memory", "2MiB")
    with serving(tmp_path / "log", str(folder), *args) as (process, client):

        def ask() -> dict[str, Any]:
            found: dict[str, Any] = client.post("/v1/completions", json={**ASKED, "return_speculation": True}).json()
            return found["choices"][0]  # type: ignore[no-any-return]

        expected = ask()["text"]
        (draft,) = drafts(process.pid)
        os.kill(draft, signal.SIGKILL)
        assert ask()["text"] == expected
        until(lambda: any(one["source"] == "cache" for one in ask()["speculation"]))
        (other,) = drafts(process.pid)
        assert other != draft
        restarts = re.search(r"saguaro:draft_restarts_total{.*} (\d+)", client.get("/metrics").text)
        assert restarts is not None
        assert int(restarts[1]) >= 1
        process.terminate()
        assert process.wait(30) == 0
        assert not is_running(other)


def drafts(pid: int) -> list[int]:
    """Draft processes that a process has started."""
    return [child for child in children(pid) if "saguaro.link.worker" in Path(f"/proc/{child}/cmdline").read_text()]


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-waiting", "-1"), "max_waiting is -1"),
        (("--request-timeout", "0"), "request_timeout is 0.0"),
        (("--max-body", "much"), "max_body is 'much'"),
        (("--header-timeout", "0"), "header_timeout is 0.0"),
        (("--body-timeout", "inf"), "body_timeout is inf"),
        (("--max-connections", "0"), "max_connections is 0"),
        (("--api-key", ""), "the API key is empty"),
        (("--port", "99999"), "port is 99999"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:8000"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_is_loaded(
    folder: Path,
    args: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)  # of a process that serves
    done = Here(capsys)("serve", str(folder), *args)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_process_that_cannot_serve_ends(folder: Path) -> None:
    command = [*SERVE, str(folder), "--port", "0", "--method", "sd"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a draft model" in done.stderr


def test_a_port_in_use_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = Here(capsys)("serve", str(folder), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Address already in use; choose another" in done.stderr
