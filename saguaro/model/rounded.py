"""Writes matrices as int8 with one scale per row, named as in compressed-tensors; saguaro.model.folder reads them.

NAME           [out, in] int8
NAME_scale     [out, 1] float32: the matrix is NAME * NAME_scale
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = "_scale"
STEPS = 127  # int8 value of a row's largest absolute value
FLOATS = ("F32", "BF16", "F16", "F64", "F8_E4M3", "F8_E5M2")  # as safetensors names them

Shape = tuple[int, ...]


def rounded(tensors: Mapping[str, Tensor], others: torch.dtype) -> dict[str, Tensor]:
    """Quantise every matrix to int8 rows and scales; convert other tensors to the dtype `others`.

    >>> rounded({"w": torch.tensor([[0.5, -1.0]])}, torch.float16)
    {'w': tensor([[  64, -127]], dtype=torch.int8), 'w_scale': tensor([[0.0079]])}
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            found[name] = tensor.to(others)
            continue
        scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / STEPS
        found |= {name: (tensor.float() / scale).round().to(torch.int8), name + SCALE: scale}
    return found
