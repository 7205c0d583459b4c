"""Fixed sequences of device work: captured once for each shape, then replayed by one launch.

A function that is captured reads and writes tensors that stay where they are, and asks nothing of the host. Where
there is no CUDA it is simply called, so that everything above runs, and is tested, on a CPU.
"""

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch sizes that are captured; a batch is padded to the next


class Graphs:
    """Captured functions by key, replayed on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what this function did when the key was first seen; it must be the same function each time."""
        if not self._is_cuda:
            function()
        elif key in self._graphs:
            self._graphs[key].replay()
        else:
            function()  # it does its work, and kernels are compiled on the way
            self._graphs[key] = self._capture(function)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        # Kernels keep the priority of the stream they are captured on; the default stream cannot be captured on.
        current = torch.cuda.current_stream()
        stream = None if current == torch.cuda.default_stream() else current
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            function()
        return graph


class SideStream:
    """A stream beside the current one, served first wherever both have work; without CUDA there is but one."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if is_cuda else None

    def __call__(self) -> AbstractContextManager[object]:
        """Whatever is launched inside follows what was launched here before, and nothing else."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Mirror:
    """A tensor on a device and the same on the host: written on one side, read on the other."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=pinned)
        self.device = torch.zeros_like(self.host, device=device) if pinned else self.host

    def send(self, n: int) -> None:
        """Copy the first n rows to the device, behind what is launched already."""
        if self.device is not self.host:
            self.device[:n].copy_(self.host[:n], non_blocking=True)

    def fetch(self, n: int) -> None:
        """Copy the first n rows to the host; they are there once the stream has come so far."""
        if self.device is not self.host:
            self.host[:n].copy_(self.device[:n], non_blocking=True)


class Moment:
    """A point in a stream that can be waited for; without CUDA it has always come."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None

    def mark(self) -> None:
        """It is here, on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float | None:
        """Seconds from an earlier moment to this one, both come; None without CUDA."""
        if self._event is None or earlier._event is None:
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000


def bucket(n: int) -> int:
    """The batch size that n rows are padded to.

    >>> bucket(1), bucket(5), bucket(300)
    (1, 8, 512)
    """
    return next((size for size in BUCKETS if size >= n), -(-n // BUCKETS[-1]) * BUCKETS[-1])


def as_float(bits: Tensor) -> Tensor:  # int64 -> float32
    """Numbers that travelled among whole ones, as their bits.

    >>> as_float(torch.tensor([0x3F800000]))
    tensor([1.])
    """
    return bits.to(torch.int32).view(torch.float32)
