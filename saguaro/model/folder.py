"""The tensors of a model folder, by name: plain, or stored in 8 bits with scales (saguaro.model.quantization).

Invariant: a tensor that has scales is never read without them, whichever file of the folder holds them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from saguaro.errors import CorruptModel, ModelNotFound, UnsupportedModel
from saguaro.model.files import AGAIN, is_there, neighbour, read_json, shortened
from saguaro.model.quantization import READS, read_quantization
from saguaro.model.rounded import FLOATS, SCALE, Shape
from saguaro.model.scaled import INT8_ROWS, Scaled, Scheme
from saguaro.model.split import Cut

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}  # their names in torch
SCALES = (SCALE, f"{SCALE}_inv")  # what follows a matrix's name in that of its scales
OTHERS = {  # ends of the names of tensors that belong to quantisations, and what they say
    ".k_scale": "scales of quantised keys",
    ".v_scale": "scales of quantised values",
    ".input_scale": "scales of statically quantised activations",
    ".activation_scale": "scales of statically quantised activations",
    ".weight_packed": "weights of less than 8 bits",
    ".qweight": "weights in GPTQ's or AWQ's layout",
}


class ModelFolder:
    """The tensors of a folder, single file or sharded; headers are read once, tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: dict[str, Path] = {}
        self.stored: dict[str, tuple[str, Shape]] = {}  # the dtype and shape of every tensor, as stored
        for file in safetensors_files(path):
            about = _header(file)
            self.stored |= about
            self._file |= dict.fromkeys(about, file)

    @cached_property
    def quantization(self) -> Scheme | None:
        """How the config says that matrices are stored; None: it says nothing."""
        return read_quantization(self.path) if is_there(self.path / "config.json") else None

    @property
    def formats(self) -> list[str]:
        """How tensors are stored, those with the most weights first."""
        n_weights: Counter[str] = Counter()
        for name, (dtype, shape) in self.stored.items():
            if not self._belongs(name):
                scheme = self._scheme(dtype)
                n_weights[DTYPES.get(dtype, dtype) if scheme is None else scheme.name] += math.prod(shape)
        return [said for said, _ in n_weights.most_common()]

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every tensor with its scales multiplied out. Raise unless all tensors can be read."""
        unread = () if self.quantization is None else self.quantization.unread
        self._check_is_quantised()
        for name, (dtype, shape) in self.stored.items():
            if self._belongs(name) or (unread and name.endswith(unread)):
                continue
            self._check(name, dtype, shape)
            yield name, shape

    def tensors(self, cuts: Mapping[str, Cut] = MappingProxyType({})) -> Iterator[tuple[str, Tensor | Scaled]]:
        """Every tensor that `shapes` has, file by file; of some a part."""
        for name in sorted((name for name, _ in self.shapes()), key=lambda name: (self._file[name], name)):
            yield name, self.read(name, cuts.get(name))

    def read(self, name: str, cut: Cut | None = None) -> Tensor | Scaled:
        """A tensor, or a part of it, and no more of it is read."""
        if name not in self.stored:
            raise CorruptModel(f"{self.path} lacks {name!r}; {AGAIN}")
        dtype, shape = self.stored[name]
        scheme, steps = self._scheme(dtype), self._read(name, cut)
        if scheme is None:
            self._check_has_no_scale(name, dtype)
            return steps
        self._check_scale(name, shape, scheme)
        first = (0, 0) if cut is None else (cut.first, 0) if cut.dim == 0 else (0, cut.first)
        return Scaled(steps, self._scales(name, scheme, shape), scheme.block_of(shape), first)

    def _scheme(self, dtype: str) -> Scheme | None:
        """How tensors of a dtype are stored, if they have scales."""
        found = self.quantization or INT8_ROWS
        return found if dtype == found.dtype else None

    def _belongs(self, name: str) -> bool:
        """Whether this is the scale of a tensor that is read with it."""
        for suffix in SCALES:
            of = name.removesuffix(suffix)
            if of != name and of in self.stored:
                scheme = self._scheme(self.stored[of][0])
                return scheme is not None and scheme.scale == suffix
        return False

    def _check(self, name: str, dtype: str, shape: Shape) -> None:
        """Raise unless the tensor can be read, and config and scales agree with it."""
        scheme, where = self._scheme(dtype), f"{self.path}: {name!r}"
        if scheme is not None:
            self._check_scale(name, shape, scheme)
            return
        other = next((what for end, what in OTHERS.items() if name.endswith(end)), None)
        if other is not None:
            raise UnsupportedModel(f"{where} holds {other}, which Saguaro does not compute with; {READS}")
        self._check_has_no_scale(name, dtype)
        if dtype not in FLOATS:
            raise CorruptModel(f"{where} is of {dtype}; weights are {', '.join(FLOATS)} or I8 with scales")
        if self.quantization is not None and dtype.startswith("F8"):
            raise CorruptModel(f"{where} is of {dtype}, and config.json says {self.quantization.name}; {AGAIN}")

    def _check_is_quantised(self) -> None:
        found = self.quantization
        if found is not None and not any(dtype == found.dtype for dtype, _ in self.stored.values()):
            raise CorruptModel(
                f"{self.path}/config.json says {found.name}, and no tensor is of {found.dtype}; {AGAIN}, or if its "
                "weights were converted, remove quantization_config"
            )

    def _check_has_no_scale(self, name: str, dtype: str) -> None:
        scale = next((name + suffix for suffix in SCALES if name + suffix in self.stored), None)
        if scale is not None:
            where, found = f"{self.path}: {name!r}", self.quantization
            says = "says nothing of it" if found is None else f"says {found.name}"
            raise CorruptModel(f"{where} is of {dtype} and has a scale {scale!r}, and config.json {says}; {AGAIN}")

    def _check_scale(self, name: str, shape: Shape, scheme: Scheme) -> None:
        kind, scale = scheme.name.partition(" (")[0].partition(",")[0], name + scheme.scale
        where, again = f"{self.path}: {name!r}", "write the model again" if scheme is INT8_ROWS else AGAIN
        if name.rpartition(".")[0] in scheme.kept:
            raise CorruptModel(f"{where} is {kind}, and config.json lists its module as not converted; {again}")
        if scale not in self.stored:
            raise CorruptModel(f"{where} is {kind} and {scale!r} is not beside it; {again}")
        dtype, found = self.stored[scale]
        if len(shape) != 2 or not scheme.fits(shape, found) or dtype not in ("F32", "BF16", "F16", "F64"):
            wanted = f", {list(scheme.grid(shape))}" if len(shape) == 2 else " of a matrix"
            raise CorruptModel(
                f"{where} is {list(shape)} and its scale {list(found)} of {dtype}; for {scheme.name} it must be floats"
                f"{wanted}: {again}"
            )

    def _scales(self, name: str, scheme: Scheme, shape: Shape) -> Tensor:  # [blocks downwards, blocks across] float32
        scales = self._read(name + scheme.scale).float().reshape(scheme.grid(shape))
        wrong = ~(scales.isfinite() & (scales > 0))
        if bool(wrong.any()):
            said = f"{name + scheme.scale!r} has a scale of {float(scales[wrong][0])}"
            raise CorruptModel(f"{self.path}: {said}; scales are finite and more than 0: {AGAIN}")
        return scales

    def _read(self, name: str, cut: Cut | None = None) -> Tensor:
        # The file is reopened for every tensor, so that mapped pages read so far do not stay in memory.
        path = self._file[name]
        try:
            with safe_open(path, framework="pt") as file:
                if cut is None:
                    found: Tensor = file.get_tensor(name)
                else:
                    rows, columns = file.get_slice(name), slice(cut.first, cut.last)
                    found = rows[columns] if cut.dim == 0 else rows[:, columns]
                return found
        except (SafetensorError, OSError) as e:
            raise _damaged(path, e) from e


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a model folder; an error if one is missing."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if is_there(index):
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise CorruptModel(f"{index} has no weight_map; {AGAIN}")
        files = sorted({neighbour(index, name) for name in places.values()})
    elif is_there(single):
        files = [single]
    else:
        has_bin = any(folder.glob("pytorch_model*.bin"))
        hint = "only pytorch_model.bin, which Saguaro does not unpickle; convert it" if has_bin else "none"
        raise ModelNotFound(f"{folder} holds no model.safetensors ({hint}); Saguaro reads safetensors and GGUF")
    for path in files:
        if not is_there(path):
            raise CorruptModel(f"{path} is missing, though the index names it; {AGAIN}")
    return files


def _header(path: Path) -> dict[str, tuple[str, Shape]]:
    """The dtype and shape of every tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: (str(found.get_dtype()), tuple(found.get_shape())) for name, found in slices.items()}
    except (SafetensorError, OSError) as e:
        raise _damaged(path, e) from e


def _damaged(path: Path, e: Exception) -> CorruptModel:
    return CorruptModel(f"{path} is damaged or truncated ({shortened(str(e))}); download it again")
