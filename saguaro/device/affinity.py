"""Which cores and how many threads the target's steps run with, where the draft has cores of its own.

Cores and threads belong to the process and not to an engine, so they are set for the time of a step and put back after.
"""

import os
from dataclasses import dataclass, field
from types import TracebackType

import torch


def usable_cores() -> list[int]:
    """The CPU cores this process may use.

    >>> len(usable_cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass
class Affinity:
    """Cores and threads for what runs inside; None leaves them as they are."""

    cores: frozenset[int] | None = None
    threads: int | None = None
    _before: list[tuple[set[int] | None, int]] = field(default_factory=list)

    def __enter__(self) -> None:
        pins = self.cores is not None and hasattr(os, "sched_setaffinity")
        self._before.append((os.sched_getaffinity(0) if pins else None, torch.get_num_threads()))
        if pins and self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        self._set_threads(self.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cores, threads = self._before.pop()
        if cores is not None:
            os.sched_setaffinity(0, cores)
        self._set_threads(threads)

    def _set_threads(self, n: int | None) -> None:
        if n is not None and n != torch.get_num_threads():
            torch.set_num_threads(n)


def split_cores(cores: list[int], n_draft: int) -> tuple[frozenset[int], list[int]]:
    """The target's cores and the draft's: the last ones, of which the target keeps at least one.

    >>> split_cores([0, 1, 2, 3], 1)
    (frozenset({0, 1, 2}), [3])
    >>> split_cores([0], 1)
    (frozenset({0}), [0])
    """
    if len(cores) <= n_draft:
        return frozenset(cores), cores
    return frozenset(cores[:-n_draft]), cores[-n_draft:]
