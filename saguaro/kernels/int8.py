"""int8 weights on a CPU, and the products over them (cpu.c), in which a row's result depends on that row alone."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.kernels.native import at, library
from saguaro.model.transformer import Place, Stream, Turn

UNIT = 32  # inputs are read so many at a time
MOST_MIXED = 128  # inputs that are mixed with one another


@dataclass(frozen=True)
class Rounded:
    """Rows of int8 steps, each on a scale of its own."""

    steps: Tensor  # [T, width] int16: those of inputs are widened before they are multiplied, and few
    scales: Tensor  # [T] float32


class Int8Weight:
    """A matrix of int8 steps, with a scale for each of its outputs."""

    def __init__(self, weight: Tensor) -> None:  # [out, in] float32
        self.n_out, self.n_in = weight.shape
        rounded = round_rows(weight.contiguous())
        self.steps = F.pad(rounded.steps.to(torch.int8), (0, 0, 0, self.n_out % 2))  # [out, width], out made even
        self.scales = rounded.scales  # [out]
        self.n_params, self.n_bytes = weight.numel(), self.steps.numel() + 4 * self.n_out


class Int8Products:
    """See saguaro.model.transformer.Products; every weight is an Int8Weight."""

    def __init__(self) -> None:
        self._library = library()

    def begin(self, x: Tensor, norm: Tensor, eps: float) -> Stream:
        """See Products."""
        x = x.contiguous()
        return Stream(x, round_rows(x, norm, eps))

    def read(self, stream: Stream, weight: Int8Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """See Products."""
        assert out_dtype == torch.float32, out_dtype
        return self._multiply(stream.read, weight, bias, None)

    def read_heads(self, stream: Stream, weight: Int8Weight, bias: Tensor | None, turn: Turn, place: Place) -> Tensor:
        """See Products."""
        n_stored, d = place.memory.shape[1:]
        heads = self._multiply(stream.read, weight, bias, None).view(len(stream.x), -1, d)
        self._library.turn_heads(
            at(heads), len(heads), turn.n_heads, n_stored // 2, d, at(turn.q_norm), at(turn.k_norm), turn.eps,
            at(turn.cos), at(turn.sin), at(place.memory), at(place.slots),
        )  # fmt: skip
        return heads[:, : turn.n_heads]

    def read_gated(self, stream: Stream, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        """See Products."""
        both = self._multiply(stream.read, weight, bias, None)
        gated = both.new_empty(len(both), weight.n_out // 2)
        self._library.gate(at(both), len(both), gated.shape[1], at(gated))
        return gated

    def write(
        self, stream: Stream, y: Tensor, weight: Int8Weight, bias: Tensor | None, norm: Tensor, eps: float
    ) -> Stream:
        """See Products."""
        return self.begin(self._multiply(round_rows(y.contiguous()), weight, bias, stream.x), norm, eps)

    def _multiply(self, rows: Rounded, weight: Int8Weight, bias: Tensor | None, onto: Tensor | None) -> Tensor:
        """rows @ W + bias + onto: [T, out]."""
        n_rows, width = rows.steps.shape
        assert width == weight.steps.shape[1], (rows.steps.shape, weight.steps.shape)
        y = torch.empty(n_rows, weight.n_out)
        self._library.multiply(
            at(rows.steps), at(rows.scales), n_rows, at(weight.steps), at(weight.scales), width,
            weight.n_out, at(bias), at(onto), at(y),
        )  # fmt: skip
        return y


def round_rows(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Rounded:  # [T, in] float32
    """Rows turned and rounded, through an RMS norm [in] first if there is one."""
    n_rows, n = x.shape
    width = -(-n // UNIT) * UNIT
    rounded = Rounded(torch.empty(n_rows, width, dtype=torch.int16), torch.empty(n_rows))
    library().round_rows(
        at(x), n_rows, n, mixed(n), at(norm), eps, width, at(rounded.steps), at(rounded.scales)
    )  # fmt: skip
    return rounded


def mixed(n: int) -> int:
    """How many neighbours of n inputs are mixed: a power of 2 that divides them.

    >>> mixed(576), mixed(4096), mixed(99)
    (64, 128, 1)
    """
    return math.gcd(n, MOST_MIXED)
