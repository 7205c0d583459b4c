"""Products and attention for training a Transformer: whole texts in one pass, with gradients.

There are no in-place operations and no KV cache; the arithmetic is that of inference.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import KVWrite, QKNormRope, Residual
from saguaro.model.transformer import Taps, Transformer


class Attend(Protocol):
    """What a token sees of its text."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [B, H, L, d], k and v [B, H_kv, L, d] of a layer -> [B, H, L, d]."""


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A token sees itself and all before it. See Attend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


class Parallel:
    """Products and Attention of concatenated texts of equal length.

    Shorter texts are right-padded, so their tokens never see padding. Layers need one object per forward pass. Heads
    that are not trained may share one: it converts them once.
    """

    def __init__(self, n_texts: int, scale: float, attend: Attend = causal) -> None:
        """n_texts: B; scale: of query-key products."""
        self._n_texts, self._scale, self._attend = n_texts, scale, attend
        self._keys = self._values = torch.empty(0)  # [B * L, H_kv, d] of the current layer
        self._converted: tuple[Tensor | None, Tensor] = None, torch.empty(0)  # a matrix, and the same in another dtype

    def place(self, layer: int) -> KVWrite:
        """Unused: read_heads keeps keys and values."""
        return KVWrite(torch.empty(0), torch.empty(0, dtype=torch.int64))

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [B * L, H, d] -> [B * L, H * d]."""
        q, k, v = (one.unflatten(0, (self._n_texts, -1)).transpose(1, 2) for one in (q, self._keys, self._values))
        out = self._attend(layer, q, k, v, self._scale)  # [B, H, L, d]
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def begin(self, x: Tensor, norm: nn.Module) -> Residual:
        """See Products; x is converted to the weights' dtype, which a shared embedding may not have."""
        weight = next(norm.parameters(), None)
        return Residual(x if weight is None else x.to(weight.dtype), norm)

    def read(self, stream: Residual, linear: nn.Module, out_dtype: torch.dtype) -> Tensor:
        """See Products; the head is computed in out_dtype, since half precision cannot distinguish large logits."""
        x = stream.normed.to(out_dtype)
        if isinstance(linear, Linear) and linear.matrix.dtype != out_dtype:
            assert linear.bias is None, "only heads are read in another dtype"
            return torch.mm(x, self._in(out_dtype, linear.matrix))
        found: Tensor = linear(x)
        return found.to(out_dtype)

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """See Products."""
        heads = self.read(stream, linear, stream.x.dtype).unflatten(1, (-1, turn.cos.shape[2]))
        n_kv = (heads.shape[1] - turn.n_heads) // 2
        q, k, self._values = heads.split((turn.n_heads, n_kv, n_kv), 1)
        self._keys = _turned(k, turn.k_norm, turn)
        return _turned(q, turn.q_norm, turn)

    def read_gated(self, stream: Residual, linear: nn.Module) -> Tensor:
        """See Products."""
        gate, up = self.read(stream, linear, stream.x.dtype).chunk(2, -1)
        return F.silu(gate) * up

    def write(self, stream: Residual, y: Tensor, linear: nn.Module, norm: nn.Module) -> Residual:
        """See Products."""
        return self.begin(stream.x + linear(y), norm)

    def _in(self, dtype: torch.dtype, matrix: Tensor) -> Tensor:
        """The matrix in another dtype: one that is not trained is converted once."""
        if matrix.requires_grad:
            return matrix.to(dtype)
        if self._converted[0] is not matrix:
            self._converted = matrix, matrix.to(dtype)
        return self._converted[1]


def hidden_states(model: Transformer, tokens: Tensor, taps: Taps | None = None) -> Tensor:  # [B, L] -> [B * L, D]
    """Hidden states of all tokens, before the last norm; taps: the layers whose input is kept, of a model that is not
    trained."""
    n_texts, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(n_texts)
    by = Parallel(n_texts, model.spec.softmax_scale)
    found: Tensor = model(tokens.flatten(), positions, by, by, taps)
    return found


def _turned(heads: Tensor, norm: Norm | None, turn: QKNormRope) -> Tensor:  # [T, h, d] -> the same
    """Heads after their optional norm and rope (see saguaro.model.products.apply_rope_)."""
    if norm is not None:
        heads = norm(heads)
    return heads * turn.cos + heads.roll(heads.shape[-1] // 2, -1) * turn.sin
