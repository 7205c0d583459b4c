"""A model's weights as the products that read them like them best, in place of plain tensors.

In float32 on a CPU that is oneDNN's own order. What a row gives then does not depend, to the bit, on how many rows are
computed with it, so that verifying K + 1 tokens is decoding them one by one. torch's own product (transformer.TORCH)
promises no such thing, and its cost grows with the rows (bench/linear.py).
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from saguaro.model.transformer import Layer, Products, Stream, TorchProducts, Transformer, Weight

MATRICES = ("qkv", "out", "gate_up", "down")  # of a layer


class Packed(Protocol):
    """A matrix that was packed."""

    n_params: int
    n_bytes: int


class Float32Weight:
    """A matrix in oneDNN's order."""

    def __init__(self, weight: Tensor) -> None:  # [out, in]
        self.n_params, self.n_bytes = weight.numel(), weight.numel() * weight.element_size()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:  # [T, in] -> [T, out]
        """x @ W + bias."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return y


class Float32Products(TorchProducts):
    """Over such weights."""

    def write(self, stream: Stream, y: Tensor, weight: Weight, bias: Tensor | None, norm: Tensor, eps: float) -> Stream:
        """See Products."""
        return self.begin(self.product(y, weight, bias).add_(stream.x), norm, eps)

    def product(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x @ W + bias."""
        packed: Float32Weight = weight
        return packed(x, bias)


def pack_(model: Transformer, kind: Callable[[Tensor], Packed], products: Products, dtype: torch.dtype) -> None:
    """Pack the matrices of a model, one after the other: each is made of a tensor [out, in]."""
    if model.is_tied:
        model.embedding = nn.Parameter(model.head.t().contiguous(), requires_grad=False)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for name in MATRICES:
            _replace(layer, name, kind)
    _replace(model, "head", kind)
    model.products, model.weight_dtype, model.is_packed = products, dtype, True


def packed_in(model: Transformer) -> list[Packed]:
    """The packed weights of a model."""
    if not model.is_packed:
        return []
    return [*(getattr(layer, name) for layer in model.layers for name in MATRICES), model.head]


def _replace(module: nn.Module, name: str, kind: Callable[[Tensor], Packed]) -> None:
    weight = module.get_parameter(name).data.t().contiguous()  # [out, in]
    delattr(module, name)
    setattr(module, name, kind(weight))
