"""A tensor in the bytes of its GGUF file: read, and decoded where it goes, so that packing needs no copy in float32."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.gguf_header import TensorInfo
from saguaro.model.scaled import Scaled
from saguaro.model.split import Cut


@dataclass(frozen=True)
class Stored:
    """A tensor that was read and not decoded."""

    path: Path
    info: TensorInfo
    n_heads: int  # whose two rope halves of rows are interleaved, as llama.cpp stores them; 0: the rows are in order
    raw: Tensor  # [rows, bytes of a row] uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in], or [n]."""
        return self.info.shape

    def decoded(self) -> Tensor:
        """The tensor in float32, by the gguf package."""
        from gguf import dequantize

        try:
            values = dequantize(self.raw.numpy(), self.info.kind)
        except NotImplementedError as e:
            raise UnsupportedModel(
                f"{self.path} holds {self.info.name!r} as {self.info.kind.name}, which Saguaro does not read; "
                "use another quantisation of the model"
            ) from e
        weight = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        if not self.n_heads:
            return weight
        pairs = weight.view(self.n_heads, len(weight) // self.n_heads // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)


Found = Tensor | Stored | Scaled  # a tensor of a checkpoint, as it was read


def decoded(found: Found, device: torch.device) -> Tensor:
    """The tensor that was read; one with scales is multiplied out on the device."""
    if isinstance(found, Scaled):
        return found.to(device).decoded()
    return found.decoded() if isinstance(found, Stored) else found


def read_stored(path: Path, info: TensorInfo, n_heads: int = 0, cut: Cut | None = None) -> Stored:
    """Read a tensor of a GGUF file, or some of its rows: whole heads, if it has heads."""
    if cut is not None:
        n_heads = n_heads * cut.n // info.shape[0]
        row = math.prod(info.byte_shape) // info.shape[0]
        shape, byte_shape = (cut.n, *info.shape[1:]), (cut.n * row,) if len(info.shape) == 1 else (cut.n, row)
        info = replace(info, shape=shape, byte_shape=byte_shape, offset=info.offset + cut.first * row)
    # Read, not mapped: pages of a mapped file would stay in memory, and a file that shrinks would end the process.
    raw = np.fromfile(path, np.uint8, info.n_bytes, offset=info.offset)
    if len(raw) < info.n_bytes:
        raise CorruptModel(f"{path} ends within {info.name!r}; download it again")
    return Stored(path, info, n_heads, torch.from_numpy(raw.reshape(info.byte_shape)))
