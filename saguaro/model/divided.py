"""Products that write the residual stream, divided among ranks. Both give every rank the whole result.

               input          weight of a rank      exchanged                        result
SummedLinear   own units      rows of own inputs    the product, [T, out]            sum in the order of the ranks
JoinedLinear   joined first   own outputs           the input and the own outputs    that of one process, to the bit
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from saguaro.model.linear import Linear, Packed
from saguaro.model.split import Cut, Split


class SummedLinear(Linear):
    """Each rank multiplies its own inputs; the products are added. For plain weights: one exchange."""

    def __init__(self, split: Split, weight: Tensor, bias: Tensor | None, name: str, inputs: Cut) -> None:
        """weight: [own inputs, out]; bias: [out], the same on every rank."""
        n_out = weight.shape[1]
        super().__init__(weight, bias, {name: n_out})
        self._split = split
        self._own_cuts = {f"{name}.weight": inputs._replace(dim=1)}

    def cuts(self) -> dict[str, Cut]:
        """See Linear."""
        return self._own_cuts

    def forward(self, x: Tensor) -> Tensor:  # [T, own in] -> [T, out]
        """The whole product, plus the bias."""
        y = self._split.sum(torch.mm(x, self.matrix))
        return y if self.bias is None else y + self.bias

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:  # [T, out], [T, own in] -> [T, out]
        """See Linear."""
        return x + self.forward(y)


class JoinedLinear(Linear):
    """Each rank computes its own outputs of the whole input. For packed weights: the sums are those of one process."""

    def __init__(
        self,
        split: Split,
        weight: Tensor | Packed,
        bias: Tensor | None,
        parts: Mapping[str, Cut],
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        """weight: [in, own out]; inputs, outputs: how many of them each rank has."""
        super().__init__(weight, bias, parts)
        self._split, self._inputs, self._outputs = split, inputs, outputs

    def forward(self, x: Tensor) -> Tensor:  # [T, own in] -> [T, out]
        """The whole product, plus the bias."""
        return self._split.join(super().forward(self._split.join(x, self._inputs)), self._outputs)

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:  # [T, out], [T, own in] -> [T, out]
        """See Linear."""
        return x + self.forward(y)
