"""Ranks as threads of one process: the same exchanges as between processes, without starting any."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from saguaro.model.split import Exchange, Split
from saguaro.parallel.exchange import SharedExchange, SharedMemory, TorchExchange

CPU = torch.device("cpu")

T = TypeVar("T")


def exchanges(backend: str, size: int, folder: Path) -> list[Exchange]:
    """A group of this size, one end for each rank."""
    if backend == "shared":
        memory = SharedMemory(size)
        return [SharedExchange(rank, size, memory) for rank in range(size)]
    return together(size, lambda rank: TorchExchange(rank, size, folder / f"store-{size}", CPU))


def together(size: int, work: Callable[[int], T]) -> list[T]:
    """The results of all ranks; none waits for another that has failed longer than the exchange does."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


def splits(given: list[Exchange]) -> list[Split]:
    """The ranks of a group."""
    return [Split(rank, len(given), exchange) for rank, exchange in enumerate(given)]
