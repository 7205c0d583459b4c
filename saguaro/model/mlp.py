"""The dense gated MLP block."""

from torch import nn

from saguaro.model.block import Block
from saguaro.model.layout import Layout
from saguaro.model.products import Products, Residual
from saguaro.model.spec import ModelSpec
from saguaro.model.split import shares


class MLP(Block):
    """down(silu(gate(x)) * up(x)), added to the residual stream."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        super().__init__()
        every, has_bias = shares(spec.intermediate, layout.split.size), spec.has_mlp_bias
        own = every[layout.split.rank]
        self.gate_up = layout.linear(spec.hidden, {"mlp.gate_proj": own, "mlp.up_proj": own}, has_bias)
        self.down = layout.writer([cut.n for cut in every], "mlp.down_proj", spec.hidden, has_bias)

    def forward(self, stream: Residual, by: Products, norm: nn.Module) -> Residual:
        """The residual stream after this block; norm: the next one."""
        return by.write(stream, by.read_gated(stream, self.gate_up), self.down, norm)
