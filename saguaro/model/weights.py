"""Fill a Transformer from safetensors or GGUF, one tensor at a time: there is never a second full copy.

`destinations` maps every tensor of a Hugging Face checkpoint to its slice of our fused weights. Packed weights have no
plain copy: they are packed from the bytes of the file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from saguaro.errors import CorruptModel, ModelError, ModelNotFound
from saguaro.model.files import AGAIN, is_there, neighbour, read_json, shortened
from saguaro.model.linear import Linear, PackedPart
from saguaro.model.rounded import SCALE, Shape, restored, shapes_in
from saguaro.model.shapes import EMBEDDING, HEAD, is_ignored
from saguaro.model.split import Cut
from saguaro.model.stored import Stored
from saguaro.model.transformer import Layer, Transformer
from saguaro.types import Progress


def decode(found: Tensor | Stored, place: Tensor) -> None:
    """Copy a tensor of a checkpoint to its place, in the place's dtype."""
    place.copy_(found if isinstance(found, Tensor) else found.decoded())


@torch.no_grad()
def fill(
    model: Transformer,
    tensors: Iterable[tuple[str, Tensor | Stored]],
    progress: Progress = lambda *_: None,
    decode: Callable[[Tensor | Stored, Tensor], None] = decode,
) -> None:
    """Copy every tensor into the model. `Shapes.check` has verified names and shapes before."""
    places, packed = destinations(model), packed_parts(model)
    n_places = len({*places, *packed})
    for n_done, (name, found) in enumerate(tensors):
        progress("loading weights", min(n_done, n_places), n_places)
        if is_ignored(name, model.is_tied):
            continue
        assert name in places or name in packed, name
        if name in places:
            assert places[name].shape == found.shape, (name, found.shape)
            decode(found, places[name])
        if name in packed:
            packed[name].fill(found)
    progress("loading weights", n_places, n_places)


def packed_parts(model: Transformer) -> dict[str, PackedPart]:
    """Hugging Face tensor name -> the part of a packed weight that it fills; a tied embedding has a place too."""
    found = model.head.packed_parts()
    if model.is_tied and found:
        found = {EMBEDDING: found[HEAD]}
    for index, layer in enumerate(model.layers):
        for part in layer.modules():
            if isinstance(part, Linear):
                found |= {f"model.layers.{index}.{name}": own for name, own in part.packed_parts().items()}
    return found


def destinations(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face tensor name -> the [out, in] (or [n]) view it fills; of plain weights."""
    places = {EMBEDDING: model.embedding.data, **model.norm.places()}
    if not model.is_tied:
        places |= model.head.places()
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        places |= {f"model.layers.{index}.{name}": place for name, place in layer.places().items()}
    return places


def cuts(model: Transformer) -> dict[str, Cut]:
    """Hugging Face tensor name -> the part of the tensor that this rank holds; empty for a model that is whole."""
    if model.split.size == 1:
        return {}
    found = {EMBEDDING: model.embedding_cut}
    if not model.is_tied:
        found |= model.head.cuts()
    for index, layer in enumerate(model.layers):
        for part in layer.modules():
            if isinstance(part, Linear):
                found |= {f"model.layers.{index}.{name}": cut for name, cut in part.cuts().items()}
    return found


def safetensors_in(folder: Path, cuts: Mapping[str, Cut] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model folder, single file or sharded; of some tensors a part, and no more of it is read."""
    for path in safetensors_files(folder):
        yield from restored(_header(path), partial(_read, path, cuts=cuts or {}))


def shapes_in_folder(folder: Path) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor of a model folder; only headers are read."""
    for path in safetensors_files(folder):
        yield from shapes_in(_header(path), path)


def headers_in(folder: Path) -> dict[str, tuple[str, Shape]]:
    """The stored dtype and shape of every tensor of a model folder; only headers are read."""
    return {name: about for path in safetensors_files(folder) for name, about in _header(path).items()}


def read_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of a model folder; the others are not read."""
    for path in safetensors_files(folder):
        if name in _header(path):
            return _read(path, name)
    raise CorruptModel(f"{folder} lacks {name!r}; {AGAIN}")


def _header(path: Path) -> dict[str, tuple[str, Shape]]:
    """The dtype and shape of every tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: (str(found.get_dtype()), tuple(found.get_shape())) for name, found in slices.items()}
    except (SafetensorError, OSError) as e:
        raise CorruptModel(f"{path} is damaged or truncated ({shortened(str(e))}); download it again") from e


def _read(path: Path, name: str, cuts: Mapping[str, Cut] = MappingProxyType({})) -> Tensor:
    cut = cuts.get(name)
    if name.endswith(SCALE) and (of := cuts.get(name.removesuffix(SCALE))) is not None and of.dim == 0:
        cut = of  # a scale belongs to a row
    # The file is reopened for every tensor, so that mapped pages read so far do not stay in memory.
    try:
        with safe_open(path, framework="pt") as file:
            if cut is None:
                found: Tensor = file.get_tensor(name)
            else:
                rows, columns = file.get_slice(name), slice(cut.first, cut.last)
                found = rows[columns] if cut.dim == 0 else rows[:, columns]
            return found
    except (SafetensorError, OSError) as e:
        raise CorruptModel(f"{path} is damaged or truncated ({shortened(str(e))}); download it again") from e


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file atomically."""
    # Copies: safetensors refuses tensors that share memory, as slices of fused weights do.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    write_whole(path, lambda partial: save_file(own, partial, metadata={"format": "pt"}))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: under a temporary name, then renamed. An older file stays until then."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"cannot write {path} ({e}); make room on the disk or choose another folder") from e


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
