"""A matrix product: its weight in some format, its optional bias, and the tensors of a checkpoint that fill it.

A weight has shape [in, out] and is applied as x @ W. Its memory order depends on the device (Layout.matrix): row-major
on a CPU, where a product of few rows then reads the weight at full bandwidth (bench/linear.py); column-major on a GPU,
as in the checkpoints. A packed weight is an object that computes its own product; see saguaro.kernels.formats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn

from saguaro.model.split import Cut
from saguaro.model.stored import Found


class Packed(Protocol):
    """A weight [out, in] in a format of its own."""

    n_params: int
    n_bytes: int
    packs_head: bool  # whether the head is packed too; if not it is plain

    def __init__(self, weight: Tensor) -> None:
        """Pack a tensor [out, in]."""

    @classmethod
    def empty(cls, n_out: int, n_in: int, device: torch.device) -> "Packed":
        """A weight that `fill` fills."""

    @staticmethod
    def decode(found: Found, place: Tensor) -> None:
        """Copy a tensor of a checkpoint to a plain one beside such weights."""

    def fill(self, first: int, rows: Found) -> None:
        """Pack a matrix [n, in] of a checkpoint as the outputs from `first` on."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ W + bias: [T, in] -> [T, out]."""


@dataclass(frozen=True)
class PackedPart:
    """The outputs of a packed weight that one matrix of a checkpoint fills."""

    weight: Packed
    first: int
    n: int

    def fill(self, found: Found) -> None:  # [n, in]
        """Pack the matrix."""
        assert found.shape[0] == self.n, (found.shape, self.n)
        self.weight.fill(self.first, found)


class Linear(nn.Module):
    """x @ W + bias. Matrices of a checkpoint that read the same input lie beside one another in W."""

    def __init__(
        self, weight: Tensor | Packed, bias: Tensor | None = None, parts: Mapping[str, int | Cut] | None = None
    ) -> None:
        """weight: [in, out]; parts: the outputs of each matrix of the checkpoint, by name, in order: how many, or which
        of them."""
        super().__init__()
        self.weight, self.bias = weight, bias
        parts = parts or {}
        self._parts = {name: part.n if isinstance(part, Cut) else part for name, part in parts.items()}
        self._cuts = {name: part for name, part in parts.items() if isinstance(part, Cut)}

    @property
    def matrix(self) -> Tensor:  # [in, out]
        """The weight of a Linear that is not packed."""
        assert isinstance(self.weight, Tensor), type(self.weight)
        return self.weight

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        """x @ W + bias."""
        if not isinstance(self.weight, Tensor):
            return self.weight.multiply(x, self.bias)
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:  # [T, out], [T, in] -> [T, out]
        """x + y @ W + bias, rounded once if the weight is plain."""
        if not isinstance(self.weight, Tensor):
            return x + self.forward(y)
        return torch.addmm(x if self.bias is None else x + self.bias, y, self.weight)

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name -> the [out, in] (or [out]) view that the tensor fills; not of a packed weight."""
        names, widths = list(self._parts), list(self._parts.values())
        views = {}
        if isinstance(self.weight, Tensor):
            views = {f"{name}.weight": one for name, one in zip(names, self.matrix.data.t().split(widths), strict=True)}
        if self.bias is not None:
            views |= {f"{name}.bias": one for name, one in zip(names, self.bias.data.split(widths), strict=True)}
        return views

    def cuts(self) -> dict[str, Cut]:
        """Checkpoint name -> the part of the tensor that is held here; of tensors that are divided among ranks."""
        kinds = ("weight",) if self.bias is None else ("weight", "bias")
        return {f"{name}.{kind}": cut for name, cut in self._cuts.items() for kind in kinds}

    def packed_parts(self) -> dict[str, PackedPart]:
        """Checkpoint name -> the part of a packed weight that the matrix fills."""
        if isinstance(self.weight, Tensor):
            return {}
        firsts = accumulate(self._parts.values(), initial=0)
        named = zip(self._parts.items(), firsts, strict=False)
        return {f"{name}.weight": PackedPart(self.weight, first, n) for (name, n), first in named}

    def pack(self, kind: type[Packed]) -> None:
        """Replace the plain weight by kind(weight [out, in])."""
        plain = self.matrix.data.t().contiguous()
        del self.weight
        self.weight = kind(plain)
