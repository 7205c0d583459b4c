"""A model's products on a CPU, by cpu.c: weights in float32 or int8. A row's result depends on that row alone."""

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.kernels.native import at, library
from saguaro.model.transformer import Place, Stream, Turn

UNIT = 32  # inputs are read so many at a time
MOST_MIXED = 128  # inputs that are mixed with one another before they are rounded

R = TypeVar("R")  # rows as a weight reads them


class CPUWeight(Protocol[R]):
    """A matrix, and how rows meet it."""

    n_params: int
    n_bytes: int
    n_out: int

    def __init__(self, weight: Tensor) -> None:
        """Of a tensor [out, in] float32."""

    @staticmethod
    def rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> R:
        """Rows [T, in] as such a matrix reads them, through an RMS norm [in] first if there is one."""

    def multiply(self, rows: R, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        """rows @ W + bias + onto: [T, out]."""


class CPUProducts(Generic[R]):
    """See saguaro.model.transformer.Products; every weight is of one kind."""

    def __init__(self, kind: type[CPUWeight[R]]) -> None:
        self._kind, self._library = kind, library()

    def begin(self, x: Tensor, norm: Tensor, eps: float) -> Stream:
        """See Products."""
        x = x.contiguous()
        return Stream(x, self._kind.rows(x, norm, eps))

    def read(self, stream: Stream, weight: CPUWeight[R], bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """See Products."""
        assert out_dtype == torch.float32, out_dtype
        return weight.multiply(stream.read, bias, None)

    def read_heads(self, stream: Stream, weight: CPUWeight[R], bias: Tensor | None, turn: Turn, place: Place) -> Tensor:
        """See Products."""
        n_stored, d = place.memory.shape[1:]
        heads = weight.multiply(stream.read, bias, None).view(len(stream.x), -1, d)
        self._library.turn_heads(
            at(heads), len(heads), turn.n_heads, n_stored // 2, d, at(turn.q_norm), at(turn.k_norm), turn.eps,
            at(turn.cos), at(turn.sin), at(place.memory), at(place.slots),
        )  # fmt: skip
        return heads[:, : turn.n_heads]

    def read_gated(self, stream: Stream, weight: CPUWeight[R], bias: Tensor | None) -> Tensor:
        """See Products."""
        both = weight.multiply(stream.read, bias, None)
        gated = both.new_empty(len(both), weight.n_out // 2)
        self._library.gate(at(both), len(both), gated.shape[1], at(gated))
        return gated

    def write(
        self, stream: Stream, y: Tensor, weight: CPUWeight[R], bias: Tensor | None, norm: Tensor, eps: float
    ) -> Stream:
        """See Products."""
        return self.begin(weight.multiply(self._kind.rows(y.contiguous()), bias, stream.x), norm, eps)


@dataclass(frozen=True)
class Rounded:
    """Rows of int8 steps, each on a scale of its own."""

    steps: Tensor  # [T, width] int16: they are widened before they are multiplied, and few
    scales: Tensor  # [T] float32


class Int8Weight:
    """A matrix of int8 steps, with a scale for each of its outputs."""

    def __init__(self, weight: Tensor) -> None:  # [out, in] float32
        self.n_out = len(weight)
        rounded = self.rows(weight.contiguous())
        self.steps = F.pad(rounded.steps.to(torch.int8), (0, 0, 0, self.n_out % 2))  # [out, width], out made even
        self.scales = rounded.scales  # [out]
        self.n_params, self.n_bytes = weight.numel(), self.steps.numel() + 4 * self.n_out

    @staticmethod
    def rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Rounded:
        """Rows turned and rounded; see CPUWeight."""
        (n_rows, n), width = x.shape, wide(x.shape[1])
        rounded = Rounded(torch.empty(n_rows, width, dtype=torch.int16), torch.empty(n_rows))
        library().round_rows(
            at(x), n_rows, n, mixed(n), at(norm), eps, width, at(rounded.steps), at(rounded.scales)
        )  # fmt: skip
        return rounded

    def multiply(self, rows: Rounded, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        """See CPUWeight."""
        n_rows, width = rows.steps.shape
        assert width == self.steps.shape[1], (rows.steps.shape, self.steps.shape)
        y = torch.empty(n_rows, self.n_out)
        library().multiply_int8(
            at(rows.steps), at(rows.scales), n_rows, at(self.steps), at(self.scales), width, self.n_out, at(bias),
            at(onto), at(y),
        )  # fmt: skip
        return y


class Float32Weight:
    """A matrix as it is."""

    def __init__(self, weight: Tensor) -> None:  # [out, in] float32
        self.n_out, n_in = weight.shape
        self.values = F.pad(weight, (0, wide(n_in) - n_in, 0, self.n_out % 2)).contiguous()  # [out, width]
        self.n_params, self.n_bytes = weight.numel(), 4 * self.values.numel()

    @staticmethod
    def rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:  # [T, width]
        """See CPUWeight."""
        (n_rows, n), width = x.shape, wide(x.shape[1])
        if norm is None and width == n:
            return x
        y = torch.empty(n_rows, width)
        library().norm_rows(at(x), n_rows, n, at(norm), eps, width, at(y))
        return y

    def multiply(self, rows: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        """See CPUWeight."""
        n_rows, width = rows.shape
        assert width == self.values.shape[1], (rows.shape, self.values.shape)
        y = torch.empty(n_rows, self.n_out)
        library().multiply_float(
            at(rows), n_rows, at(self.values), width, self.n_out, at(bias), at(onto), at(y)
        )  # fmt: skip
        return y


def wide(n: int) -> int:
    """A row's width: up to a multiple of UNIT.

    >>> wide(576), wide(99)
    (576, 128)
    """
    return -(-n // UNIT) * UNIT


def mixed(n: int) -> int:
    """How many neighbours of n inputs are mixed: a power of 2 that divides them.

    >>> mixed(576), mixed(4096), mixed(99)
    (64, 128, 1)
    """
    return math.gcd(n, MOST_MIXED)
