"""A server whose target is divided among ranks: the `openai` client's tests unchanged, signals, a lost rank."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro import LLM
from tests.link.target import is_running, until
from tests.serve.http.driver import Running, read_events, running, tiny_llm
from tests.serve.http.test_command import ASKED, serving
from tests.serve.http.test_openai import (  # noqa: F401 (they run here, with the server below)
    client,
    test_a_chat_whole_and_streamed,
    test_a_completion_whole_and_streamed,
    test_a_stop_string,
    test_errors_are_the_clients_own,
    test_logprobs_of_both_kinds,
    test_several_outputs_are_several,
    test_the_model_is_listed,
)

RANKS = ("--tensor-parallel-size", "2", "--kv-memory", "2MiB", "--draft", "drop:2", "--method", "sd")


@pytest.fixture(scope="module")
def smol(default_folder: Path) -> Iterator[Running]:
    with (
        LLM(default_folder, device="cpu", max_model_len=1024, tensor_parallel_size=2) as llm,
        running(llm, api_keys=["key"]) as server,
    ):
        yield server


def ranks_of(pid: int) -> list[int]:
    """The processes of a server's ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (folder / "status").read_text(), (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parent = re.search(r"^PPid:\t(\d+)$", status, re.MULTILINE)
        if parent is not None and int(parent[1]) == pid and "saguaro.parallel.worker" in command:
            found.append(int(folder.name))
    return found


def test_sigterm_lets_a_stream_finish_and_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    """Also if the ranks get the signal, as from systemd."""
    with serving(tmp_path / "log", str(folder), *RANKS) as (process, http):
        ranks = ranks_of(process.pid)
        assert len(ranks) == 1
        with http.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer:
            events = read_events(answer)
            next(events)
            for pid in (*ranks, process.pid):
                os.kill(pid, signal.SIGTERM)
            *_, end, last = events
            assert (end["choices"][0]["finish_reason"], last) == ("length", "[DONE]")
        assert process.wait(30) == 0
        until(lambda: not any(is_running(pid) for pid in ranks))


def test_a_killed_rank_ends_the_server(folder: Path, tmp_path: Path) -> None:
    """The request gets an error, the process ends with a status that is not 0, and the log names the rank."""
    log = tmp_path / "log"
    with serving(log, str(folder), *RANKS) as (process, http):
        [rank] = ranks_of(process.pid)
        with http.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as answer:
            events = read_events(answer)
            next(events)
            os.kill(rank, signal.SIGKILL)
            *_, error = (event for event in events if event != "[DONE]")
        killed = f"rank 1 of the target, process {rank}, was killed by SIGKILL; start the engine again"
        assert killed in error["error"]["message"]
        assert process.wait(60) == 2
        assert f"saguaro: {killed}" in log.read_text()


def test_a_rank_that_is_killed_between_requests_ends_the_server_too(folder: Path) -> None:
    llm = tiny_llm(folder, tensor_parallel_size=2)
    assert llm.engine.ranks is not None
    [rank] = llm.engine.ranks.pids
    with running(llm) as server:
        os.kill(rank, signal.SIGKILL)
        until(lambda: server.server.should_exit)
        assert f"rank 1 of the target, process {rank}, was killed by SIGKILL" in str(server.front.lost)
