"""RMSNorm."""

import torch.nn.functional as F
from torch import Tensor

from saguaro.model.block import Block


class Norm(Block):
    """RMSNorm over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, name: str = "") -> None:
        """weight: [n]; name: that of the norm in a checkpoint."""
        super().__init__()
        self.weight, self.eps, self._name = weight, eps, name

    def forward(self, x: Tensor) -> Tensor:  # [..., n]
        """x / rms(x) * weight."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    def places(self) -> dict[str, Tensor]:
        """See Linear.places."""
        return {f"{self._name}.weight": self.weight.data}
