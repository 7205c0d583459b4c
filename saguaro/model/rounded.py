"""Matrices stored as int8 with one scale per row, named as in compressed-tensors.

NAME           [out, in] int8
NAME_scale     [out, 1] float32: the matrix is NAME * NAME_scale
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from saguaro.errors import CorruptModel

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


def shapes_in(stored: Mapping[str, tuple[str, Shape]], path: Path) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the tensors that `restored` yields, given the stored dtypes and shapes.

    >>> list(shapes_in({"w": ("I8", (4, 2)), "w_scale": ("F32", (4, 1)), "b": ("F16", (4,))}, Path("m")))
    [('w', (4, 2)), ('b', (4,))]
    """
    for name, (dtype, shape) in stored.items():
        if _is_scale(name, stored):
            continue
        if dtype == "I8":
            scale = stored.get(name + SCALE)
            if scale is None:
                raise CorruptModel(f"{path}: {name!r} is int8 and {name + SCALE!r} is not beside it; write it again")
            if len(shape) != 2 or scale[1] != (shape[0], 1) or scale[0] not in FLOATS:
                raise CorruptModel(
                    f"{path}: {name!r} is {list(shape)} and its scale {list(scale[1])} of {scale[0]}; a scale is a "
                    "float for each row: write the model again"
                )
        elif dtype not in FLOATS:
            raise CorruptModel(f"{path}: {name!r} is of {dtype}; weights are {', '.join(FLOATS)} or I8")
        yield name, shape


def restored(names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, with int8 matrices dequantised.

    >>> stored = rounded({"w": torch.tensor([[127.0, 3.0]])}, torch.float16)
    >>> list(restored(stored, stored.__getitem__))
    [('w', tensor([[127.,   3.]]))]
    """
    known = set(names)
    for name in sorted(known):
        if _is_scale(name, known):
            continue
        tensor = read(name)
        yield name, tensor.float() * read(name + SCALE) if tensor.dtype == torch.int8 else tensor


def _is_scale(name: str, names: Container[str]) -> bool:
    return name.endswith(SCALE) and name.removesuffix(SCALE) in names
