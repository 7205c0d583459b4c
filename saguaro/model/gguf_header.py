"""The header of a GGUF file: its metadata, and the offset of each tensor.

    |-- magic, version, counts --|-- metadata --|-- tensor infos --|-- padding --|-- tensors --|

gguf.GGUFReader is not used: it makes several views of a mapped array for every string, which takes seconds for a real
vocabulary. This reader takes a tenth of a second (a test compares the two).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.files import brief

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Name, type, shape and offset of one tensor."""

    name: str
    kind: "GGMLQuantizationType"
    shape: tuple[int, ...]  # [out, in], as in torch
    byte_shape: tuple[int, ...]  # the same, with the row length in bytes
    offset: int  # in the file

    @property
    def n_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.byte_shape)


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Read metadata and tensor infos; an error if the file is too short for its tensors."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _Header(data).read()
    except (ValueError, OSError, RecursionError, struct.error) as e:
        raise CorruptModel(
            f"{path} is not a complete GGUF file ({str(e) or type(e).__name__}); download it again"
        ) from e
    except NotImplementedError as e:
        raise UnsupportedModel(f"{path} {e}") from e
    end = max((tensor.offset + tensor.n_bytes for tensor in tensors.values()), default=0)
    if end > path.stat().st_size:
        raise CorruptModel(f"{path} is {path.stat().st_size} bytes and should be {end}; download it again")
    return metadata, tensors


# struct codes of the metadata types; 8 is a string and 9 a list.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {code: struct.calcsize("<" + code) for code in _SCALARS.values()}
_TEXT, _LIST = 8, 9

# More than any model has. A file beyond these is damaged, and reading it could exhaust memory.
MOST_BYTES, MOST_TENSORS, MOST_ITEMS, MOST_SIZES = 2**27, 2**17, 2**22, 4


class _Header:
    """A cursor in the bytes before the tensors."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._end = data, 0, min(len(data), MOST_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version and version % 65536 == 0:
            raise NotImplementedError("has the bytes of its numbers in big-endian order, which Saguaro does not read")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}")
        n_tensors, n_fields = self._scalar("Q"), self._scalar("Q")
        if n_tensors > MOST_TENSORS:
            raise ValueError(f"it announces {n_tensors} tensors; {MOST_TENSORS} are the most")
        metadata: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._text()
            if key in metadata:
                raise ValueError(f"it has {brief(key)} twice")
            metadata[key] = self._value(self._scalar("I"))
        infos = [(self._text(), self._shape(), self._scalar("I"), self._scalar("Q")) for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its general.alignment is {brief(alignment)}; it must be a power of 2")
        start = -(-self._at // alignment) * alignment
        tensors = {name: _tensor_info(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
        if len(tensors) != n_tensors:
            raise ValueError("it has a tensor twice")
        return metadata, tensors

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _LIST:
            raise ValueError(f"it has a value of the unknown type {kind}")
        item, n = self._scalar("I"), self._scalar("Q")
        if n > MOST_ITEMS:
            raise ValueError(f"it announces a list of {n}; {MOST_ITEMS} are the most")
        if item in _SCALARS:
            content = self._bytes(n * _SIZES[_SCALARS[item]])
            return [value for (value,) in struct.iter_unpack("<" + _SCALARS[item], content)]
        return [self._value(item) for _ in range(n)]

    def _shape(self) -> tuple[int, ...]:
        n = self._scalar("I")
        if not 1 <= n <= MOST_SIZES:
            raise ValueError(f"it has a tensor of {n} sizes; 1 to {MOST_SIZES} are read")
        return tuple(reversed([self._scalar("Q") for _ in range(n)]))

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode()

    def _scalar(self, code: str) -> Any:
        start = self._advance(_SIZES[code])
        (value,) = struct.unpack_from("<" + code, self._data, start)
        return value

    def _bytes(self, n: int) -> bytes:
        start = self._advance(n)
        return self._data[start : self._at]

    def _advance(self, n: int) -> int:
        """Advance by n bytes; return their start."""
        start, self._at = self._at, self._at + n
        if self._at > self._end:
            raise ValueError(f"its header goes on to byte {self._at}; {self._end} can be read")
        return start


def _tensor_info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        raise NotImplementedError(f"holds {brief(name)} in the unknown quantisation {kind}; use another of the model")
    block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block:
        raise ValueError(f"{brief(name)} has rows of {shape[-1]}, no multiple of {block}")
    return TensorInfo(
        name=name,
        kind=GGMLQuantizationType(kind),
        shape=shape,
        byte_shape=(*shape[:-1], shape[-1] // block * n_bytes),
        offset=offset,
    )
