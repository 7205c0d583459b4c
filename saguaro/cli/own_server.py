"""`saguaro serve` as a process that another command starts, on a free port of this machine.

Invariant: the process ends with this object, and with this program however that ends (see `tethered`). It serves
this program only: its API key is drawn at random.
"""

import os
import re
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from saguaro.client.endpoint import Endpoint
from saguaro.errors import PeerError

N_TAIL = 20  # lines of a log that are shown
END_SECONDS = 60.0  # to end after its input closed
_SERVING = re.compile(r"^saguaro: serving .* on (http://\S+)$")


def flags_of(*groups: Any) -> list[str]:
    """The flags of settings that differ from the default.

    >>> from saguaro.cli.args import EngineArgs, ModelArgs
    >>> flags_of(ModelArgs(model="m"), EngineArgs(prefix_caching=False, lookahead=6))
    ['--model', 'm', '--lookahead', '6', '--no-prefix-caching']
    """
    return [
        word
        for group in groups
        for one in fields(group)
        for word in _flag(one.name, getattr(group, one.name), one.default)
    ]


def _flag(name: str, value: Any, default: Any) -> list[str]:
    word = name.replace("_", "-")
    if value == default:
        return []
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", str(value)]


class OwnServer:
    """A running `saguaro serve`."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Start it, and wait until it serves. Raises PeerError with its last words if it ends instead."""
        self.command = ["saguaro", "serve", *flags]
        start = [sys.executable, "-m", "saguaro.cli.tethered", "serve", *flags, "--port", "0", "--no-access-log"]
        self.key = secrets.token_urlsafe()
        self._process = subprocess.Popen(
            start,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "SAGUARO_API_KEY": self.key},
            text=True,
            errors="replace",
            process_group=0,  # keeps a terminal's Ctrl-C away from it
        )
        self._tail: deque[str] = deque(maxlen=N_TAIL)
        self._is_decided = threading.Event()  # it serves, or has ended
        self._url: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._is_decided.wait()
            if self._url is None:
                raise PeerError(f"{' '.join(self.command)} ended before it served; it said:\n{self.last_words}")
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> Endpoint:
        """Where requests go."""
        assert self._url is not None
        return Endpoint(url=self._url + "/v1", key=self.key)

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return "".join(self._tail).rstrip()

    def close(self) -> None:
        """End it, and wait for that."""
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stderr.close()

    def __enter__(self) -> "OwnServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Read its log to the end, so that it never waits for a reader."""
        for line in self._lines():
            self._tail.append(line)
            found = _SERVING.match(line.rstrip("\n"))
            if found:
                self._url = found[1]
                self._is_decided.set()
        self._is_decided.set()

    def _lines(self) -> Iterator[str]:
        assert self._process.stderr is not None
        yield from self._process.stderr
