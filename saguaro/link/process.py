"""Drafts in processes of their own on this machine."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.config import DraftConfig
from saguaro.link.apart import PATIENCE, Apart, Timeouts
from saguaro.link.child import Child

WORKER = (sys.executable, "-P", "-m", "saguaro.link.worker")


@dataclass(frozen=True)
class Children:
    """Starts draft processes (Peers)."""

    name: str
    command: Sequence[str]
    threads: int
    cores: Sequence[int] | None
    verbs = ("could not be started", "is started again")

    def open(self, config: DraftConfig) -> Child:
        """See Peers."""
        try:
            return Child(self.command, config, self.threads, self.cores)
        except OSError as e:
            raise OSError(f"no process can be started: {e}") from e


def draft_process(
    config: DraftConfig,
    *,
    threads: int,
    cores: Sequence[int] | None,
    timeout: float,
    worker: Sequence[str] = WORKER,
    patience: Timeouts = PATIENCE,
) -> Apart:
    """A link to a draft in another process, which gets these cores (None: any) and threads. It is started without
    waiting for it."""
    children = Children(str(config.draft), worker, threads, cores)
    return Apart(config, children, timeout=timeout, patience=patience)
