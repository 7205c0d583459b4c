"""Llama, Mistral, Qwen2 and Qwen3 as one module. It knows tokens and positions; of requests and pages it knows nothing.

A step is flat: T tokens of any number of sequences. What a token may see is the attention's business, which the
caller passes in. Weights are held as [in, out] and applied as x @ W; how that matrix lies in memory is chosen for the
device (`matrix`): row-major on a CPU, where a product of few rows then reads it at full bandwidth (bench/linear.py),
column-major on a GPU, as the checkpoints have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saguaro.model.spec import ModelSpec


@dataclass(frozen=True)
class Turn:
    """How a layer's projected heads become queries, keys and values: norms of their own, then rotation by position."""

    n_heads: int  # H
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    eps: float
    cos: Tensor  # [T, 1, d]
    sin: Tensor  # [T, 1, d]: negative on the first half, see rotate_

    def __call__(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """heads [T, H + 2 * H_kv, d], changed in place -> q [T, H, d], and keys, then values [T, 2 * H_kv, d]."""
        n_q = self.n_heads
        n_qk = (heads.shape[1] + n_q) // 2
        if self.q_norm is not None and self.k_norm is not None:
            heads[:, :n_q] = F.rms_norm(heads[:, :n_q], heads.shape[-1:], self.q_norm, self.eps)
            heads[:, n_q:n_qk] = F.rms_norm(heads[:, n_q:n_qk], heads.shape[-1:], self.k_norm, self.eps)
        rotate_(heads[:, :n_qk], self.cos, self.sin)
        return heads[:, :n_q], heads[:, n_q:]


class Attention(Protocol):
    """Attends the step's queries to everything they may see, the step's own keys included."""

    def run(self, layer: int, heads: Tensor, turn: Turn) -> Tensor:
        """Projected heads [T, H + 2 * H_kv, d] (queries, keys, values), to be turned -> [T, H * d]."""


class Products(Protocol):
    """The matrix products of a layer, with what stands before and after each."""

    def normed_product(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """norm(x) @ W + bias: [T, in] -> [T, out]."""

    def gated_product(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up, where (gate, up) = norm(x) @ W + bias: [T, in] -> [T, out / 2]."""

    def add_product(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x + y @ W + bias: [T, out], [T, in] -> [T, out]."""


class TorchProducts:
    """By torch, on any device."""

    def normed_product(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """See Products."""
        x = F.rms_norm(x, x.shape[-1:], norm, eps)
        return (torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)).to(out_dtype)

    def gated_product(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Products."""
        gate, up = self.normed_product(x, norm, eps, weight, bias, x.dtype).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def add_product(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See Products."""
        return torch.addmm(x if bias is None else x + bias, y, weight)


TORCH = TorchProducts()


def matrix(n_in: int, n_out: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An empty [in, out] weight in the memory order that suits the device."""
    if device.type == "cpu":
        empty = torch.empty(n_in, n_out, device=device, dtype=dtype)
    else:
        empty = torch.empty(n_out, n_in, device=device, dtype=dtype).t()
    return nn.Parameter(empty, requires_grad=False)


def vector(n: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An empty [n] weight."""
    return nn.Parameter(torch.empty(n, device=device, dtype=dtype), requires_grad=False)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [T, h, d] in place, [T, 1, d], [T, 1, d]
    """Rotary position embedding; the second half of a head is the other coordinate of the first."""
    turned = x.roll(x.shape[-1] // 2, -1)  # the minus sign lives in sin
    x.mul_(cos).addcmul_(turned, sin)


class Layer(nn.Module):
    """One transformer block: attention and gated MLP, each behind a norm and added to the stream."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim, self.eps = spec.head_dim, spec.norm_eps
        n_q, n_kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        self.norm1 = vector(spec.hidden, device, dtype)
        self.qkv = matrix(spec.hidden, n_q + 2 * n_kv, device, dtype)
        self.qkv_bias = vector(n_q + 2 * n_kv, device, dtype) if spec.has_qkv_bias else None
        self.q_norm = vector(spec.head_dim, device, dtype) if spec.has_qk_norm else None
        self.k_norm = vector(spec.head_dim, device, dtype) if spec.has_qk_norm else None
        self.out = matrix(n_q, spec.hidden, device, dtype)
        self.out_bias = vector(spec.hidden, device, dtype) if spec.has_output_bias else None
        self.norm2 = vector(spec.hidden, device, dtype)
        self.gate_up = matrix(spec.hidden, 2 * spec.intermediate, device, dtype)
        self.gate_up_bias = vector(2 * spec.intermediate, device, dtype) if spec.has_mlp_bias else None
        self.down = matrix(spec.intermediate, spec.hidden, device, dtype)
        self.down_bias = vector(spec.hidden, device, dtype) if spec.has_mlp_bias else None

    def forward(self, index: int, x: Tensor, turn: Turn, attention: Attention, by: Products) -> Tensor:
        """x [T, D] -> [T, D]."""
        turn = replace(turn, q_norm=self.q_norm, k_norm=self.k_norm)
        heads = by.normed_product(x, self.norm1, self.eps, self.qkv, self.qkv_bias, x.dtype)
        attended = attention.run(index, heads.view(len(x), -1, self.head_dim), turn)
        x = by.add_product(x, attended, self.out, self.out_bias)
        gated = by.gated_product(x, self.norm2, self.eps, self.gate_up, self.gate_up_bias)
        return by.add_product(x, gated, self.down, self.down_bias)


class Transformer(nn.Module):
    """A decoder-only language model. Its weights are empty until saguaro.model.weights fills them."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        token_map: Tensor | None = None,  # [head rows] int64: the token of each row of a reduced head
    ) -> None:
        super().__init__()
        self.spec, self.device, self.dtype = spec, device, dtype
        self.token_map = None if token_map is None else token_map.to(device)
        n_head = spec.n_vocab if token_map is None else len(token_map)
        self.head = matrix(spec.hidden, n_head, device, dtype)
        self.embedding: Tensor = self.head.t()  # [V, D]: a view when tied
        self.is_tied = spec.is_tied and token_map is None
        if not self.is_tied:
            self.embedding = nn.Parameter(
                torch.empty(spec.n_vocab, spec.hidden, device=device, dtype=dtype), requires_grad=False
            )
        self.layers = nn.ModuleList(Layer(spec, device, dtype) for _ in range(spec.n_layers))
        self.norm = vector(spec.hidden, device, dtype)
        self.frequencies = spec.rope.frequencies(spec.head_dim).to(device)  # [d / 2]

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, by: Products = TORCH) -> Tensor:
        """tokens [T] int64, positions [T] int64 -> hidden states [T, D], before the last norm."""
        x = self.embedding.index_select(0, tokens)
        turn = Turn(self.spec.n_heads, None, None, self.spec.norm_eps, *self._angles(positions))
        for index, layer in enumerate(self.layers):
            x = layer(index, x, turn, attention, by)
        return x

    def logits(self, hidden: Tensor, by: Products = TORCH) -> Tensor:  # [L, D] -> [L, V] float32
        """What the model says next, after each of these hidden states; -inf for tokens a reduced head does not have."""
        said = by.normed_product(hidden, self.norm, self.spec.norm_eps, self.head, None, torch.float32)
        if self.token_map is None:
            return said
        return said.new_full((len(said), self.spec.n_vocab), float("-inf")).index_copy_(1, self.token_map, said)

    def without(self, dropped: Sequence[int]) -> "Transformer":
        """The same model without some layers; every weight is shared."""
        twin = Transformer.__new__(Transformer)
        nn.Module.__init__(twin)
        kept = [layer for index, layer in enumerate(self.layers) if index not in dropped]
        twin.spec, twin.device, twin.dtype = replace(self.spec, n_layers=len(kept)), self.device, self.dtype
        twin.token_map, twin.head, twin.embedding = self.token_map, self.head, self.embedding
        twin.is_tied = self.is_tied
        twin.layers, twin.norm, twin.frequencies = nn.ModuleList(kept), self.norm, self.frequencies
        return twin

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin [T, 1, d]; sin is negative on the first half (see rotate_)."""
        angle = positions[:, None].float() * self.frequencies  # [T, d / 2]
        cos, sin = angle.cos(), angle.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.dtype),
        )
