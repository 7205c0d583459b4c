"""The set of kernels for one stream: Triton's on a GPU, or their plain-torch twins on any device.

Use one bundle per stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import ConfigError
from saguaro.kernels import native, native_grow
from saguaro.model.products import Products


@dataclass(frozen=True)
class TreeKernels:
    """The bookkeeping of trees; see saguaro.kernels.grow."""

    advance: Callable[..., Any]
    land: Callable[..., tuple[Tensor, ...]]
    show: Callable[..., None]


@dataclass(frozen=True)
class Kernels:
    """Kernel functions; each is documented where it is defined."""

    attend: Callable[..., Tensor]
    adjust: Callable[..., None]
    limits: Callable[..., tuple[Tensor, Tensor]]
    choose: Callable[..., Tensor]
    rank: Callable[..., tuple[Tensor, Tensor]]
    products: Products
    trees: TreeKernels | None = None  # None: plain torch


def kernels_for(device: torch.device) -> Kernels | None:
    """The kernels of a device for one stream; None where torch's own operations are used."""
    return triton_kernels(device) if device.type == "cuda" else None


def triton_kernels(device: torch.device) -> Kernels:
    """A bundle for one stream of this device."""
    try:
        from saguaro.kernels import adjust, attention, grow, limits, linear, sample
    except ImportError as e:
        raise ConfigError(
            f"device is {device}, whose kernels need Triton, and it is not there ({e}); install triton, or set "
            "device to cpu"
        ) from e
    arrived = attention.counters(device)
    return Kernels(
        partial(attention.attend, arrived=arrived),
        adjust.adjust,
        limits.limits,
        sample.choose,
        sample.rank,
        linear.TritonProducts(device, linear.choose_on(device)),
        TreeKernels(grow.advance, grow.land, grow.show),
    )


def tree_kernels_for(device: torch.device, kernels: Kernels | None) -> TreeKernels | None:
    """The bookkeeping of trees beside these kernels; None: plain torch."""
    if kernels is not None:
        return kernels.trees
    is_native = device.type == "cpu" and native.is_there()
    return TreeKernels(native_grow.advance, native_grow.land, native_grow.show) if is_native else None


def plain_kernels() -> Kernels:
    """The plain-torch twins."""
    from saguaro.kernels import adjust, attention, limits, rotary, sample

    return Kernels(
        attention.attend_plain,
        adjust.adjust_plain,
        limits.limits_plain,
        sample.choose_plain,
        sample.rank_plain,
        rotary.PlainProducts(),
    )
