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
from saguaro.link.apart import Apart, Timeouts
from saguaro.link.process import draft_process
from saguaro.types import Joined, Outcome, Speculation
from tests.link.echo import q_of
from tests.link.target import AGES, ROWS, WORKER, K, Target, draft_config, is_running, start, state_of, until

N_VOCAB = 50_000


@contextlib.contextmanager
def draft(switches: str = "", **settings: object) -> Iterator[Apart]:
    """A draft that is ready."""
    link = start(switches, **settings)  # type: ignore[arg-type]
    with contextlib.closing(link):
        link.wait_ready(AGES)
        yield link


def pid_of(link: Apart) -> int:
    """The number of a draft that must be there."""
    assert link.pid is not None
    return link.pid


def command(script: str) -> tuple[str, ...]:
    """A worker that is something else."""
    return (sys.executable, "-c", script)


# Failing to start


def failure(link: Apart, seconds: float = AGES) -> str:
    """What waiting for this draft comes to."""
    with contextlib.closing(link), pytest.raises(DraftError) as e:
        link.wait_ready(seconds)
    assert not link.is_ready
    return str(e.value)


def other(script: str) -> Apart:
    """A link to a worker that is something else."""
    return draft_process(draft_config(), threads=1, cores=None, timeout=AGES, worker=command(script))


def test_a_draft_that_cannot_be_built_says_why() -> None:
    assert failure(start("refuse")).endswith("n_vocab is 7; it must be 11; choose another draft")


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
    link = draft_process(draft_config(), threads=1, cores=None, timeout=AGES, worker=["/no/such/command"])
    assert "No such file" in failure(link)


def test_a_draft_that_speaks_another_language() -> None:
    text = failure(other("import os, sys, time; os.write(int(sys.argv[1]), b'GET / HTTP/1.1' * 9); time.sleep(1000)"))
    assert "a message begins with b'GET '" in text


def test_cores_that_do_not_exist() -> None:
    link = draft_process(draft_config(), threads=1, cores=[100_000], timeout=AGES)
    assert "Invalid argument" in failure(link)


# In step


@pytest.fixture(scope="module")
def one_draft() -> Iterator[Apart]:
    """One draft for all tests that leave it well: q is larger than a socket holds, and it prepares until it is late."""
    with draft("q,linger", n_vocab=N_VOCAB, patience=Timeouts(pauses=(0.0,), behind=0.5)) as link:
        yield link


@pytest.fixture
def link(one_draft: Apart) -> Iterator[Apart]:
    """The same, in step or fresh, with all the time in the world."""
    one_draft.timeout = AGES
    yield one_draft
    one_draft.timeout = AGES


@pytest.fixture
def target(link: Apart) -> Target:
    """It has heard from the draft."""
    target = Target(link, n_vocab=N_VOCAB)
    target.play_until(lambda: target.n_spoken > 3)
    return target


def test_q_arrives_whole(target: Target) -> None:
    for _ in range(10):
        spec = target.play()
        assert spec.q is not None
        assert torch.equal(spec.q, q_of(spec.tokens, N_VOCAB))


def test_the_draft_prepares_until_the_next_turn_is_there(target: Target) -> None:
    """Which is its only way out."""
    prepared = [spec.times.prepare[0] for spec in (target.play() for _ in range(20)) if spec.times is not None]
    assert prepared == [prepared[0] + n for n in range(20)]  # once after every turn, those that ask for nothing too


def test_threads_and_cores() -> None:
    core = max(os.sched_getaffinity(0))
    link = draft_process(draft_config("threads"), threads=3, cores=[core], timeout=AGES, worker=WORKER)
    with contextlib.closing(link):
        link.wait_ready(AGES)
        assert os.sched_getaffinity(pid_of(link)) == {core}
        environment = Path(f"/proc/{link.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=3" in environment
        assert b"GOMP_SPINCOUNT=10000" in environment
        assert link.is_fresh()
        link.admit([Joined(0, [1])])
        assert link.speculate(Outcome.nothing(), [0], [K]).tokens[0, 0] == 3


def test_ctrl_c_is_not_for_the_draft(link: Apart, target: Target) -> None:
    n_deaths, n_spoken = link.n_deaths, target.n_spoken
    os.kill(pid_of(link), signal.SIGINT)
    target.play_until(lambda: target.n_spoken > n_spoken + 20)
    assert link.n_deaths == n_deaths
    assert os.getpgid(pid_of(link)) == link.pid


def test_other_children_do_not_inherit_the_link(link: Apart) -> None:
    seen = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, check=True)
    assert b"-> pipe:" in seen.stdout
    assert b"socket" not in seen.stdout


def test_rows_nobody_introduced_are_introduced_after_all(link: Apart, target: Target) -> None:
    """The target was interrupted after it was told to introduce its rows and before it did."""
    n_fresh, n_deaths, n_spoken = target.n_fresh, link.n_deaths, target.n_spoken
    link.retire(range(ROWS))
    target.play_until(lambda: target.n_spoken > n_spoken + 5)
    assert (target.n_fresh, link.n_deaths) == (n_fresh + 1, n_deaths)


# Late


def test_a_stopped_draft_is_late_once_and_then_left_alone_until_it_has_caught_up(link: Apart, target: Target) -> None:
    n_starts = link.n_starts
    for _ in range(3):
        n_fresh, n_late, n_spoken = target.n_fresh, link.n_late, target.n_spoken
        os.kill(pid_of(link), signal.SIGSTOP)
        link.timeout = 0.5
        assert target.play().tokens.shape[1] == 0
        assert (link.n_late, link.is_ready) == (n_late + 1, False)
        link.timeout = AGES  # which nobody waits for any more
        for _ in range(100):
            assert target.play().tokens.shape[1] == 0
        os.kill(pid_of(link), signal.SIGCONT)
        target.play_until(lambda n=n_spoken: target.n_spoken > n + 5)  # type: ignore[misc]
        assert (target.n_fresh, link.n_late) == (n_fresh + 1, n_late + 1)
    assert link.n_starts == n_starts


def test_a_draft_that_was_late_forgets_whoever_it_knew(link: Apart, target: Target) -> None:
    """Even if nobody tells it who left."""
    os.kill(pid_of(link), signal.SIGSTOP)
    link.timeout = 0.5
    assert target.play().tokens.shape[1] == 0
    os.kill(pid_of(link), signal.SIGCONT)
    link.timeout = AGES
    until(link.is_fresh)
    for slot in (0, 1):
        link.admit([Joined(slot, [1, 2])])
        times = link.speculate(Outcome.nothing(), [slot], [K]).times
        assert times is not None
        assert times.prepare[1] == slot + 1, "rows known"


def test_a_stopped_draft_does_not_block_a_long_turn(link: Apart) -> None:
    """More text than a socket holds: half of the turn is sent when the draft stops reading."""
    n_starts = link.n_starts
    target = Target(link, n_vocab=N_VOCAB, n_prompt=200_000)
    os.kill(pid_of(link), signal.SIGSTOP)
    link.timeout = 0.5
    assert target.play().tokens.shape[1] == 0
    link.timeout = AGES
    assert target.play().tokens.shape[1] == 0
    os.kill(pid_of(link), signal.SIGCONT)
    target.play_until(lambda: target.n_spoken > 2)
    assert link.n_starts == n_starts


TRICKLING = """
import socket, sys, time
from saguaro.link import worker
from tests.link.echo_worker import build

class Trickling(socket.socket):
    def sendmsg(self, parts):
        time.sleep(0.01)
        return self.send(parts[0][:1])

socket.socket = Trickling
worker.main(sys.argv[1:], build)
"""


def test_a_reply_that_trickles_in_is_late_when_its_time_is_over() -> None:
    """A byte every 10 ms: the header alone takes longer than the timeout, and no pause between two bytes does."""
    with contextlib.closing(other(TRICKLING)) as link:
        link.wait_ready(AGES)
        target, link.timeout = Target(link), 0.25
        assert target.play().tokens.shape[1] == 0
        assert (link.n_late, link.is_ready) == (1, False)
        link.timeout = AGES
        target.play_until(lambda: target.n_spoken > 0)
        assert (link.n_late, link.n_starts, link.n_deaths, target.n_fresh) == (1, 1, 0, 2)


def test_a_draft_that_is_late_for_too_long_is_started_again(link: Apart, target: Target) -> None:
    n_deaths, n_spoken, first = link.n_deaths, target.n_spoken, pid_of(link)
    os.kill(first, signal.SIGSTOP)
    link.timeout = 0.05
    target.play_until(lambda: link.n_deaths == n_deaths + 1)
    assert link.failure == "it did nothing for 0.5 seconds"
    assert not is_running(first)
    link.timeout = AGES
    target.play_until(lambda: target.n_spoken > n_spoken + 5)
    assert link.failure is None
    assert link.pid != first


# Dead


def last_round(switch: str, link: Apart) -> Target:
    """Three answers, then none, at once."""
    target = Target(link)
    for n in range(3):
        assert target.play().tokens.shape[1] == K, n
    assert target.play().tokens.shape[1] == 0
    assert not link.is_ready
    target.play_until(lambda: link.n_starts == 2)
    assert (link.n_deaths, link.n_late) == (1, 0)
    return target


@pytest.mark.parametrize(
    ("switch", "why"),
    [
        ("raise:4", "RuntimeError: the draft lost its thread"),
        ("garbage:4", "a message begins with b'what'"),
        ("stale:4", "it sent a REPLY numbered 99 where a REPLY numbered 5 was due"),
    ],
)
def test_a_draft_that_goes_mad_is_started_again(switch: str, why: str) -> None:
    with draft(switch) as link:
        last_round(switch, link)
        assert (link.failure or "").startswith(why)


def test_a_draft_that_dies_is_started_again_and_forgiven_if_it_had_answered_for_a_while() -> None:
    with draft("die:4", patience=Timeouts(pauses=(0.0, 1000.0), settled=0.0)) as link:
        target = last_round("die:4", link)
        assert link.failure == "its process ended with exit status 7 and said nothing"
        target.play_until(lambda: target.n_spoken == 6)
        assert target.n_fresh == 2
        assert link.is_ready
        target.play_until(lambda: link.n_starts == 3)


def test_pauses_grow_between_lives() -> None:
    patience = Timeouts(pauses=(0.0, 0.0, 1000.0))
    dying = command("import sys; sys.exit(1)")
    link = draft_process(draft_config(), threads=1, cores=None, timeout=AGES, worker=dying, patience=patience)
    with contextlib.closing(link):
        target = Target(link)
        target.play_until(lambda: link.n_deaths == 3)
        for _ in range(100):
            target.play()
        assert (link.n_starts, link.n_deaths, link.pid) == (3, 3, None)


def test_random_kills(link: Apart, target: Target) -> None:
    """At any moment of its life, twenty times: what is speculated is right or nothing, and it always comes back."""
    moments = random.Random(0)
    n_starts, n_deaths, n_late = link.n_starts, link.n_deaths, link.n_late
    for n in range(20):
        if n % 5 == 0:  # while it works
            spoken = target.n_spoken + moments.randint(1, 5)
            target.play_until(lambda spoken=spoken: target.n_spoken >= spoken)  # type: ignore[misc]
            delay = moments.random() * 0.01
        else:  # while it starts
            target.play_until(lambda n=n: link.n_starts == n_starts + n and link.pid is not None)  # type: ignore[misc]
            delay = moments.random() * 0.4
        pid = pid_of(link)
        killer = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
        killer.start()
        target.play_until(lambda n=n: link.n_deaths == n_deaths + n + 1)  # type: ignore[misc]
        killer.join()
        assert not is_running(pid)
    spoken = target.n_spoken
    target.play_until(lambda: target.n_spoken > spoken + 20)
    assert (link.n_starts, link.n_late) == (n_starts + 20, n_late)


class Interrupt(BaseException):
    """Ctrl-C, by another name, so that the test runner's own is left alone."""


class Interrupted:
    """A link in which a signal handler raises, at any moment of any call; but a start is left in peace, for
    subprocess.Popen may then leave a zombie."""

    def __init__(self, link: Apart) -> None:
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
        self.is_armed = self.link.pid is not None
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


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an interrupted close leaves its sockets to the collector
def test_interrupts_at_any_moment(link: Apart, target: Target) -> None:
    """Whatever a signal handler raises in a link, the next speculation is right or nothing."""
    n_deaths, interrupted = link.n_deaths, Interrupted(link)
    before = signal.signal(signal.SIGALRM, interrupted.handle)
    target.link = interrupted
    try:
        while interrupted.n_interrupts < 300:
            with contextlib.suppress(Interrupt):
                target.play()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    target.link, n_spoken = link, target.n_spoken
    target.play_until(lambda: target.n_spoken > n_spoken + 20)
    assert link.n_deaths < n_deaths + 30, "nearly every interrupt should leave the draft alive"


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
from tests.link.target import AGES, Target, start
links = [start(switches, timeout=0.1) for switches in sys.argv[2:]]
for link, switches in zip(links, sys.argv[2:]):
    if "load" not in switches:
        link.wait_ready(AGES)
    if "slow" in switches:
        Target(link).play()
print(*(link.pid for link in links), flush=True)
if "fork" in sys.argv[1] and os.fork() == 0:
    if "drop" in sys.argv[1]:
        del link, links
        gc.collect()
    print(os.getpid(), flush=True)
    time.sleep(AGES)
    os._exit(0)
if sys.argv[1] != "exit":
    time.sleep(AGES)
"""


@contextlib.contextmanager
def program(way: str, *drafts: str) -> "Iterator[tuple[subprocess.Popen[str], list[int]]]":
    """A program that starts drafts and does not close them, and their numbers."""
    arguments = [sys.executable, "-c", PARENT, way, *drafts]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        yield popen, [int(pid) for pid in popen.stdout.readline().split()]
        popen.kill()


def test_drafts_end_with_a_program_that_is_killed() -> None:
    """Idle, loading, working or stopped."""
    with program("wait", "", "load:1000", "slow:1000", "linger") as (popen, pids):
        os.kill(pids[-1], signal.SIGSTOP)
        until(lambda: state_of(pids[-1]) == "T")  # one that stops after its parent ended stays
        assert [is_running(pid) for pid in pids] == [True] * 4
        popen.kill()
        until(lambda: not any(is_running(pid) for pid in pids))


def test_drafts_end_with_a_program_that_does_not_close_them() -> None:
    with program("exit", "", "load:1000") as (popen, pids):
        assert popen.wait(AGES) == 0
        assert [is_running(pid) for pid in pids] == [False] * 2
        assert popen.stderr is not None
        assert popen.stderr.read() == ""


@pytest.mark.parametrize("way", ["fork and keep the link", "fork and drop the link"])
def test_a_fork_of_the_program_neither_ends_the_draft_nor_keeps_it(way: str) -> None:
    with program(way, "") as (popen, [pid]):
        assert popen.stdout is not None
        fork = int(popen.stdout.readline())
        assert is_running(pid)
        popen.kill()
        until(lambda: not is_running(pid))
        os.kill(fork, signal.SIGKILL)
