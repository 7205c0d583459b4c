"""Pack a model's weights: replace plain tensors by the form that its products read."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from saguaro.model.transformer import Layer, Products, Transformer
from saguaro.types import Progress

MATRICES = ("qkv", "out", "gate_up", "down")  # of a layer


class Packed(Protocol):
    """A packed matrix."""

    n_params: int
    n_bytes: int


def pack_(
    model: Transformer,
    kind: Callable[[Tensor], Packed],
    products: Products,
    dtype: torch.dtype,
    progress: Progress = lambda *_: None,
) -> None:
    """Pack the matrices of a model in place, one at a time: kind(weight [out, in])."""
    if model.is_tied:
        model.embedding = nn.Parameter(model.head.t().contiguous(), requires_grad=False)
    n_layers = len(model.layers)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        progress("packing weights", index, n_layers + 1)
        for name in MATRICES:
            _replace(layer, name, kind)
    progress("packing weights", n_layers, n_layers + 1)
    _replace(model, "head", kind)
    progress("packing weights", n_layers + 1, n_layers + 1)
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
