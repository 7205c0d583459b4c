"""Allocation of empty weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from saguaro.model.linear import Linear, Packed
from saguaro.model.norm import Norm


@dataclass(frozen=True)
class Layout:
    """Where empty weights are allocated, and in which memory order."""

    device: torch.device
    dtype: torch.dtype
    kind: type[Packed] | None = None  # of matrices; None: plain tensors

    def linear(self, n_in: int, parts: Mapping[str, int], has_bias: bool = False) -> Linear:
        """A Linear for these matrices of a checkpoint: their outputs by name."""
        n_out = sum(parts.values())
        weight = self.matrix(n_in, n_out) if self.kind is None else self.kind.empty(n_out, n_in)
        return Linear(weight, self.vector(n_out) if has_bias else None, parts)

    def norm(self, n: int, eps: float, name: str) -> Norm:
        """A Norm with this name in a checkpoint."""
        return Norm(self.vector(n), eps, name)

    def matrix(self, n_in: int, n_out: int) -> nn.Parameter:
        """An empty [in, out] weight in the memory order of the device."""
        if self.device.type == "cpu":
            empty = torch.empty(n_in, n_out, device=self.device, dtype=self.dtype)
        else:
            empty = torch.empty(n_out, n_in, device=self.device, dtype=self.dtype).t()
        return nn.Parameter(empty, requires_grad=False)

    def vector(self, n: int) -> nn.Parameter:
        """An empty [n] weight."""
        return nn.Parameter(torch.empty(n, device=self.device, dtype=self.dtype), requires_grad=False)
