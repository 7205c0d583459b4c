"""CUDA graphs, streams, pinned host copies and events. A graph is captured once per shape and replayed by one launch.

A captured function reads and writes tensors at fixed addresses and does not synchronise with the host. Without CUDA it
is called directly, so that the code above also runs, and is tested, on a CPU.
"""

import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

MOST_FLOAT = torch.finfo(torch.float32).max
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # captured batch sizes; a batch is padded to the next one


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Context in which this is the current CUDA device. Triton, graphs, streams and events use the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Graphs:
    """Captured graphs by key, replayed on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        # The default stream cannot be captured. One stream for all graphs, so that they share memory; not torch's own,
        # which belongs to the first device that captures.
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run and capture the function on a key's first call; later calls pass the same function and replay it."""
        if not self._is_cuda:
            function()
        elif key in self._graphs:
            self._graphs[key].replay()
        else:
            function()  # does this call's work and compiles the kernels
            self._graphs[key] = self._capture(function)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        # Kernels keep the priority of the stream on which they are captured.
        current = torch.cuda.current_stream(self._device)
        stream = self._stream if current == torch.cuda.default_stream(self._device) else current
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            function()
        return graph


class SideStream:
    """A second stream of higher priority; without CUDA there is only one stream."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if is_cuda else None

    def __call__(self) -> AbstractContextManager[object]:
        """Context in which work is launched on this stream; it is ordered only after earlier work of this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def take(self, tensor: Tensor) -> None:
        """Order later work on this stream after what the current stream has launched, which computes this tensor, and
        keep the tensor's memory until this stream has read it. The host does not wait."""
        if self._stream is None or tensor.device != self._stream.device:
            return  # a copy from another device is ordered by torch
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(self._stream)


class Mirror:
    """A tensor on the device and its pinned copy on the host: one side writes, the other reads."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(*shape, dtype=dtype, pin_memory=pinned)
        self.device = torch.zeros_like(self.host, device=device) if pinned else self.host

    def send(self, n: int) -> None:
        """Copy the first n rows to the device, after the work already launched."""
        if self.device is not self.host:
            self.device[:n].copy_(self.host[:n], non_blocking=True)

    def fetch(self, n: int) -> None:
        """Copy the first n rows to the host; they are valid when the stream has reached this point."""
        if self.device is not self.host:
            self.host[:n].copy_(self.device[:n], non_blocking=True)


class Moment:
    """A CUDA event; without CUDA it is always complete."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None

    def mark(self) -> None:
        """Record the event on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the event is complete."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "Moment") -> float | None:
        """Seconds from an earlier event to this one, both complete; None without CUDA."""
        if self._event is None or earlier._event is None:
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A tensor of int64 on the device. The host does not wait for the copy."""
    on_host = torch.tensor(values, dtype=torch.int64)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)


def bucket(n: int) -> int:
    """The batch size that n rows are padded to.

    >>> bucket(1), bucket(5), bucket(300)
    (1, 8, 512)
    """
    return next((size for size in BUCKETS if size >= n), -(-n // BUCKETS[-1]) * BUCKETS[-1])


def captured_sizes(n: int) -> list[int]:
    """The batch sizes to capture for up to n rows, largest first: the others share its memory.

    >>> captured_sizes(5)
    [8, 4, 2, 1]
    """
    return [size for size in reversed(BUCKETS) if size <= bucket(n)]


def as_float(bits: Tensor) -> Tensor:  # int64 -> float32
    """The float32 whose bits are the lower half of each integer: a view, which launches nothing.

    >>> as_float(torch.tensor([0x3F800000]))
    tensor([1.])
    """
    return bits[..., None].view(torch.float32)[..., 0]  # integers are little-endian on every device


@lru_cache
def float_bits(value: float) -> int:
    """The bits of a float32 as an int, to store it in an int64 line.

    >>> hex(float_bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", min(value, MOST_FLOAT)), "little", signed=True)
