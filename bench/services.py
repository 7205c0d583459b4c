"""Draft services in processes of their own, on the loopback interface."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from saguaro.errors import SaguaroError

SERVING = re.compile(r"^saguaro: serving the draft .* on (tcp://\S+)$")


@dataclass(frozen=True)
class Services:
    """Where services are reached."""

    addresses: tuple[str, ...]  # tcp://host:port
    key_file: str


@contextmanager
def draft_services(n: int, model: Sequence[str], *, threads: int = 1) -> Iterator[Services]:
    """Run `saguaro draft MODEL` n times, on the CPU. They are ended with the block."""
    with ExitStack() as stack:
        key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "key"
        key.write_text(os.urandom(32).hex())
        flags = ["--listen", "127.0.0.1:0", "--key-file", str(key), "--threads", str(threads), "--device", "cpu"]
        command = [sys.executable, "-m", "saguaro", "draft", *model, *flags]
        started = [stack.enter_context(started_service(command)) for _ in range(n)]  # they load at the same time
        yield Services(tuple(address_of(each) for each in started), str(key))


@contextmanager
def started_service(command: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    """A service that loads. It is ended with the block."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        try:
            yield popen
        finally:
            popen.terminate()


def address_of(popen: "subprocess.Popen[str]") -> str:
    """Wait until it serves. What it writes later is read and dropped, or it would stop at a full pipe."""
    assert popen.stderr is not None
    lines = []
    for line in popen.stderr:
        if found := SERVING.match(line):
            threading.Thread(target=_drop, args=(popen.stderr,), daemon=True).start()
            return found[1]
        lines.append(line)
    raise SaguaroError(f"a draft service could not be started:\n{''.join(lines[-20:])}")


def _drop(lines: Iterable[str]) -> None:
    with contextlib.suppress(ValueError):  # closed
        for _ in lines:
            pass
