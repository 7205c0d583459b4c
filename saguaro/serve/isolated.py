"""Runs a function in a separate process, for work that might not end or might not fit into memory.

Invariant: a call returns or raises within its limits, and leaves nothing in this process. The child limits itself:
CPU time (SIGPROF ends it, also inside a library) and address space. This side limits the wall-clock time. A child that
ended is replaced immediately.

The child is a fresh interpreter that imports only what its function needs. Messages are JSON: nothing that a child
writes is executed here.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from saguaro import errors

SETUP_SECONDS = 120.0  # for a child to start and build its function
OUT_OF_MEMORY = 77  # a child's exit status
_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of one call."""

    core_seconds: float = 1.0
    """CPU time."""
    seconds: float = 10.0
    """Wall-clock time, on a busy machine."""
    memory_bytes: int = 256 * 2**20
    """In addition to the child's memory when it is ready."""
    niceness: int = 0
    """The child's nice value."""


class Exceeded(Exception):
    """A call exceeded a limit; the message names it, as "more than 1 second of processor time"."""

    def __init__(self, what: str, is_certain: bool) -> None:
        super().__init__(what)
        self.is_certain = is_certain  # False if it may succeed again, as the machine may have been busy


class Isolated:
    """Calls a function in a child. Thread-safe; calls run one at a time."""

    def __init__(self, maker: str, setting: Callable[[], Any], limits: Budget) -> None:
        """`maker` is "module:function". The child calls it with the setting, and it returns the function."""
        self._maker, self._setting, self._limits = maker, setting, limits
        self._lock, self._is_closed = threading.Lock(), False
        self._child: _Child | None = None

    @cached_property
    def _first(self) -> bytes:
        """The first message to a child."""
        return _packed({"maker": self._maker, "setting": self._setting(), "limits": vars(self._limits)})

    @property
    def pid(self) -> int | None:
        """The child's process id; None without a child."""
        child = self._child
        return None if child is None else child.popen.pid

    def start(self) -> None:
        """Start the child without waiting for it."""
        with self._lock:
            self._there()

    def __call__(self, *args: Any) -> Any:
        """Call the function with plain values. Raises its saguaro.errors, or Exceeded."""
        with self._lock:
            child = self._there()
            try:
                reply = child.ask(args, self._limits.seconds)
            except (OSError, EOFError) as e:
                self._child = None
                why = child.end(e, self._limits)
                self._there()
                raise why from None
        if "error" in reply:
            kind, message = reply["error"]
            raise getattr(errors, kind)(message)
        return reply["value"]

    def close(self) -> None:
        """End the child, even during a call, which then raises Unavailable."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._child = None

    def _there(self) -> "_Child":
        if self._is_closed:
            raise errors.Unavailable("the server is ending and takes no more requests; ask another")
        if self._child is None:
            self._child = _Child(self._first)
        return self._child


class _Child:
    """One child process."""

    def __init__(self, first: bytes) -> None:
        here, there = socket.socketpair()
        try:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "saguaro.serve.isolated", str(there.fileno())],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                process_group=0,  # keeps a terminal's Ctrl-C away from the child
            )
        except OSError as e:
            here.close()
            raise errors.Unavailable(f"a process cannot be started: {e}; raise the limits of this server") from e
        finally:
            there.close()
        self._socket, self._is_ready = here, False
        self._sender = threading.Thread(target=self._send_first, args=(first,), daemon=True)
        self._sender.start()  # in a thread: a large setting blocks until the child reads it

    def _send_first(self, first: bytes) -> None:
        with contextlib.suppress(OSError):  # the child has ended; the first call handles it
            self._socket.sendall(first)

    def ask(self, args: Any, seconds: float) -> dict[str, Any]:
        """Call the function. Raises OSError or EOFError if there is no reply."""
        if not self._is_ready:
            self._sender.join()
            self._socket.settimeout(SETUP_SECONDS)
            _receive(self._socket)
            self._is_ready = True
        self._socket.settimeout(seconds)
        self._socket.sendall(_packed(args))
        reply: dict[str, Any] = _receive(self._socket)
        if "failure" in reply:
            raise RuntimeError(f"a function in a process of its own has failed: {reply['failure']}")
        return reply

    def kill(self) -> None:
        """Kill and reap the process."""
        self.popen.kill()
        self.popen.wait()
        self._sender.join()
        self._socket.close()

    def end(self, error: Exception, limits: Budget) -> Exception:
        """Kill the process. Returns the exception for the call that got no reply."""
        if not isinstance(error, TimeoutError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(1.0)  # its exit status gives the reason
        status = self.popen.poll()
        self.kill()
        if status == -signal.SIGPROF:
            return Exceeded(f"more than {limits.core_seconds:g} seconds of processor time", is_certain=True)
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
            return Exceeded(f"more than {limits.memory_bytes // 2**20} MiB of memory", is_certain=True)
        if status is None:
            return Exceeded(f"longer than {limits.seconds:g} seconds", is_certain=False)
        return errors.Unavailable(f"a process of the server ended with status {status}; ask again")


def _environment() -> dict[str, str]:
    """Use this process's module path; one thread, one heap."""
    path = os.pathsep.join(dict.fromkeys(entry or str(Path.cwd()) for entry in sys.path))
    return {**os.environ, "PYTHONPATH": path, "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def _packed(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return _HEAD.pack(len(data)) + data


def _receive(link: socket.socket) -> Any:
    (size,) = _HEAD.unpack(_read(link, _HEAD.size))
    return json.loads(_read(link, size))


def _read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 2**20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# The functions below run in the child.


def _serve(link: socket.socket) -> None:
    first = _receive(link)
    limits = Budget(**first["limits"])
    os.nice(limits.niceness)
    module, _, name = first["maker"].partition(":")
    function = getattr(importlib.import_module(module), name)(first["setting"])
    _limit_memory(limits.memory_bytes)
    link.sendall(_packed({}))
    while True:
        args = _receive(link)
        signal.setitimer(signal.ITIMER_PROF, limits.core_seconds)
        reply = _reply(function, args)
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(_packed(reply))


def _reply(function: Callable[..., Any], args: Any) -> dict[str, Any]:
    try:
        return {"value": function(*args)}
    except errors.SaguaroError as e:
        return {"error": [type(e).__name__, str(e)]}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as e:
        return {"failure": f"{type(e).__name__}: {e}"}


def _limit_memory(more: int) -> None:
    """Limit this process to so many more bytes. Without /proc there is no limit."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        _serve(socket.socket(fileno=int(sys.argv[1])))
