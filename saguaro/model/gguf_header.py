"""The header of a GGUF file: its metadata, and where each tensor lies.

    |-- magic, version, counts --|-- metadata --|-- tensor infos --|-- padding --|-- tensors --|

It is read here and not by gguf.GGUFReader, which makes several views of a mapped array for every string: seconds for a
real vocabulary, against a tenth of one (a test compares the two).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saguaro.errors import CorruptModel, UnsupportedModel

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: what it is called, what it is, where it lies."""

    name: str
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]  # [out, in], as in torch
    byte_shape: tuple[int, ...]  # the same, rows measured in bytes
    offset: int  # in the file

    @property
    def n_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.byte_shape)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and what tensors there are; the file must be long enough to hold them."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _Header(data).read()
    except (ValueError, IndexError, KeyError, OSError, OverflowError, RecursionError, struct.error) as e:
        raise CorruptModel(f"{path} is not a complete GGUF file ({e}); download it again") from e
    except NotImplementedError as e:
        raise UnsupportedModel(f"{path} {e}") from e
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors.values()), default=0)
    if end > path.stat().st_size:
        raise CorruptModel(f"{path} is {path.stat().st_size} bytes and should be {end}; download it again")
    return metadata, tensors


# Types of metadata values, as struct writes them; 8 is a text and 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


class _Header:
    """A place in the bytes before the tensors."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version and version % 65536 == 0:
            raise NotImplementedError("has the bytes of its numbers in big-endian order, which Saguaro does not read")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")
        n_tensors, n_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._text()
            if key in metadata:
                raise ValueError(f"it has {key!r} twice")
            metadata[key] = self._value(self._scalar("I"))
        infos = [(self._text(), self._shape(), self._scalar("I"), self._scalar("Q")) for _ in range(n_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: _tensor_info(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        if len(tensors) != n_tensors:
            raise ValueError("it has a tensor twice")
        return metadata, tensors

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._scalar(_SCALARS[kind])
        item, n = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            size = struct.calcsize(_SCALARS[item])
            return [value for (value,) in struct.iter_unpack("<" + _SCALARS[item], self._bytes(n * size))]
        return [self._value(item) for _ in range(n)]

    def _shape(self) -> tuple[int, ...]:
        return tuple(reversed([self._scalar("Q") for _ in range(self._scalar("I"))]))

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode()

    def _scalar(self, code: str) -> Any:
        code = "<" + code
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _bytes(self, n: int) -> bytes:
        end = self._at + n
        if end > len(self._data):
            raise ValueError(f"its header goes on to byte {end} of {len(self._data)}")
        start, self._at = self._at, end
        return self._data[start:end]


def _tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        raise NotImplementedError(f"holds {name!r} in the unknown quantisation {kind}; use another one of the model")
    block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block:
        raise ValueError(f"{name!r} has rows of {shape[-1]}, no multiple of {block}")
    return TensorInfo(
        name=name,
        kind=GGMLQuantizationType(kind),
        shape=shape,
        byte_shape=(*shape[:-1], shape[-1] // block * n_bytes),
        offset=offset,
    )
