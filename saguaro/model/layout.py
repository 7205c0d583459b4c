"""Allocation of empty weights, whole or one rank's part of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from saguaro.model.divided import JoinedLinear, SummedLinear
from saguaro.model.linear import Linear, Packed
from saguaro.model.norm import Norm
from saguaro.model.split import ALONE, Cut, Split, shares


@dataclass(frozen=True)
class Layout:
    """Where empty weights are allocated, and in which memory order."""

    device: torch.device
    dtype: torch.dtype
    kind: type[Packed] | None = None  # of matrices; None: plain tensors
    split: Split = ALONE

    def linear(self, n_in: int, parts: Mapping[str, int | Cut], has_bias: bool = False) -> Linear:
        """A Linear for these matrices of a checkpoint: their outputs by name, all or a rank's."""
        n_out = sum(part.n if isinstance(part, Cut) else part for part in parts.values())
        return Linear(self.weight(n_in, n_out), self.vector(n_out) if has_bias else None, parts)

    def writer(self, inputs: Sequence[int], name: str, n_out: int, has_bias: bool = False) -> Linear:
        """A Linear that writes the residual stream; inputs: how many of them each rank has computed."""
        if self.split.size == 1:
            return self.linear(inputs[0], {name: n_out}, has_bias)
        rank = self.split.rank
        if self.kind is None:
            first = sum(inputs[:rank])
            bias = self.vector(n_out) if has_bias else None
            weight = self.matrix(inputs[rank], n_out)
            return SummedLinear(self.split, weight, bias, name, Cut(first, first + inputs[rank]))
        every = shares(n_out, self.split.size)
        part, bias = every[rank], self.vector(every[rank].n) if has_bias else None
        outputs = [cut.n for cut in every]
        return JoinedLinear(self.split, self.weight(sum(inputs), part.n), bias, {name: part}, inputs, outputs)

    def weight(self, n_in: int, n_out: int) -> nn.Parameter | Packed:
        """An empty [in, out] weight, packed if there is a packed form."""
        return self.matrix(n_in, n_out) if self.kind is None else self.kind.empty(n_out, n_in, self.device)

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
