"""The products of a layer: by composition of its modules, or fused with the norms beside them.

A layer is written once, in terms of `Products`. COMPOSED computes them from Linear and Norm modules and works with any
module [T, in] -> [T, out]. Fused implementations (saguaro.kernels.linear on a GPU, saguaro.kernels.cpu) run where a
product is a plain Linear in a format that they read, beside a plain Norm; everything else they leave to COMPOSED.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saguaro.model.linear import Linear
from saguaro.model.norm import Norm


class QKNormRope(NamedTuple):
    """Per-head RMSNorm of queries and keys, where the model has it, then rope."""

    n_heads: int  # H
    q_norm: Norm | None
    k_norm: Norm | None
    cos: Tensor  # [T, 1, d]
    sin: Tensor  # [T, 1, d]: negative on the first half; see apply_rope_

    @property
    def norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights [d] of both norms, or None, and their eps."""
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def __call__(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """heads [T, H + 2 * H_kv, d], changed in place -> q [T, H, d], and keys, then values [T, 2 * H_kv, d]."""
        n_q = self.n_heads
        n_qk = (heads.shape[1] + n_q) // 2
        if self.q_norm is not None and self.k_norm is not None:
            heads[:, :n_q] = self.q_norm(heads[:, :n_q])
            heads[:, n_q:n_qk] = self.k_norm(heads[:, n_q:n_qk])
        apply_rope_(heads[:, :n_qk], self.cos, self.sin)
        return heads[:, :n_q], heads[:, n_q:]


@dataclass(frozen=True)
class KVWrite:
    """Where a step's keys and values are written."""

    memory: Tensor  # [tokens, 2 * H_kv, d]: a token's keys, then its values
    kv_index: Tensor  # [T] int64


class Residual(NamedTuple):
    """The residual stream, and the norm of its next reader."""

    x: Tensor  # [T, D]
    norm: nn.Module
    fused: Any = None  # norm(x) in the form that a fused product reads; None: not prepared

    @property
    def normed(self) -> Tensor:  # [T, D]
        """norm(x), for any reader."""
        found: Tensor = self.norm(self.x)
        return found


class Products(Protocol):
    """The operations that a layer consists of, besides attention. `linear` is any module [T, in] -> [T, out].

    An operation that writes the residual stream is given the next norm, so that a fused product can apply it as well.
    """

    def begin(self, x: Tensor, norm: nn.Module) -> Residual:
        """The residual stream x [T, D], to be read through this norm."""

    def read(self, stream: Residual, linear: nn.Module, out_dtype: torch.dtype) -> Tensor:
        """linear(norm(x)): -> [T, out]."""

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """linear(norm(x)) as heads, with rope. Returns queries [T, H, d]; writes keys and values to place."""

    def read_gated(self, stream: Residual, linear: nn.Module) -> Tensor:
        """silu(gate) * up, where (gate, up) = linear(norm(x)): -> [T, out / 2]."""

    def write(self, stream: Residual, y: Tensor, linear: nn.Module, norm: nn.Module) -> Residual:
        """The residual stream x + linear(y), y [T, in], to be read through this norm."""


class Composed:
    """Products from their parts, in plain torch, for any device."""

    def begin(self, x: Tensor, norm: nn.Module) -> Residual:
        """See Products."""
        return Residual(x, norm)

    def read(self, stream: Residual, linear: nn.Module, out_dtype: torch.dtype) -> Tensor:
        """See Products."""
        found: Tensor = linear(stream.normed)
        return found.to(out_dtype)

    def read_heads(self, stream: Residual, linear: nn.Module, turn: QKNormRope, place: KVWrite) -> Tensor:
        """See Products."""
        heads = self.read(stream, linear, stream.x.dtype).view(len(stream.x), -1, place.memory.shape[2])
        q, kv = turn(heads)
        place.memory.index_copy_(0, place.kv_index, kv)
        return q

    def read_gated(self, stream: Residual, linear: nn.Module) -> Tensor:
        """See Products."""
        gate, up = self.read(stream, linear, stream.x.dtype).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def write(self, stream: Residual, y: Tensor, linear: nn.Module, norm: nn.Module) -> Residual:
        """See Products."""
        return self.begin(added(stream.x, y, linear), norm)


COMPOSED = Composed()


def added(x: Tensor, y: Tensor, linear: nn.Module) -> Tensor:
    """x + linear(y)."""
    found: Tensor = linear.add_to(x, y) if isinstance(linear, Linear) else x + linear(y)
    return found


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [T, h, d] in place, [T, 1, d], [T, 1, d]
    """Rotary position embedding; element i of a head is rotated together with element i + d / 2."""
    turned = x.roll(x.shape[-1] // 2, -1)  # the minus sign is in sin
    x.mul_(cos).addcmul_(turned, sin)
