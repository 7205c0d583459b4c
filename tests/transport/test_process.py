"""The link to a draft in another process: real processes, killed, stopped, late, mad or gone."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch

from saguaro.errors import DraftError
from saguaro.transport.process import Patience, Process
from saguaro.types import Joined, Outcome, Speculation
from tests.transport.echo import q_of
from tests.transport.target import AGES, WORKER, K, Target, draft_config, is_running, start, until

SOON = Patience(pauses=(0.0,), behind=0.5)


@contextlib.contextmanager
def draft(switches: str = "", **settings: object) -> Iterator[Process]:
    """A draft that is ready."""
    link = start(switches, **settings)  # type: ignore[arg-type]
    with contextlib.closing(link):
        link.wait_ready(AGES)
        yield link


def pid_of(link: Process) -> int:
    """The number of a draft that must be there."""
    assert link.pid is not None
    return link.pid


def command(script: str) -> tuple[str, ...]:
    """A worker that is something else."""
    return (sys.executable, "-c", script)


# Failing to start


def failure(link: Process, seconds: float = AGES) -> str:
    """What waiting for this draft comes to."""
    with contextlib.closing(link), pytest.raises(DraftError) as e:
        link.wait_ready(seconds)
    assert not link.is_ready
    return str(e.value)


def other(script: str) -> Process:
    """A link to a worker that is something else."""
    return Process(draft_config(), threads=1, cores=None, timeout=AGES, worker=command(script))


def test_a_draft_that_cannot_be_built_says_why() -> None:
    assert failure(start("refuse")).endswith("n_vocab is 7; it must be 11; choose another draft")


def test_a_draft_that_crashes_when_built_says_why() -> None:
    assert "RuntimeError: a draft that cannot be" in failure(start("crash"))


def test_a_draft_that_died_leaves_its_exit_status_and_last_words() -> None:
    text = failure(other("import sys; print('no such library', file=sys.stderr); sys.exit(3)"))
    assert "exit status 3" in text
    assert "no such library" in text


def test_a_draft_that_was_killed_leaves_the_signal() -> None:
    assert "signal SIGTERM" in failure(other("import os; os.kill(os.getpid(), 15)"))


def test_a_draft_that_is_never_ready_is_not_awaited_for_ever() -> None:
    text = failure(other("import time; time.sleep(1000)"), seconds=0.2)
    assert "not ready after 0.2 seconds; wait longer, or choose a smaller draft" in text


def test_a_command_that_does_not_exist() -> None:
    link = Process(draft_config(), threads=1, cores=None, timeout=AGES, worker=["/no/such/command"])
    assert "No such file" in failure(link)


def test_a_draft_that_speaks_another_language() -> None:
    text = failure(other("import os, sys, time; os.write(int(sys.argv[1]), b'GET / HTTP/1.1' * 9); time.sleep(1000)"))
    assert "a message begins with b'GET '" in text


def test_cores_that_do_not_exist() -> None:
    link = Process(draft_config(), threads=1, cores=[100_000], timeout=AGES)
    assert "Invalid argument" in failure(link)


# In step


def test_q_arrives_whole() -> None:
    n_vocab = 50_000
    with draft("q", n_vocab=n_vocab) as link:
        target = Target(link, n_vocab=n_vocab)
        for _ in range(10):
            spec = target.play()
            assert spec.q is not None
            assert torch.equal(spec.q, q_of(spec.tokens, n_vocab))


def test_the_draft_prepares_until_the_next_turn_is_there() -> None:
    with draft("linger") as link:
        target = Target(link)
        for n in range(20):
            spec = target.play()
            assert spec.times is not None
            assert spec.times.prepare[0] == n, "once after every turn, those that ask for nothing too"


def test_threads_and_cores() -> None:
    core = max(os.sched_getaffinity(0))
    link = Process(draft_config("threads"), threads=3, cores=[core], timeout=AGES, worker=WORKER)
    with contextlib.closing(link):
        link.wait_ready(AGES)
        assert os.sched_getaffinity(pid_of(link)) == {core}
        assert core in os.sched_getaffinity(0)
        assert link.is_fresh()
        target = Target(link)
        target._join(0)
        link.admit([target._joined(0)])
        assert link.speculate(target.outcome, [0], [K]).tokens[0, 0] == 3


def test_ctrl_c_is_not_for_the_draft() -> None:
    with draft() as link:
        target = Target(link)
        os.kill(pid_of(link), signal.SIGINT)
        target.play_until(lambda: target.n_spoken > 20)
        assert (link.n_starts, link.n_deaths, os.getpgid(pid_of(link))) == (1, 0, link.pid)


def test_other_children_do_not_inherit_the_link() -> None:
    with draft():
        script = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n > '2'])"
        seen = subprocess.run([sys.executable, "-c", script], close_fds=False, capture_output=True, check=False)
        assert b"socket" not in seen.stdout


# Late


def test_a_stopped_draft_is_late_once_and_then_left_alone_until_it_has_caught_up() -> None:
    with draft(timeout=1.0) as link:
        target = Target(link)
        target.play_until(lambda: target.n_spoken > 5)
        n_fresh, n_late = target.n_fresh, link.n_late
        os.kill(pid_of(link), signal.SIGSTOP)
        assert target.play().tokens.shape[1] == 0
        assert (link.n_late, link.is_ready) == (n_late + 1, False)
        began = time.monotonic()
        for _ in range(100):
            assert target.play().tokens.shape[1] == 0
        assert time.monotonic() - began < 50, "a hundred timeouts were waited for"
        assert link.n_late == n_late + 1
        os.kill(pid_of(link), signal.SIGCONT)
        target.play_until(lambda: target.n_spoken > 20)
        assert target.n_fresh > n_fresh
        assert (link.n_starts, link.n_deaths) == (1, 0)


def test_a_stopped_draft_does_not_block_a_long_turn() -> None:
    """More text than a socket holds: half of the turn is sent when the draft stops reading."""
    with draft(timeout=2.0) as link:
        target = Target(link, n_prompt=500_000)
        os.kill(pid_of(link), signal.SIGSTOP)
        assert target.play().tokens.shape[1] == 0
        assert link.n_late == 1
        for _ in range(10):
            assert target.play().tokens.shape[1] == 0
        os.kill(pid_of(link), signal.SIGCONT)
        target.play_until(lambda: target.n_spoken > 2)
        assert (link.n_starts, link.n_deaths) == (1, 0)


def test_a_draft_that_is_always_late_is_asked_anew_and_never_hurts() -> None:
    with draft("slow:0.1", timeout=0.02) as link:
        target = Target(link)
        target.play_until(lambda: link.n_late >= 5)
        assert (link.n_starts, link.n_deaths, target.n_spoken) == (1, 0, 0)
        assert target.n_fresh in (link.n_late, link.n_late + 1)


def test_a_draft_that_is_late_for_too_long_is_started_again() -> None:
    with draft(timeout=0.05, patience=SOON) as link:
        target = Target(link)
        os.kill(first := pid_of(link), signal.SIGSTOP)
        target.play_until(lambda: link.n_deaths == 1)
        assert link.failure == "it did nothing for 0.5 seconds"
        assert not is_running(first)
        target.play_until(lambda: target.n_spoken > 0)
        assert link.failure is None
        assert link.pid != first


# Dead


@pytest.mark.parametrize(
    ("switch", "why"),
    [
        ("die:4", "its process ended with exit status 7 and said nothing"),
        ("raise:4", "RuntimeError: the draft lost its thread"),
        ("garbage:4", "a message begins with b'what'"),
    ],
)
def test_a_draft_that_dies_is_started_again(switch: str, why: str) -> None:
    """It answers three turns of every life."""
    with draft(switch) as link:
        target = Target(link)
        for n in range(3):
            assert target.play().tokens.shape[1] == K, n
        assert target.play().tokens.shape[1] == 0
        assert not link.is_ready
        target.play_until(lambda: link.n_deaths == 1)
        assert (link.failure or "").startswith(why)
        target.play_until(lambda: target.n_spoken == 6)
        assert (target.n_fresh, link.n_starts, link.n_late) == (2, 2, 0)


def test_pauses_grow_between_lives() -> None:
    patience = Patience(pauses=(0.0, 0.0, 1000.0))
    link = Process(
        draft_config(),
        threads=1,
        cores=None,
        timeout=AGES,
        worker=command("import sys; sys.exit(1)"),
        patience=patience,
    )
    with contextlib.closing(link):
        target = Target(link)
        target.play_until(lambda: link.n_deaths == 3)
        for _ in range(100):
            target.play()
        assert (link.n_starts, link.n_deaths, link.pid) == (3, 3, None)


def test_a_draft_that_has_answered_for_a_while_is_forgiven() -> None:
    with draft("die:3", patience=Patience(pauses=(0.0, 1000.0), settled=0.0)) as link:
        target = Target(link)
        target.play_until(lambda: link.n_starts == 3)


def test_random_kills() -> None:
    """At any moment of its life, twenty times: what is speculated is right or nothing, and it always comes back."""
    moments = random.Random(0)
    with draft() as link:
        target = Target(link)
        for n in range(20):
            if n % 2:  # in mid-work
                spoken = target.n_spoken + moments.randint(1, 5)
                target.play_until(lambda spoken=spoken: target.n_spoken >= spoken)  # type: ignore[misc]
                delay = moments.random() * 0.003
            else:  # while it starts
                target.play_until(lambda n=n: link.n_starts > n and link.pid is not None)  # type: ignore[misc]
                delay = moments.random() * 0.5
            pid = pid_of(link)
            killer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
            killer.start()
            target.play_until(lambda n=n: link.n_deaths > n)  # type: ignore[misc]
            killer.join()
            assert not is_running(pid)
        spoken = target.n_spoken
        target.play_until(lambda: target.n_spoken > spoken + 20)
        assert (link.n_starts, link.n_deaths, link.n_late) == (21, 20, 0)


class Interrupt(BaseException):
    """Ctrl-C, by another name, so that the test runner's own is left alone."""


class Interrupted:
    """A link in which a signal handler raises, at any moment of any call."""

    def __init__(self, link: Process) -> None:
        self.link, self.moments = link, random.Random(0)
        self.is_armed, self.n_interrupts = False, 0

    def is_fresh(self) -> bool:
        with self._interrupt(0.0005):
            return self.link.is_fresh()

    def admit(self, rows: Sequence[Joined]) -> None:
        with self._interrupt(0.0005):
            self.link.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        with self._interrupt(0.0005):
            self.link.retire(slots)

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        with self._interrupt(0.005):
            return self.link.speculate(outcome, slots, room)

    def overlap(self) -> None:
        self.link.overlap()

    def close(self) -> None:
        self.link.close()

    @contextlib.contextmanager
    def _interrupt(self, within: float) -> Iterator[None]:
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + self.moments.random() * within)
        try:
            yield
        finally:
            self.is_armed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_armed:
            self.is_armed = False
            self.n_interrupts += 1
            raise Interrupt


def test_interrupts_at_any_moment() -> None:
    """Whatever a signal handler raises in a link, the next speculation is right or nothing."""
    with draft("q", n_vocab=2000) as process:
        link = Interrupted(process)
        target = Target(link, n_vocab=2000)
        before = signal.signal(signal.SIGALRM, link.handle)
        try:
            while link.n_interrupts < 300:
                with contextlib.suppress(Interrupt):
                    target.play()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        target.link = process
        spoken = target.n_spoken
        target.play_until(lambda: target.n_spoken > spoken + 20)
        assert process.n_deaths < 30, "nearly every interrupt should leave the draft alive"


# The end


def test_close_leaves_no_process_and_no_zombie() -> None:
    with draft() as link:
        Target(link).play()
        pid = pid_of(link)
    assert not Path(f"/proc/{pid}").exists()
    link.close()
    assert not link.is_ready
    assert not link.is_fresh()
    assert link.speculate(Target(link).outcome, [0], [1]).tokens.shape == (1, 0)
    assert link.n_starts == 1


@pytest.mark.parametrize("state", ["starting", "stopped", "busy"])
def test_close_does_not_wait_for_a_draft_that_does_not_listen(state: str) -> None:
    link = start("load:1000" if state == "starting" else "slow:1000", timeout=0.1)
    if state == "starting":
        time.sleep(0.1)  # any moment will do
    else:
        link.wait_ready(AGES)
    if state == "stopped":
        os.kill(pid_of(link), signal.SIGSTOP)
    if state == "busy":
        assert Target(link).play().tokens.shape[1] == 0
    pid = pid_of(link)
    link.close()
    assert not is_running(pid)


PARENT = """
import gc, os, sys, time
from tests.transport.target import AGES, Target, start
way, switches = sys.argv[1:]
link = start(switches, timeout=0.1)
if "load" not in switches:
    link.wait_ready(AGES)
if "slow" in switches:
    Target(link).play()
print(link.pid, flush=True)
if way == "fork" and os.fork() == 0:
    del link
    gc.collect()
    print("forked", flush=True)
    time.sleep(AGES)
    os._exit(0)
if way == "exit":
    sys.exit()
if way == "error":
    raise RuntimeError("nobody closes the link")
time.sleep(AGES)
"""


def parent(way: str, switches: str) -> "subprocess.Popen[str]":
    """A program that starts a draft and ends without closing it."""
    return subprocess.Popen([sys.executable, "-c", PARENT, way, switches], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("way", "switches"),
    [("kill", ""), ("kill", "load:1000"), ("kill", "slow:1000"), ("stop", ""), ("exit", ""), ("error", "load:1000")],
)
def test_the_draft_ends_with_the_program(way: str, switches: str) -> None:
    with parent(way, switches) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        if way == "stop":
            os.kill(pid, signal.SIGSTOP)
        if way in ("kill", "stop"):
            assert is_running(pid)
            program.kill()
        program.wait(AGES)
        until(lambda: not is_running(pid))


def test_a_fork_of_the_program_neither_ends_the_draft_nor_keeps_it() -> None:
    with parent("fork", "") as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert program.stdout.readline() == "forked\n"
        assert is_running(pid)
        program.kill()
        program.wait(AGES)
        until(lambda: not is_running(pid))
