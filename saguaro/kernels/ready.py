"""Convert a loaded model's weights to the memory order and dtype for the device."""

import torch

from saguaro.errors import ConfigError
from saguaro.kernels import native
from saguaro.kernels.cpu import CPUProducts, Float32Weight, Int8Weight
from saguaro.model.packed import pack_
from saguaro.model.transformer import Transformer
from saguaro.types import Progress


def ready(model: Transformer, dtype: torch.dtype, progress: Progress = lambda *_: None) -> Transformer:
    """The model with weights of this dtype, packed in place for cpu.c where it is used. A packed model is unchanged."""
    if model.is_packed:
        return model
    if dtype == torch.int8:
        check_int8(model.device)
        pack_(model, Int8Weight, CPUProducts(Int8Weight), dtype, progress)
    elif packs(dtype, model.device):
        pack_(model, Float32Weight, CPUProducts(Float32Weight), dtype, progress)
    return model


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model with weights of this dtype is packed on this device; if so it can be loaded with by_rows."""
    return device.type == "cpu" and dtype in (torch.int8, torch.float32) and native.is_there()


def fastest(device: torch.device) -> torch.dtype:
    """The fastest weight dtype: bfloat16 on a GPU; on a CPU int8 if the native library is available, else float32."""
    if device.type != "cpu":
        return torch.bfloat16
    return torch.int8 if native.is_there() else torch.float32


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computation, and of keys and values, for weights of this dtype.

    >>> computed_in(torch.int8), computed_in(torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    return torch.float32 if dtype == torch.int8 else dtype


def check_int8(device: torch.device) -> None:
    """Raise unless int8 weights are supported on this device."""
    remedy = "use float32 or bfloat16"
    if device.type != "cpu":
        raise ConfigError(f"dtype is int8 and the device {device}; int8 weights are for a CPU: {remedy}")
    try:
        native.library()
    except ConfigError as e:
        raise ConfigError(f"dtype is int8, whose kernels are compiled on this machine, and {e}; or {remedy}") from e
