"""The attention block: projections, norms of queries and keys, rope and the output projection around attention itself.

The caller passes in attention, which decides what a token may see.
"""

from typing import Protocol

from torch import Tensor, nn

from saguaro.model.block import Block
from saguaro.model.layout import Layout
from saguaro.model.products import KVWrite, Products, QKNormRope, Residual
from saguaro.model.spec import ModelSpec
from saguaro.model.split import heads_of


class Attends(Protocol):
    """Attention of a step's queries to all keys that they may see, the step's own included."""

    def place(self, layer: int) -> KVWrite:
        """Where the step's keys and values are written."""

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [T, H, d] -> [T, H * d]; called after the step's keys and values were written."""


class Attention(Block):
    """The attention block of one layer."""

    def __init__(self, spec: ModelSpec, layout: Layout, n_in: int | None = None) -> None:
        """n_in: inputs of the projections; None: the hidden size."""
        super().__init__()
        d, heads = spec.head_dim, heads_of(spec, layout.split)
        self.n_heads = heads.q.n
        q, kv = heads.q.times(d), heads.kv.times(d)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        self.qkv = layout.linear(n_in or spec.hidden, parts, spec.has_qkv_bias)
        inputs = [n * d for n in heads.every]
        self.out = layout.writer(inputs, "self_attn.o_proj", spec.hidden, spec.has_output_bias)
        self.q_norm = self.k_norm = None
        if spec.has_qk_norm:
            self.q_norm = layout.norm(d, spec.norm_eps, "self_attn.q_norm")
            self.k_norm = layout.norm(d, spec.norm_eps, "self_attn.k_norm")

    def forward(
        self,
        index: int,
        stream: Residual,
        rope: tuple[Tensor, Tensor],
        attends: Attends,
        by: Products,
        norm: nn.Module,
        read: Residual | None = None,
    ) -> Residual:
        """The residual stream after this block of layer `index`; rope: cos and sin [T, 1, d]; norm: the next one;
        read: what is projected, if it is not the stream."""
        turn = QKNormRope(self.n_heads, self.q_norm, self.k_norm, *rope)
        q = by.read_heads(stream if read is None else read, self.qkv, turn, attends.place(index))
        return by.write(stream, attends.run(index, q), self.out, norm)
