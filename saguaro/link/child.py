"""One draft process, from start to exit: a Peer (link/peer.py).

Invariant: it ends when this object or this process ends: on request, through its life line (a socket that carries no
data and closes with its owner), or by being killed.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from saguaro.config import DraftConfig
from saguaro.errors import DraftError
from saguaro.link.channel import Channel
from saguaro.link.frame import MessageKind, WireError
from saguaro.link.wire import WireLimits, encode_settings
from saguaro.types import DraftTimes, Interval

now = time.monotonic

N_TAIL = 2000  # characters of a dead draft's output that are shown
GRACE = 1.0  # seconds for a process to exit by itself, so that its exit status gives the reason


class Child:
    """A draft process, running or not yet reaped."""

    def __init__(self, command: Sequence[str], config: DraftConfig, threads: int, cores: Sequence[int] | None) -> None:
        """Start it. Raises OSError if that fails."""
        link, life = socket.socketpair(), socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        try:
            self._popen = _spawn(command, link[1], life[1], output, threads, cores)
        except BaseException:
            close_all(link[0], life[0], output)
            raise
        finally:
            close_all(link[1], life[1])
        self._life, self._output = life[0], output
        self._end = weakref.finalize(self, end, self._popen, link[0], life[0], output)
        self._kill_at: float | None = None
        self._reason: str | None = None
        self.channel = Channel(link[0], WireLimits.of(config).n_reply)
        self.channel.post(MessageKind.SETTINGS, 1, encode_settings(config))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def is_given_up(self) -> bool:
        """Whether it was given up."""
        return self._kill_at is not None

    def reach(self) -> Channel:
        """See Peer. A child is always reached."""
        return self.channel

    def give_up(self, why: Exception) -> None:
        """Give the process up. One that seems to exit by itself gets a grace period: its exit status is the reason."""
        if self._kill_at is None:
            is_said = isinstance(why, WireError | DraftError)
            self._reason, self._kill_at = str(why) if is_said else None, now()
            self._kill_at += 0.0 if isinstance(why, WireError) else GRACE
            self.channel.close()

    def is_gone(self) -> bool:
        """Whether the process has ended. One that was given up is killed after its grace period."""
        if not reap(self._popen) and self._kill_at is not None and now() >= self._kill_at:
            os.kill(self.pid, signal.SIGKILL)
        return reap(self._popen)

    def why_ended(self) -> str:
        """Why the process ended."""
        if self._reason is not None:
            return self._reason
        code = self._popen.returncode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        words = self._last_words()
        return f"its process ended with {how}" + (f"; its last words:\n{words}" if words else " and said nothing")

    def local(self, times: DraftTimes, exchange: Interval) -> DraftTimes:
        """See Peer: all processes of a machine share a clock."""
        return times

    def close(self) -> None:
        """Ask the process to end, kill it if it does not, and reap it."""
        self.channel.close()
        if self.channel.has_answered and not self.channel.is_owed:  # otherwise it does not read the socket
            wait_for(self._popen, GRACE)
        self._end()

    def _last_words(self) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - N_TAIL))
        return self._output.read().decode(errors="replace").strip()


def _spawn(
    command: Sequence[str],
    link: socket.socket,
    life: socket.socket,
    output: IO[bytes],
    threads: int,
    cores: Sequence[int] | None,
) -> "subprocess.Popen[bytes]":
    facts = [link.fileno(), life.fileno(), os.getpid(), threads, ",".join(map(str, cores or ()))]
    return subprocess.Popen(
        [*command, *map(str, facts)],
        pass_fds=(link.fileno(), life.fileno()),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment(threads),
        process_group=0,  # keeps a terminal's Ctrl-C away from the child; a stopped child does not outlive its parent
    )


def environment(threads: int) -> dict[str, str]:
    """Use this process's module path, and set the thread count before torch is loaded."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    env.setdefault("GOMP_SPINCOUNT", "10000")  # waiting threads must not occupy the cores
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path))
    return env


def end(popen: "subprocess.Popen[bytes]", *held: socket.socket | IO[bytes]) -> None:
    """Kill, reap and close. A fork of this process cannot reap the child and only closes."""
    if not reap(popen):
        os.kill(popen.pid, signal.SIGKILL)
        wait_for(popen, 10)  # a process stuck in a driver must not block this one
    close_all(*held)


def reap(popen: "subprocess.Popen[bytes]") -> bool:
    """Whether the process has ended. Popen.poll can stay locked forever after a Ctrl-C."""
    if popen.returncode is None:
        try:
            pid, status = os.waitpid(popen.pid, os.WNOHANG)
        except ChildProcessError:  # the status was lost to a Ctrl-C or another waitpid
            popen.returncode = 0
        else:
            popen.returncode = os.waitstatus_to_exitcode(status) if pid else None
    return popen.returncode is not None


def wait_for(popen: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait for the process to end, at most this long."""
    deadline = now() + seconds
    while not reap(popen) and now() < deadline:
        time.sleep(0.002)


def close_all(*held: socket.socket | IO[bytes]) -> None:
    for one in held:
        one.close()
