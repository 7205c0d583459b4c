"""Draft services whose draft is an Echo, in a thread or in a process of its own, and a relay that cuts connections."""

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from saguaro.config import DraftConfig
from saguaro.link.address import Address, ServiceName, listen, name_of
from saguaro.link.answer import Side
from saguaro.link.apart import Apart, Timeouts
from saguaro.link.connection import draft_service
from saguaro.link.offer import Expected, Offer, TargetShape, Terms
from saguaro.link.service import Service
from saguaro.link.session import Served
from tests.link.echo import Echo
from tests.link.target import AGES, ROWS, V, draft_config

KEY = b"a key of sixteen bytes or more"
SHAPE = TargetShape(4, 64, V)
TERMS = Terms("echo", V, ROWS, 2**24)


def served(switches: str = "", **others: Any) -> Served:
    """What an Echo with these switches is served as."""

    def build(config: DraftConfig) -> tuple[Side, int]:
        return Echo(replace(config, draft=switches)), 7

    usual: dict[str, Any] = {
        "offer": Offer(TERMS, np.zeros(0, np.uint16)),
        "key": KEY,
        "build": build,
        "max_sessions": 3,
        "status_s": 1000.0,
        "threads": 1,
    }
    return Served(**(usual | others))


@contextlib.contextmanager
def serving(what: Served | None = None) -> Iterator[tuple[Service, Address]]:
    """A service in a thread."""
    place = listen(Address("127.0.0.1", 0), is_keyed=True)
    address = Address.of(name_of(place.getsockname()))
    service = Service(place, what or served())
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service, address
    finally:
        service.stop()
        thread.join()


class ServiceProcess:
    """An Echo's service in a process of its own, which can be killed and started again at its address."""

    def __init__(self, switches: str = "", port: int = 0) -> None:
        self.switches = switches
        command = [sys.executable, "-P", "-m", "tests.link.echo_service", str(port), switches]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.address = Address.of(self.popen.stdout.readline().strip())

    def kill(self) -> None:
        """As a machine that loses its power, as far as one machine can show it."""
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()

    def again(self) -> "ServiceProcess":
        """Another at the same address."""
        return ServiceProcess(self.switches, self.address.port)

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def connect(
    address: Address, key: bytes = KEY, timeout: float = AGES, patience: Timeouts | None = None, **others: Any
) -> Apart:
    """A link to a service."""
    config = replace(draft_config(), **others.pop("settings", {}))
    expected = Expected(**{"model": None, "n_vocab": V, "target": SHAPE, "spelling": {}, **others})
    at = ServiceName(address, None)
    return draft_service(config, at, key, expected, timeout=timeout, patience=patience or Timeouts(pauses=(0.0,)))


class Relay:
    """Passes bytes on between clients and a service, until it is told to cut or to swallow them."""

    def __init__(self, to: Address, delay_s: float = 0.0) -> None:
        """delay_s: of everything, each way; for messages that take turns."""
        self.delay_s = delay_s
        self.to, self._place = to, socket.create_server(("127.0.0.1", 0))
        self.address = Address.of(name_of(self._place.getsockname()))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._swallowed: set[socket.socket] = set()
        self._lock, self._is_over = threading.Lock(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """End all connections at both ends."""
        with self._lock:
            for one in (end for pair in self._pairs for end in pair):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def swallow(self) -> None:
        """From now on pass nothing on through the present connections, and end none of them."""
        with self._lock:
            self._swallowed |= {end for pair in self._pairs for end in pair}

    def close(self) -> None:
        """End everything."""
        self.cut()
        self._is_over = True
        self._thread.join()
        for one in (self._place, *(end for pair in self._pairs for end in pair)):
            one.close()

    def _run(self) -> None:
        while not self._is_over:
            ends = {one: other for pair in self._pairs for one, other in (pair, pair[::-1])}
            ready = select.select([self._place, *ends], [], [], 0.005)[0]
            if self._place in ready:
                self._accept()
            for one in (one for one in ready if one is not self._place):
                self._pass_on(one, ends[one])

    def _accept(self) -> None:
        ours = self._place.accept()[0]
        try:
            theirs = socket.create_connection((self.to.host, self.to.port))
        except ConnectionRefusedError:
            ours.close()
            return
        for one in (ours, theirs):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._pairs.append((ours, theirs))

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            data = one.recv(2**16)
            if one in self._swallowed and data:
                return
            if data:
                time.sleep(self.delay_s)  # what a relay on the way takes
                other.sendall(data)
                return
        except OSError:
            pass
        with self._lock:
            self._pairs = [pair for pair in self._pairs if one not in pair]
            for end in (one, other):
                end.close()


def key_file(folder: Path, key: bytes = KEY) -> str:
    """A file with a key."""
    path = folder / "draft.key"
    path.write_bytes(key + b"\n")
    return str(path)
