"""A process of its own: what does not end is ended, what does not fit is ended, and the next call is answered."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro.errors import ConfigError, Unavailable
from saguaro.serve.isolated import Budget, Exceeded, Isolated
from tests.link.target import until


@pytest.fixture
def job() -> Iterator[Isolated]:
    limits = Budget(core_seconds=0.2, seconds=30.0, memory_bytes=64 * 2**20, niceness=3)
    isolated = Isolated("tests.engine.jobs:maker", lambda: {"a": "é" * 200_000}, limits)
    yield isolated
    isolated.close()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_call(job: Isolated) -> None:
    setting, value, pid = job("echo", {"b": [1, "😀", None]})
    assert (setting, value) == ({"a": "é" * 200_000}, {"b": [1, "😀", None]})
    assert pid == job.pid != os.getpid()
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert job("echo")[2] == pid, "the same process answers again"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("loop", "more than 0.2 seconds of processor time"),
        ("loop inside a library", "more than 0.2 seconds of processor time"),
        ("allocate", "more than 64 MiB of memory"),
        ("abort", "more than 64 MiB of memory"),  # as Rust ends where memory is short
    ],
)
def test_what_takes_too_much_is_ended_and_the_next_call_is_answered(job: Isolated, what: str, message: str) -> None:
    before = job("echo")[2]
    with pytest.raises(Exceeded, match=message) as e:
        job(what)
    assert e.value.is_certain
    assert not is_there(before)
    assert job("echo")[2] != before


def test_what_only_waits_is_ended_by_the_clock_on_the_wall() -> None:
    job = Isolated("tests.engine.jobs:maker", dict, Budget(seconds=0.5))
    with pytest.raises(Exceeded, match=r"longer than 0\.5 seconds") as e:
        job("sleep")
    assert not e.value.is_certain
    assert job("echo")[0] == {}
    job.close()


def test_what_it_raises(job: Isolated) -> None:
    before = job("echo")[2]
    with pytest.raises(ConfigError, match="no"):
        job("refuse")
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        job("break")
    assert job("echo")[2] == before
    with pytest.raises(Unavailable, match="ended with status 3"):
        job("end")
    assert job("echo")[2] != before


def test_closing_ends_it_also_in_the_middle_of_a_call(job: Isolated) -> None:
    pid = job("echo")[2]
    raised: list[BaseException] = []

    def call() -> None:
        try:
            job("sleep")
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    until(job._lock.locked)
    job.close()
    thread.join(30)
    assert not is_there(pid)
    assert job.pid is None
    assert [type(e) for e in raised] == [Unavailable]
    with pytest.raises(Unavailable, match="the server is ending"):
        job("echo")


def test_it_ends_with_its_owner() -> None:
    job = Isolated("tests.engine.jobs:maker", dict, Budget())
    pid = job("echo")[2]
    child = job._child
    assert child is not None
    child._socket.close()
    assert child.popen.wait(30) == 0, "it did not notice"
    assert not is_there(pid)


def test_nothing_heavy_is_loaded() -> None:
    """A child for grammars or templates is small, and there at once."""
    for maker in ("saguaro.model.compiler", "saguaro.model.chat_template", "saguaro.serve.isolated"):
        script = f"import sys, {maker}; assert not {{'torch', 'transformers', 'numpy', 'pydantic'}} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", script], check=True)
