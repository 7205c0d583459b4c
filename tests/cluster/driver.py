"""Nodes and a server of a cluster, each a process of its own: nothing of Ray is imported where tests run."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import OpenAI

from saguaro.cluster.session import replica_of
from tests.link.target import is_running

NAME = "tiny"
KEY = "a-key"
# The ports of the nodes can be reached by other machines, so they ask for a token.
WITH_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


AGES = 240.0  # seconds: longer than anything takes, however busy the machine is


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + AGES
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@dataclass
class Nodes:
    """A cluster of two nodes."""

    address: str
    process: "subprocess.Popen[str]"
    seen: set[int] = field(default_factory=set)  # processes that were once started by it

    def lose(self) -> None:
        """End the second node at once, with all that runs there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("lose\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lost\n"

    def replicas(self) -> list[int]:
        """The processes of replicas."""
        return [pid for pid in self.look() if command_of(pid).startswith("ray::ServeReplica")]

    def look(self) -> set[int]:
        """All processes that were started by it and its processes. They are remembered."""
        found = below(self.process.pid)
        self.seen |= found
        return found


@dataclass
class Served:
    """A running `saguaro serve --ray`."""

    process: "subprocess.Popen[bytes]"
    http: httpx.Client

    def openai(self, session: str | None = None) -> OpenAI:
        """The real client, perhaps of a session. It does not ask again."""
        headers = {} if session is None else {"X-Session-Id": session}
        url = f"{self.http.base_url}/v1"
        return OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60, default_headers=headers)

    def metrics(self, name: str, **labels: str) -> dict[str, float]:
        """A metric of every replica, by its id; the sum of those with these labels."""
        answer = self.http.get("/metrics")
        assert answer.status_code == 200, answer.text
        found: dict[str, float] = {}
        for given, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", answer.text, re.MULTILINE):
            told = dict(re.findall(r'(\w+)="([^"]*)"', given))
            if labels.items() <= told.items():
                found[told["engine"]] = found.get(told["engine"], 0.0) + float(value)
        return found

    def ids(self) -> list[str]:
        """The ids of replicas."""
        return sorted(self.metrics("process_start_time_seconds"))


def session_for(replica: str, ids: list[str]) -> str:
    """A session that this replica serves."""
    return next(name for name in map(str, range(10_000)) if replica_of(name, ids) == replica)


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Two nodes; at the end none of their processes is left."""
    command = [sys.executable, "-m", "tests.cluster.nodes"]
    environment = {**os.environ, **WITH_TOKEN}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    found = Nodes(process.stdout.readline().strip(), process)
    try:
        assert found.address, "the cluster has not started"
        yield found
        found.look()
    finally:
        process.stdin.close()
        process.wait(AGES)
        process.stdout.close()
    until(lambda: not any(is_running(pid) for pid in found.seen))


@contextmanager
def serving(log: Path, *args: str) -> Iterator[Served]:
    """The command, once it serves."""
    command = [sys.executable, "-m", "saguaro", "serve", "--ray", "--port", "0", *args]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=with_key())
    try:
        until(lambda: process.poll() is not None or "saguaro: serving" in log.read_text())
        found = re.search(r"saguaro: serving .* on (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        with httpx.Client(base_url=found[1], timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
            yield Served(process, client)
    finally:
        process.kill()
        process.wait()


def with_key() -> dict[str, str]:
    """The environment of a server."""
    return {**os.environ, **WITH_TOKEN, "SAGUARO_API_KEY": KEY}


def below(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found, before = {pid}, set[int]()
    while found != before:
        before, found = found, found | {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def command_of(pid: int) -> str:
    """A process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
