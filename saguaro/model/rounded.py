"""Matrices stored as int8 rows, each on a scale of its own, as compressed-tensors names them.

NAME           [out, in] int8
NAME_scale     [out, 1] float32: the matrix is NAME * NAME_scale
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from saguaro.errors import CorruptModel

SCALE = "_scale"
STEPS = 127  # of the largest number of a row


def rounded(tensors: Mapping[str, Tensor], others: torch.dtype) -> dict[str, Tensor]:
    """Every matrix as int8 rows and their scales; what is no matrix in another dtype.

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


def restored(names: Iterable[str], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, those of int8 rows as the matrices they stand for.

    >>> stored = rounded({"w": torch.tensor([[127.0, 3.0]])}, torch.float16)
    >>> list(restored(stored, stored.__getitem__))
    [('w', tensor([[127.,   3.]]))]
    """
    known = set(names)
    for name in sorted(known):
        if name.endswith(SCALE) and name.removesuffix(SCALE) in known:
            continue
        tensor = read(name)
        if tensor.dtype == torch.int8:
            if name + SCALE not in known:
                raise CorruptModel(f"{name!r} is int8 and {name + SCALE!r} is not beside it; write the model again")
            tensor = tensor.float() * read(name + SCALE)
        yield name, tensor
