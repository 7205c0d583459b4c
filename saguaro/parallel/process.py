"""The process of one rank, seen from rank 0."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence

from saguaro.errors import RankError
from saguaro.link.channel import Channel
from saguaro.link.child import N_TAIL, environment, wait_for
from saguaro.link.child import end as end_process
from saguaro.link.frame import MessageKind, WireError
from saguaro.parallel.exchange import ExchangeLost
from saguaro.parallel.orders import MOST_BYTES
from saguaro.parallel.rank import CUT_OFF

now = time.monotonic

WORKER = (sys.executable, "-P", "-m", "saguaro.parallel.worker")
GRACE = 2.0  # seconds for a rank to end by itself, so that the reason is known


class RankProcess:
    """A process that ends with this object, or with this process."""

    def __init__(self, rank: int, threads: int, shared: int | None, worker: Sequence[str] = WORKER) -> None:
        """Start it; shared: the descriptor of memory that it shares."""
        self.rank = rank
        link, life = socket.socketpair(), socket.socketpair()
        inherited = [link[1].fileno(), life[1].fileno(), *([] if shared is None else [shared])]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        try:
            self._popen = subprocess.Popen(
                [*worker, *map(str, (*inherited[:2], os.getpid(), "" if shared is None else shared))],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment(threads),
                process_group=0,  # keeps a terminal's Ctrl-C away
            )
        except OSError as e:
            raise RankError(f"no process can be started for rank {rank}: {e}") from e
        finally:
            for one in (link[1], life[1]):
                one.close()
        self.life, self.channel = life[0], Channel(link[0], MOST_BYTES)
        self._end = weakref.finalize(self, end_process, self._popen, link[0], life[0], self._output)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def post(self, kind: MessageKind, parts: Sequence[memoryview]) -> None:
        """Send an order."""
        channel = self.channel
        try:
            channel.post(kind, channel.posted + 1, parts)
            while not channel.flush():
                channel.wait(None)
        except OSError as e:
            raise self._lost(e) from e

    def wait_ready(self, seconds: float) -> None:
        """Wait for the answer to an order."""
        deadline = now() + seconds
        try:
            while (message := self.channel.receive()) is None:
                if not self.channel.wait(deadline):
                    raise RankError(f"rank {self.rank} did not answer for {seconds:g} seconds; start the engine again")
        except (OSError, EOFError, WireError) as e:
            raise self._lost(e) from e
        if message.kind is not MessageKind.READY:
            raise RankError(f"rank {self.rank} failed: {message.body.tobytes().decode(errors='replace')}")

    def _lost(self, e: Exception) -> RankError:
        """The error for a process that cannot be talked to."""
        why = self.why_ended()
        return ExchangeLost(f"rank {self.rank} cannot be reached: {e!r}") if why is None else RankError(why)

    def why_ended(self, grace: float = GRACE) -> str | None:
        """Why the process ended by itself; None: it runs, or it ended because another rank did."""
        said = self._last_message()
        wait_for(self._popen, grace)
        code = self._popen.returncode
        if said is not None:
            return f"rank {self.rank} failed: {said}"
        if code is None or code == CUT_OFF:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        words = self._last_words()
        more = f"; its last words:\n{words}" if words else ""
        return f"rank {self.rank} of the target, process {self.pid}, {how}; start the engine again{more}"

    def close(self) -> None:
        """End the process."""
        self._end()

    def _last_message(self) -> str | None:
        """What a rank sent before it ended."""
        try:
            message = self.channel.receive()
        except (OSError, EOFError, WireError):
            return None
        failed = message is not None and message.kind is MessageKind.FAILED
        return message.body.tobytes().decode(errors="replace") if message is not None and failed else None

    def _last_words(self) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - N_TAIL))
        return self._output.read().decode(errors="replace").strip()
