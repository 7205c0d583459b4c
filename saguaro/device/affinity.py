"""CPU affinity and thread count of the target's steps when the draft has its own cores.

Both are settings of the process, not of an engine, so they are set for the duration of a step and restored after it.
"""

import os
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

import torch


def usable_cores() -> list[int]:
    """The CPU cores that this process may use.

    >>> len(usable_cores()) >= 1
    True
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@dataclass
class Affinity:
    """Context manager that sets cores and threads; None leaves them unchanged."""

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


def rank_affinities(cores: list[int], threads: int | None, size: int) -> list[Affinity]:
    """Divide cores among ranks; with fewer cores than ranks, all ranks use all of them, with one thread each.

    >>> [(sorted(each.cores), each.threads) for each in rank_affinities([0, 1, 2, 3, 4], None, 2)]
    [([0, 1], 2), ([2, 3, 4], 3)]
    >>> [(sorted(each.cores), each.threads) for each in rank_affinities([0, 1], None, 4)][:2]
    [([0, 1], 1), ([0, 1], 1)]
    """
    if len(cores) < size:
        return [Affinity(frozenset(cores), 1) for _ in range(size)]
    bounds = [len(cores) * rank // size for rank in range(size + 1)]
    each = [frozenset(cores[first:last]) for first, last in pairwise(bounds)]
    return [Affinity(own, len(own) if threads is None else max(1, threads // size)) for own in each]


def split_cores(cores: list[int], n_draft: int) -> tuple[frozenset[int], list[int]]:
    """The target's and the draft's cores. The draft gets the last n_draft; with too few cores both share all of them.

    >>> split_cores([0, 1, 2, 3], 1)
    (frozenset({0, 1, 2}), [3])
    >>> split_cores([0], 1)
    (frozenset({0}), [0])
    """
    if len(cores) <= n_draft:
        return frozenset(cores), cores
    return frozenset(cores[:-n_draft]), cores[-n_draft:]
