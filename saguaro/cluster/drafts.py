"""Draft services of a cluster: actors that each keep a `saguaro draft` running on their node, at one address.

Invariant: the service ends with its actor, however that one ends (saguaro.cli.tethered). A service that dies is started
again at the same address, so the links of replicas find it. If its node is lost, the replicas that used it go on
without a draft.
"""

import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from saguaro.cluster.settings import Resources, device_of
from saguaro.config import SERVICE, SUFFIX, EngineConfig, ModelSource
from saguaro.errors import ConfigError, DraftError

PAUSE_SECONDS = 5.0  # before a service that could not be started again is tried once more
N_TAIL = 2000  # characters of its log that are told if it cannot start
_SERVING = re.compile(r"^saguaro: serving the draft .* on tcp://(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Services:
    """Addresses of draft services, and the key that replicas prove to know."""

    addresses: tuple[str, ...]
    key: str


class DraftService:
    """The actor."""

    def __init__(self, flags: Sequence[str], key: str) -> None:
        """Start the service at any port that is free. Raises DraftError with its last words if it ends instead."""
        from ray.util import get_node_ip_address  # not above: the settings are read where ray is not installed

        self._flags, self._key = list(flags), key
        self._process, self._address = self._start(f"{get_node_ip_address()}:0")
        threading.Thread(target=self._keep, daemon=True).start()

    def address(self) -> str:
        """HOST:PORT."""
        return self._address

    def _start(self, at: str) -> "tuple[subprocess.Popen[str], str]":
        command = [sys.executable, "-m", "saguaro.cli.tethered", "draft", *self._flags]
        pipe, said = subprocess.PIPE, ""
        with in_file(self._key) as key:
            command += ["--listen", at, "--key-file", str(key)]
            process = subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True)
            assert process.stderr is not None
            for line in process.stderr:
                said = (said + line)[-N_TAIL:]
                found = _SERVING.search(line)
                if found:
                    threading.Thread(target=_read_on, args=(process,), daemon=True).start()
                    return process, found[1]
        process.wait()
        why = (said.strip().splitlines() or ["it does not say why"])[-1].removeprefix("saguaro: ")
        raise DraftError(f"a draft service cannot start: {why}")

    def _keep(self) -> None:
        """Start it again whenever it ends."""
        while True:
            self._process.wait()
            try:
                self._process, self._address = self._start(self._address)
            except DraftError as e:
                print(f"{e}; it is tried again", file=sys.stderr)
                time.sleep(PAUSE_SECONDS)


def _read_on(process: "subprocess.Popen[str]") -> None:
    """Read its log to the end, so that it never waits for a reader."""
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)


@contextmanager
def in_file(key: str) -> Iterator[Path]:
    """A key in a file that only this user can read, for what reads it meanwhile."""
    with tempfile.NamedTemporaryFile("w", prefix="saguaro-key-") as file:
        file.write(key)
        file.flush()
        yield Path(file.name)


def new_key() -> str:
    """A key for the services of one cluster."""
    return secrets.token_hex(32)


def served_by(engine: EngineConfig, address: str, key: Path) -> EngineConfig:
    """The settings of a replica whose draft model is served.

    >>> served_by(EngineConfig(draft="suffix+small", draft_threads=2), "10.0.0.2:7117", Path("key")).draft
    'suffix+tcp://10.0.0.2:7117'
    """
    begin = f"{SUFFIX}+" if engine.has_suffix else ""
    return replace(
        engine,
        draft=f"{begin}{SERVICE}{address}",
        draft_key_file=str(key),
        draft_threads=None,
        draft_device="auto",
    )


def service_flags(which: ModelSource, engine: EngineConfig, n_replicas: int, has_gpus: bool) -> list[str]:
    """The flags of `saguaro draft` for the draft model of these settings.

    >>> service_flags(ModelSource(model="m"), EngineConfig(draft="drop:1", threads=2), 2, has_gpus=False)[:4]
    ['drop:1', '--target', 'm', '--max-sessions']
    """
    model = engine.draft_model
    if model is None and (which.model is not None or engine.has_suffix):
        raise ConfigError(f"draft_services are for a draft model, and draft is {engine.draft!r}; name one")
    if engine.is_served:
        raise ConfigError(f"draft is {engine.draft!r}, a service already; leave draft_services out")
    served_by(engine, "draft:1", Path("key"))  # refuses what a service decides itself
    names = [] if model in (None, "default") else [str(model)]
    target = [] if which.model is None else ["--target", which.model]
    sessions = ["--max-sessions", str(max(8, n_replicas)), "--max-rows", str(max(64, engine.max_batch_rows))]
    threads = ["--threads", str(engine.draft_threads or 1), "--dtype", engine.dtype]
    cache = [] if which.cache_dir is None else ["--cache-dir", str(which.cache_dir)]
    return [*names, *target, *sessions, *threads, "--device", draft_device(engine, has_gpus), *cache]


def service_resources(engine: EngineConfig, has_gpus: bool) -> Resources:
    """What a draft service takes."""
    return Resources(cpus=engine.draft_threads or 1, gpus=1 if draft_device(engine, has_gpus) == "cuda" else 0)


def draft_device(engine: EngineConfig, has_gpus: bool) -> str:
    """The device of a draft service: its own, or the target's."""
    return device_of(engine, has_gpus) if engine.draft_device == "auto" else engine.draft_device
