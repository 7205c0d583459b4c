"""Products on a CPU by cpu.c, with float32 or int8 weights. A row's result depends only on that row."""

import ctypes
import math
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from saguaro.kernels.native import at, int8_format, library, n_threads
from saguaro.model.linear import Linear, Packed
from saguaro.model.norm import Norm
from saguaro.model.products import COMPOSED, KVWrite, QKNormRope, Residual, added
from saguaro.model.scaled import Scaled
from saguaro.model.stored import Found, Stored, decoded

CPU = torch.device("cpu")
UNIT = 32  # inputs are padded to a multiple of it
PANEL = 16  # outputs that are computed together
GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # their numbers in a GGUF file
MOST_MIXED = 128  # largest Hadamard block: inputs that are mixed before rounding


class Rows:
    """Buffer for input rows [T, n] in the format of a weight: float32, or int8 values with one scale per row."""

    def __init__(self, n_rows: int, n: int, has_scales: bool) -> None:
        self.n_rows, self.width = n_rows, wide(n)
        self._dtype = int8_format().inputs if has_scales else torch.float32
        n_bytes = n_rows * self.width * self._dtype.itemsize
        # one tensor for values, then scales: allocating takes as long as a small product
        self._memory = torch.empty(n_bytes + 4 * n_rows * has_scales, dtype=torch.uint8)
        self.at = self._memory.data_ptr()
        self.scales_at = self.at + n_bytes if has_scales else None

    @property
    def values(self) -> Tensor:  # [T, width] float32, or int16: the steps of int8 rows
        """The rows' values."""
        values = self._memory[: self.n_rows * self.width * self._dtype.itemsize].view(self._dtype)
        values = values.view(self.n_rows, self.width)
        return values.short() - int8_format().zero if self.scales_at else values

    @property
    def scales(self) -> Tensor:  # [T] float32
        """The scale of each int8 row; empty for float32."""
        return self._memory[self.n_rows * self.width * self._dtype.itemsize :].view(torch.float32)


class Matrix(ctypes.Structure):
    """The struct `matrix` of cpu.c."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("n_in", "width", "mixed", "n_out")),
    )


class CPUWeight(Packed, Protocol):
    """A packed matrix, and the format of its input rows."""

    n_out: int
    width: int  # of its input rows
    address: int  # of its Matrix

    @staticmethod
    def rows(n_rows: int, n: int) -> Rows:
        """A buffer for input rows [T, n] of such a matrix."""


class _Fusible(Protocol):
    weight: CPUWeight
    bias: Tensor | None


class CPUProducts:
    """See saguaro.model.products.Products; fuses products with weights of one kind."""

    def __init__(self, kind: type[CPUWeight]) -> None:
        self._kind, self._rows, self._library = kind, kind.rows, library()

    def begin(self, x: Tensor, norm: nn.Module) -> Residual:
        """See Products."""
        if type(norm) is not Norm:
            return Residual(x, norm)
        x = x.contiguous()
        return Residual(x, norm, prepared(x, self._rows(*x.shape), norm.weight, norm.eps))

    def read(self, stream: Residual, linear: nn.Module, out_dtype: torch.dtype) -> Tensor:
        """See Products."""
        if stream.fused is None or not self._reads(linear):
            return COMPOSED.read(stream, linear, out_dtype)
        assert out_dtype == torch.float32, out_dtype
        return multiply(stream.fused, linear.weight, linear.bias)

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """See Products."""
        if stream.fused is None or not self._reads(linear):
            return COMPOSED.read_heads(stream, linear, turn, place)
        weight, bias, (q_norm, k_norm, eps) = linear.weight, linear.bias, turn.norms
        rows, (_, n_stored, d), n_q = stream.fused, place.memory.shape, turn.n_heads
        assert rows.width == weight.width, (rows.width, weight.width)
        heads = torch.empty(rows.n_rows, n_q + n_stored, d)
        self._library.read_heads(
            n_threads(), weight.address, rows.at, rows.scales_at, rows.n_rows, at(bias), n_q, n_stored // 2, d,
            at(q_norm), at(k_norm), eps, at(turn.cos), at(turn.sin), at(place.memory), at(place.kv_index),
            heads.data_ptr(),
        )  # fmt: skip
        return heads.narrow(1, 0, n_q)

    def read_gated(self, stream: Residual, linear: nn.Module) -> Tensor:
        """See Products."""
        if stream.fused is None or not self._reads(linear):
            return COMPOSED.read_gated(stream, linear)
        rows, weight, bias = stream.fused, linear.weight, linear.bias
        assert rows.width == weight.width, (rows.width, weight.width)
        gated = torch.empty(rows.n_rows, weight.n_out // 2)
        self._library.read_gated(
            n_threads(), weight.address, rows.at, rows.scales_at, rows.n_rows, at(bias), gated.data_ptr()
        )  # fmt: skip
        return gated

    def write(self, stream: Residual, y: Tensor, linear: nn.Module, norm: nn.Module) -> Residual:
        """See Products."""
        if type(norm) is not Norm or not self._reads(linear):
            return self.begin(added(stream.x, y, linear), norm)
        weight, bias = linear.weight, linear.bias
        (n_rows, n_in), n_out, y = y.shape, weight.n_out, y.contiguous()
        assert wide(n_in) == weight.width, (n_in, weight.width)
        x, rows = torch.empty(n_rows, n_out), self._rows(n_rows, n_out)
        self._library.write_rows(
            n_threads(), weight.address, at(y), n_rows, at(bias), at(stream.x), at(norm.weight), norm.eps, mixed(n_out),
            rows.width, x.data_ptr(), rows.at, rows.scales_at,
        )  # fmt: skip
        return Residual(x, norm, rows)

    def _reads(self, linear: nn.Module) -> TypeGuard["_Fusible"]:
        """Whether this is a plain Linear with a weight of this kind."""
        return type(linear) is Linear and type(linear.weight) is self._kind


class Int8Weight:
    """An int8 matrix with one scale per output."""

    packs_head = True

    def __init__(self, weight: Tensor) -> None:  # [out, in]
        self._allocate(*weight.shape)
        self.fill(0, weight)

    @classmethod
    def empty(cls, n_out: int, n_in: int, device: torch.device = CPU) -> "Int8Weight":
        """See Packed."""
        made = cls.__new__(cls)
        made._allocate(n_out, n_in)
        return made

    def _allocate(self, n_out: int, n_in: int) -> None:
        self.n_out, self.width = n_out, wide(n_in)
        together = int8_format().together
        self.steps = panels(n_out, self.width // together, together, dtype=torch.int8)
        self.scales = torch.empty(n_out)
        self._offsets = torch.zeros(len(self.steps) * PANEL, dtype=torch.int32)
        self.n_params, self.n_bytes = n_out * n_in, self.steps.numel() + 4 * n_out
        self._matrix = Matrix(
            at(self.steps), at(self.scales), at(self._offsets), n_in, self.width, mixed(n_in), n_out
        )  # fmt: skip
        self.address = ctypes.addressof(self._matrix)

    def fill(self, first: int, rows: Found) -> None:
        """See Packed."""
        unpack(rows, matrix=self.address, first=first)

    @staticmethod
    def decode(found: Found, place: Tensor) -> None:
        """See Packed."""
        decode(found, place)

    @staticmethod
    def rows(n_rows: int, n: int) -> Rows:
        """See CPUWeight."""
        return Rows(n_rows, n, has_scales=True)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See Packed."""
        return multiply(prepared(x.contiguous(), self.rows(*x.shape)), self, bias)


class Float32Weight:
    """A float32 matrix."""

    packs_head = True

    def __init__(self, weight: Tensor) -> None:  # [out, in]
        self._allocate(*weight.shape)
        self.fill(0, weight)

    @classmethod
    def empty(cls, n_out: int, n_in: int, device: torch.device = CPU) -> "Float32Weight":
        """See Packed."""
        made = cls.__new__(cls)
        made._allocate(n_out, n_in)
        return made

    def _allocate(self, n_out: int, n_in: int) -> None:
        self.n_out, self.width = n_out, wide(n_in)
        self.values = panels(n_out, self.width, 1, dtype=torch.float32)  # [panel, width, PANEL, 1]
        self.n_params, self.n_bytes = n_out * n_in, 4 * self.values.numel()
        self._matrix = Matrix(at(self.values), None, None, n_in, self.width, 1, n_out)
        self.address = ctypes.addressof(self._matrix)

    def fill(self, first: int, rows: Found) -> None:
        """See Packed."""
        unpack(rows, matrix=self.address, first=first)

    @staticmethod
    def decode(found: Found, place: Tensor) -> None:
        """See Packed."""
        decode(found, place)

    @staticmethod
    def rows(n_rows: int, n: int) -> Rows:
        """See CPUWeight."""
        return Rows(n_rows, n, has_scales=False)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See Packed."""
        return multiply(prepared(x.contiguous(), self.rows(*x.shape)), self, bias)


def decode(found: Found, place: Tensor) -> None:
    """Copy a tensor of a checkpoint to a plain float32 one."""
    if not isinstance(found, Tensor) and len(found.shape) == 2 and place.is_contiguous():
        unpack(found, y=place)
    else:
        place.copy_(decoded(found, place.device))


def unpack(found: Found, y: Tensor | None = None, matrix: int | None = None, first: int = 0) -> None:
    """Decode a matrix [n, in] of a checkpoint into y, or pack it as the outputs of a Matrix from `first` on."""
    if isinstance(found, Scaled):
        _unpack_scaled(found, y, matrix, first)
        return
    if isinstance(found, Stored):
        raw, kind, n_heads = found.raw, int(found.info.kind), found.n_heads
    else:
        raw = found.contiguous() if found.dtype in GGML_TYPES else found.float().contiguous()
        kind, n_heads = GGML_TYPES[raw.dtype], 0
    done = library().unpack(n_threads(), kind, at(raw), *found.shape, n_heads, at(y), matrix, first)
    if not done:
        assert isinstance(found, Stored), kind
        unpack(found.decoded(), y, matrix, first)


def _unpack_scaled(found: Scaled, y: Tensor | None, matrix: int | None, first: int) -> None:
    steps, scales = found.steps.contiguous(), found.scales.contiguous()
    assert steps.dtype in (torch.int8, torch.float8_e4m3fn), steps.dtype
    library().unpack_scaled(
        n_threads(), steps.dtype != torch.int8, at(steps), *steps.shape, at(scales), scales.shape[1], *found.block,
        *found.first, at(y), matrix, first,
    )  # fmt: skip


def prepared(x: Tensor, rows: Rows, norm: Tensor | None = None, eps: float = 0.0) -> Rows:
    """Fill rows with x [T, n] float32, after an optional RMSNorm [n]."""
    n_rows, n = x.shape
    library().prepare_rows(
        n_threads(), at(x), n_rows, n, mixed(n), at(norm), eps, rows.width, rows.at, rows.scales_at
    )  # fmt: skip
    return rows


def multiply(rows: Rows, weight: CPUWeight, bias: Tensor | None) -> Tensor:
    """rows @ W + bias: [T, out]."""
    assert rows.width == weight.width, (rows.width, weight.width)
    y = torch.empty(rows.n_rows, weight.n_out)
    library().read_rows(
        n_threads(), weight.address, rows.at, rows.scales_at, rows.n_rows, at(bias), None, at(y)
    )  # fmt: skip
    return y


def panels(n_out: int, n: int, together: int, dtype: torch.dtype) -> Tensor:  # [panel, n, PANEL, together]
    """An empty matrix as panels of outputs, the last one padded with zeros."""
    made = torch.empty(-(-n_out // PANEL), n, PANEL, together, dtype=dtype)
    made[n_out // PANEL :].zero_()
    return made


def wide(n: int) -> int:
    """A row's width: n rounded up to a multiple of UNIT.

    >>> wide(576), wide(99)
    (576, 128)
    """
    return -(-n // UNIT) * UNIT


def mixed(n: int) -> int:
    """The Hadamard block size for n inputs: a power of 2 that divides n.

    >>> mixed(576), mixed(4096), mixed(99)
    (64, 128, 1)
    """
    return math.gcd(n, MOST_MIXED)
