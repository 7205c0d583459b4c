"""Llama, Mistral, Qwen2 and Qwen3 as one module. It computes on tokens and positions, without requests or pages.

A step is flat: T tokens of any number of sequences. The caller passes in the attention, which decides what a token may
see. Weights have shape [in, out] and are applied as x @ W. Their memory order depends on the device (`matrix`):
row-major on a CPU, where a product of few rows then reads the weight at full bandwidth (bench/linear.py); column-major
on a GPU, as in the checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saguaro.model.spec import ModelSpec


@dataclass(frozen=True)
class QKNormRope:
    """Per-head RMSNorm of queries and keys, where the model has it, then rope."""

    n_heads: int  # H
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    eps: float
    cos: Tensor  # [T, 1, d]
    sin: Tensor  # [T, 1, d]: negative on the first half; see apply_rope_

    def __call__(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """heads [T, H + 2 * H_kv, d], changed in place -> q [T, H, d], and keys, then values [T, 2 * H_kv, d]."""
        n_q = self.n_heads
        n_qk = (heads.shape[1] + n_q) // 2
        if self.q_norm is not None and self.k_norm is not None:
            heads[:, :n_q] = F.rms_norm(heads[:, :n_q], heads.shape[-1:], self.q_norm, self.eps)
            heads[:, n_q:n_qk] = F.rms_norm(heads[:, n_q:n_qk], heads.shape[-1:], self.k_norm, self.eps)
        apply_rope_(heads[:, :n_qk], self.cos, self.sin)
        return heads[:, :n_q], heads[:, n_q:]


@dataclass(frozen=True)
class KVWrite:
    """Where a step's keys and values are written."""

    memory: Tensor  # [tokens, 2 * H_kv, d]: a token's keys, then its values
    kv_index: Tensor  # [T] int64


class Attention(Protocol):
    """Attention of a step's queries to all keys that they may see, the step's own included."""

    def place(self, layer: int) -> KVWrite:
        """Where the step's keys and values are written."""

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [T, H, d] -> [T, H * d]; called after the step's keys and values were written."""


@dataclass(frozen=True)
class Residual:
    """The residual stream, and its normed value for the next product."""

    x: Tensor  # [T, D]
    read: Any  # norm(x), or the form of it that the Products implementation reads


Weight = Any  # a matrix [in, out]: a Tensor, or packed for the products that read it (saguaro.model.packed)


class Products(Protocol):
    """The matrix products of a model. RMSNorm is fused into the products before and after it.

    A product that writes the residual stream is given the next RMSNorm, so that it can compute the norm as well.
    """

    def begin(self, x: Tensor, norm: Tensor, eps: float) -> Residual:
        """The residual stream x [T, D], normed by `norm` [D] for its next reader."""

    def read(self, stream: Residual, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """norm(x) @ W + bias: -> [T, out]."""

    def read_heads(
        self, stream: Residual, weight: Weight, bias: Tensor | None, turn: QKNormRope, place: KVWrite
    ) -> Tensor:
        """norm(x) @ W + bias as heads, with rope. Returns queries [T, H, d]; writes keys and values to place."""

    def read_gated(self, stream: Residual, weight: Weight, bias: Tensor | None) -> Tensor:
        """silu(gate) * up, where (gate, up) = norm(x) @ W + bias: -> [T, out / 2]."""

    def write(
        self, stream: Residual, y: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, eps: float
    ) -> Residual:
        """The residual stream x + y @ W + bias, y [T, in], normed by `norm` for its next reader."""


class TorchProducts:
    """Products in plain torch, for any device."""

    def begin(self, x: Tensor, norm: Tensor, eps: float) -> Residual:
        """See Products."""
        return Residual(x, F.rms_norm(x, x.shape[-1:], norm, eps))

    def read(self, stream: Residual, weight: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """See Products."""
        return self.product(stream.read, weight, bias).to(out_dtype)

    def read_heads(
        self, stream: Residual, weight: Weight, bias: Tensor | None, turn: QKNormRope, place: KVWrite
    ) -> Tensor:
        """See Products."""
        heads = self.read(stream, weight, bias, stream.x.dtype).view(len(stream.x), -1, place.memory.shape[2])
        q, kv = turn(heads)
        place.memory.index_copy_(0, place.kv_index, kv)
        return q

    def read_gated(self, stream: Residual, weight: Weight, bias: Tensor | None) -> Tensor:
        """See Products."""
        gate, up = self.read(stream, weight, bias, stream.x.dtype).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def write(
        self, stream: Residual, y: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, eps: float
    ) -> Residual:
        """See Products."""
        x = stream.x
        return self.begin(torch.addmm(x if bias is None else x + bias, y, weight), norm, eps)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:  # [T, in] -> [T, out]
        """x @ W + bias."""
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


TORCH = TorchProducts()


def matrix(n_in: int, n_out: int, device: torch.device, dtype: torch.dtype, by_rows: bool = False) -> nn.Parameter:
    """An empty [in, out] weight in the memory order of the device, or with by_rows in that of the checkpoints."""
    if device.type == "cpu" and not by_rows:
        empty = torch.empty(n_in, n_out, device=device, dtype=dtype)
    else:
        empty = torch.empty(n_out, n_in, device=device, dtype=dtype).t()
    return nn.Parameter(empty, requires_grad=False)


def vector(n: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An empty [n] weight."""
    return nn.Parameter(torch.empty(n, device=device, dtype=dtype), requires_grad=False)


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [T, h, d] in place, [T, 1, d], [T, 1, d]
    """Rotary position embedding; element i of a head is rotated together with element i + d / 2."""
    turned = x.roll(x.shape[-1] // 2, -1)  # the minus sign is in sin
    x.mul_(cos).addcmul_(turned, sin)


class Layer(nn.Module):
    """One transformer block: attention and gated MLP, each with a pre-norm and a residual connection."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, by_rows: bool = False) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        n_q, n_kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        self.norm1 = vector(spec.hidden, device, dtype)
        self.qkv = matrix(spec.hidden, n_q + 2 * n_kv, device, dtype, by_rows)
        self.qkv_bias = vector(n_q + 2 * n_kv, device, dtype) if spec.has_qkv_bias else None
        self.q_norm = vector(spec.head_dim, device, dtype) if spec.has_qk_norm else None
        self.k_norm = vector(spec.head_dim, device, dtype) if spec.has_qk_norm else None
        self.out = matrix(n_q, spec.hidden, device, dtype, by_rows)
        self.out_bias = vector(spec.hidden, device, dtype) if spec.has_output_bias else None
        self.norm2 = vector(spec.hidden, device, dtype)
        self.gate_up = matrix(spec.hidden, 2 * spec.intermediate, device, dtype, by_rows)
        self.gate_up_bias = vector(2 * spec.intermediate, device, dtype) if spec.has_mlp_bias else None
        self.down = matrix(spec.intermediate, spec.hidden, device, dtype, by_rows)
        self.down_bias = vector(spec.hidden, device, dtype) if spec.has_mlp_bias else None

    def forward(
        self, index: int, stream: Residual, turn: QKNormRope, attention: Attention, by: Products, next_norm: Tensor
    ) -> Residual:
        """The residual stream after this layer; next_norm is the norm of its next reader."""
        eps = self.eps
        if self.q_norm is not None:
            turn = replace(turn, q_norm=self.q_norm, k_norm=self.k_norm)
        q = by.read_heads(stream, self.qkv, self.qkv_bias, turn, attention.place(index))
        stream = by.write(stream, attention.run(index, q), self.out, self.out_bias, self.norm2, eps)
        gated = by.read_gated(stream, self.gate_up, self.gate_up_bias)
        return by.write(stream, gated, self.down, self.down_bias, next_norm, eps)


class Transformer(nn.Module):
    """A decoder-only language model. Its weights are empty until saguaro.model.weights fills them."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        token_map: Tensor | None = None,  # [head rows] int64: the token of each row of a reduced head
        by_rows: bool = False,  # keep the checkpoint's memory order, to pack weights later (saguaro.model.packed)
    ) -> None:
        super().__init__()
        self.spec, self.device, self.dtype = spec, device, dtype
        self.products: Products = TORCH  # that read these weights
        self.weight_dtype, self.is_packed = dtype, False  # see saguaro.model.packed
        self.token_map = None if token_map is None else token_map.to(device)
        n_head = spec.n_vocab if token_map is None else len(token_map)
        self.head = matrix(spec.hidden, n_head, device, dtype, by_rows)
        self.embedding: Tensor = self.head.t()  # [V, D]: a view of the head when tied
        self.is_tied = spec.is_tied and token_map is None
        if not self.is_tied:
            self.embedding = nn.Parameter(
                torch.empty(spec.n_vocab, spec.hidden, device=device, dtype=dtype), requires_grad=False
            )
        self.layers = nn.ModuleList(Layer(spec, device, dtype, by_rows) for _ in range(spec.n_layers))
        self.norm = vector(spec.hidden, device, dtype)
        self._norms = self._read_through()
        self.frequencies = spec.rope.frequencies(spec.head_dim).to(device)  # [d / 2]
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sin of all positions, made on first use

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, by: Products | None = None) -> Tensor:
        """tokens [T] int64, positions [T] int64 -> hidden states [T, D], before the last norm."""
        by = by or self.products
        turn = QKNormRope(self.spec.n_heads, None, None, self.spec.norm_eps, *self._angles(positions))
        stream = by.begin(self.embedding.index_select(0, tokens), self._norms[0], self.spec.norm_eps)
        for index, layer in enumerate(self.layers):
            stream = layer(index, stream, turn, attention, by, self._norms[index + 1])
        return stream.x

    def logits(self, hidden: Tensor, by: Products | None = None) -> Tensor:  # [L, D] -> [L, V] float32
        """Next-token logits of these hidden states; -inf for tokens that a reduced head lacks."""
        said = self.head_logits(hidden, by)
        if self.token_map is None:
            return said
        full = said.new_full((len(said), self.spec.n_vocab), float("-inf"))
        return full.scatter_(1, self.token_map.expand(said.shape), said)  # a third of index_copy_'s time on a CPU

    def head_logits(self, hidden: Tensor, by: Products | None = None) -> Tensor:  # [L, D] -> [L, head rows] float32
        """Logits of the tokens that the head has, in the head's order."""
        by = by or self.products
        return by.read(by.begin(hidden, self.norm, self.spec.norm_eps), self.head, None, torch.float32)

    def without(self, dropped: Sequence[int]) -> "Transformer":
        """The same model without some layers; weights are shared."""
        twin = Transformer.__new__(Transformer)
        nn.Module.__init__(twin)
        kept = [layer for index, layer in enumerate(self.layers) if index not in dropped]
        twin.spec, twin.device, twin.dtype = replace(self.spec, n_layers=len(kept)), self.device, self.dtype
        twin.token_map, twin.head, twin.embedding = self.token_map, self.head, self.embedding
        twin.is_tied, twin.is_packed, twin.weight_dtype = self.is_tied, self.is_packed, self.weight_dtype
        twin.products = self.products
        twin.layers, twin.norm, twin.frequencies = nn.ModuleList(kept), self.norm, self.frequencies
        twin._norms, twin._table = twin._read_through(), None
        return twin

    def _read_through(self) -> list[Tensor]:
        """The norms applied to the residual stream: of each layer, then of the head."""
        return [*(layer.get_parameter("norm1") for layer in self.layers), self.norm]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin [T, 1, d]; on a GPU from a table, to save kernel launches."""
        if positions.device.type == "cpu":
            return self._turns(positions)
        if self._table is None:
            self._table = self._turns(torch.arange(self.spec.max_length, device=positions.device))
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, d] of positions [T]; sin is negative on the first half (see apply_rope_)."""
        angle = positions[:, None].float() * self.frequencies  # [T, d / 2]
        cos, sin = angle.cos(), angle.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.dtype),
        )
