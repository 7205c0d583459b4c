"""The table of weight formats, and how a loaded model gets its format."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from saguaro.errors import ConfigError
from saguaro.kernels import native
from saguaro.kernels.cpu import CPUProducts, Float32Weight, Int8Weight
from saguaro.kernels.fp8 import FP8Weight
from saguaro.model.linear import Packed
from saguaro.model.products import COMPOSED, Products
from saguaro.model.transformer import Transformer
from saguaro.types import Progress

E4M3_FROM = (8, 9)  # the compute capability from which GPUs convert e4m3


def _no_native(device: torch.device) -> str:
    """Why cpu.c cannot be used on a device; empty if it can."""
    if device.type != "cpu":
        return f"the device {device}; such weights are for a CPU"
    found = native.find()
    return f"its kernels are compiled on this machine: {found}" if isinstance(found, str) else ""


def _no_e4m3(device: torch.device) -> str:
    """Why e4m3 products cannot be used on a device; empty if they can."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < E4M3_FROM:
        return f"the device is {device}; such weights are for an NVIDIA GPU of compute capability 8.9 or newer"
    return ""


@dataclass(frozen=True)
class Format:
    """A weight format."""

    dtype: torch.dtype  # of the computation, of keys and values, and of weights that are not packed
    kind: type[Packed] | None = None  # the packed form; None: plain tensors
    products: Callable[[Any], Products] = lambda _: COMPOSED  # that read this kind
    fault: Callable[[torch.device], str] = lambda _: ""  # why the packed form cannot be used here; empty: it can
    instead: str = "float32 or bfloat16"  # what to use where there is a fault
    is_optional: bool = False  # plain tensors have the same values, and are used where the packed form cannot be


FORMATS = {
    "float32": Format(torch.float32, Float32Weight, CPUProducts, _no_native, is_optional=True),
    "bfloat16": Format(torch.bfloat16),
    "int8": Format(torch.float32, Int8Weight, CPUProducts, _no_native),
    "fp8": Format(torch.bfloat16, FP8Weight, fault=_no_e4m3, instead="dtype int8 on a CPU, bfloat16 on a GPU"),
}


def find_format(name: str, device: torch.device) -> str:
    """Check the name of a format; auto: the fastest of the device."""
    if name in ("half", "float16"):
        raise ConfigError(
            f"dtype is {name!r}; nothing is computed in float16: use bfloat16, of the same size, float32 or auto, "
            "which read float16 checkpoints too"
        )
    if name != "auto" and name not in FORMATS:
        raise ConfigError(f"dtype is {name!r}; it must be one of auto, {', '.join(FORMATS)}")
    name = fastest(device) if name == "auto" else name
    check_format(name, device)
    return name


def check_format(name: str, device: torch.device) -> None:
    """Raise if weights of this format cannot be used on this device."""
    fault = FORMATS[name].fault(device)
    if fault and not FORMATS[name].is_optional:
        raise ConfigError(f"dtype is {name} and {fault}; use {FORMATS[name].instead}")


def fastest(device: torch.device) -> str:
    """The fastest format: bfloat16 on a GPU; on a CPU int8 if the native library is available, else float32."""
    if device.type != "cpu":
        return "bfloat16"
    return "int8" if native.is_there() else "float32"


def computed_in(name: str) -> torch.dtype:
    """The dtype of computation, and of keys and values, with weights of this format.

    >>> computed_in("int8"), computed_in("bfloat16")
    (torch.float32, torch.bfloat16)
    """
    return FORMATS[name].dtype


def packed_kind(name: str, device: torch.device) -> type[Packed] | None:
    """The packed form of this format on this device; None: plain tensors."""
    return None if FORMATS[name].fault(device) else FORMATS[name].kind


def ready(model: Transformer, name: str, progress: Progress = lambda *_: None) -> Transformer:
    """The model in this format, packed in place where it has a packed form. A model that is ready is unchanged."""
    if model.products is not COMPOSED:
        return model
    check_format(name, model.device)
    kind = packed_kind(name, model.device)
    if kind is not None:
        model.pack(kind, FORMATS[name].products(kind), name, progress)
    return model
