"""The exchange of tensors between the ranks of a group.

shared   through memory that CPU processes of one machine share (cpu.c): some microseconds
gloo     through sockets of the loopback device: between CPU processes without the native library
nccl     between GPUs; it can be captured like any other operation

A group is an object that is passed on. torch's default group is not used, so a program may have one of its own.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import RankError
from saguaro.kernels import native

ROOM = 2**20  # bytes of one rank that are exchanged at once, through shared memory
JOIN_SECONDS = 60.0  # for the ranks to find each other
WAIT_SECONDS = 300.0  # for another rank's part of a step

LOST = 1  # what cpu.c's exchange returns


class ExchangeLost(RankError):
    """Another rank ended, or took too long."""


def backend_for(device: torch.device) -> str:
    """The fastest way of exchanging tensors between such devices."""
    if device.type == "cuda":
        return "nccl"
    return "shared" if native.is_there() else "gloo"


class SharedMemory:
    """Memory that processes share by inheriting its descriptor."""

    def __init__(self, n_ranks: int, fd: int | None = None) -> None:
        """Make it, or with a descriptor map what another process has made."""
        self.fd = _new_file() if fd is None else fd
        n_bytes = native.library().shared_bytes(n_ranks, ROOM)
        if fd is None:
            os.ftruncate(self.fd, n_bytes)
        self._memory = mmap.mmap(self.fd, n_bytes)
        self._end = weakref.finalize(self, os.close, self.fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def lose(self) -> None:
        """Tell all ranks that wait that a rank has ended."""
        ctypes.c_int32.from_buffer(self._memory).value = 1


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("saguaro-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedExchange:
    """Between CPU processes of one machine."""

    def __init__(self, rank: int, size: int, memory: SharedMemory) -> None:
        self._rank, self._size, self._memory, self._library = rank, size, memory, native.library()

    def __call__(self, x: Tensor) -> Tensor:  # [T, n] -> [N, T, n]
        """See saguaro.model.split.Exchange."""
        x = x.contiguous()
        found = x.new_empty(self._size, *x.shape)
        fault = self._library.exchange(
            self._memory.address, self._rank, self._size, ROOM, x.data_ptr(), x.numel() * x.element_size(),
            found.data_ptr(), WAIT_SECONDS,
        )  # fmt: skip
        if fault:
            why = "a rank has ended" if fault == LOST else f"a rank did not come within {WAIT_SECONDS:g} seconds"
            raise ExchangeLost(f"an exchange between ranks failed: {why}")
        return found


class TorchExchange:
    """By a process group of torch: gloo or NCCL."""

    def __init__(self, rank: int, size: int, store: Path, device: torch.device) -> None:
        """Join the group; all ranks must do so. store: a file for this group alone."""
        self._size = size
        try:
            self._group = _group(rank, size, store, device)
        except RuntimeError as e:
            raise ExchangeLost(
                f"rank {rank} could not join the group ({_first_line(e)}); start the engine again"
            ) from e

    def __call__(self, x: Tensor) -> Tensor:  # [T, n] -> [N, T, n]
        """See saguaro.model.split.Exchange."""
        found = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        try:
            self._group._allgather_base(found, x.contiguous()).wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            raise ExchangeLost(f"an exchange between ranks failed: {_first_line(e)}") from e
        return found.view(self._size, *x.shape)


def _group(rank: int, size: int, store: Path, device: torch.device) -> Any:
    import torch.distributed as dist

    if not dist.is_available():
        raise RankError("this torch is built without torch.distributed; install another build, or use one rank")
    shared: Any = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
    shared.set_timeout(timedelta(seconds=JOIN_SECONDS))
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=WAIT_SECONDS)
        return dist.ProcessGroupNCCL(shared, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=WAIT_SECONDS)
    gloo._threads = 1
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # reachable from this machine only
    return dist.ProcessGroupGloo(shared, rank, size, gloo)


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
