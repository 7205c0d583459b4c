"""One life of the draft's process, from its start to its grave.

Invariant: it ends when this object does, or this process, in whatever way: by being asked, by its life line (a socket
that nobody writes to and that closes with its holder), or by being killed.
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
from saguaro.link.channel import Channel
from saguaro.link.frame import MessageKind
from saguaro.link.wire import WireLimits, encode_settings

now = time.monotonic

N_TAIL = 2000  # characters of what a dead draft wrote last that are worth showing
GRACE = 1.0  # seconds for a process that ends by itself to do so, that its exit status tells why


class Child:
    """A running draft, or a dead one that is not reaped yet."""

    def __init__(self, command: Sequence[str], config: DraftConfig, threads: int, cores: Sequence[int] | None) -> None:
        """Start it. OSError: that was not possible."""
        link, life = socket.socketpair(), socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        try:
            self._popen = _spawn(command, link[1], life[1], output, threads, cores)
        except BaseException:
            _close(link[0], life[0], output)
            raise
        finally:
            _close(link[1], life[1])
        self._life, self._output = life[0], output
        self._end = weakref.finalize(self, _end, self._popen, link[0], life[0], output)
        self._kill_at: float | None = None
        self._reason: str | None = None
        self.ready_at = self.answered_at = 0.0
        self.channel = Channel(link[0], WireLimits.of(config).n_reply)
        self.channel.post(MessageKind.SETTINGS, 1, encode_settings(config))

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._popen.pid

    @property
    def is_ready(self) -> bool:
        """Whether its settings were answered."""
        return self.channel.received > 0

    @property
    def is_behind(self) -> bool:
        """Whether it still owes an answer."""
        return self.channel.received != self.channel.posted

    @property
    def is_buried(self) -> bool:
        """Whether nothing is expected of it any more."""
        return self._kill_at is not None

    def bury(self, reason: str | None, grace: float = 0.0) -> None:
        """Expect nothing of it any more; without a reason, its exit status and last words will be one."""
        if self._kill_at is None:
            self._reason, self._kill_at = reason, now() + grace
            self.channel.close()

    def is_gone(self) -> bool:
        """Whether the process has ended; a buried one that takes too long is killed."""
        if not _reap(self._popen) and self._kill_at is not None and now() >= self._kill_at:
            os.kill(self.pid, signal.SIGKILL)
        return _reap(self._popen)

    def epitaph(self) -> str:
        """Why it is gone."""
        if self._reason is not None:
            return self._reason
        code = self._popen.returncode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        words = self._last_words()
        return f"its process ended with {how}" + (f"; its last words:\n{words}" if words else " and said nothing")

    def close(self) -> None:
        """Ask it to end, make it end, and reap it."""
        self.channel.close()
        if self.is_ready and not self.is_behind:  # otherwise it would not hear
            _wait(self._popen, GRACE)
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
        env=_environment(threads),
        process_group=0,  # Ctrl-C in a terminal is for this process; a stopped child does not outlive it
    )


def _environment(threads: int) -> dict[str, str]:
    """Modules are found where this process finds them, and torch finds its threads when it is loaded."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    env.setdefault("GOMP_SPINCOUNT", "10000")  # waiting threads must not take the cores from those that work
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path))
    return env


def _end(popen: "subprocess.Popen[bytes]", *held: socket.socket | IO[bytes]) -> None:
    """Kill, reap and let go; a fork of this process has no such child to reap, and lets go only."""
    if not _reap(popen):
        os.kill(popen.pid, signal.SIGKILL)
        _wait(popen, 10)  # one that a driver holds on to must not hold on to us
    _close(*held)


def _reap(popen: "subprocess.Popen[bytes]") -> bool:
    """Whether it has ended. Popen.poll would be left locked for ever by a Ctrl-C at the wrong moment."""
    if popen.returncode is None:
        try:
            pid, status = os.waitpid(popen.pid, os.WNOHANG)
        except ChildProcessError:  # such a Ctrl-C, or another waitpid, took the status
            popen.returncode = 0
        else:
            popen.returncode = os.waitstatus_to_exitcode(status) if pid else None
    return popen.returncode is not None


def _wait(popen: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait until it has ended, but no longer than this."""
    deadline = now() + seconds
    while not _reap(popen) and now() < deadline:
        time.sleep(0.002)


def _close(*held: socket.socket | IO[bytes]) -> None:
    for one in held:
        one.close()
