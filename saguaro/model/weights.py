"""Fill a Transformer, one tensor at a time: there is never a second full copy. And write safetensors files.

`destinations` maps every tensor of a Hugging Face checkpoint to its slice of our fused weights. Packed weights have no
plain copy: they are packed from the bytes of the file.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from saguaro.errors import ModelError
from saguaro.model.folder import ModelFolder
from saguaro.model.linear import Linear, PackedPart
from saguaro.model.rounded import Shape
from saguaro.model.shapes import EMBEDDING, HEAD, is_ignored
from saguaro.model.split import Cut
from saguaro.model.stored import Found, decoded
from saguaro.model.transformer import Layer, Transformer
from saguaro.types import Progress


def decode(found: Found, place: Tensor) -> None:
    """Copy a tensor of a checkpoint to its place, in the place's dtype."""
    place.copy_(decoded(found, place.device))


@torch.no_grad()
def fill(
    model: Transformer,
    tensors: Iterable[tuple[str, Found]],
    progress: Progress = lambda *_: None,
    decode: Callable[[Found, Tensor], None] = decode,
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


def headers_in(folder: Path) -> dict[str, tuple[str, Shape]]:
    """The stored dtype and shape of every tensor of a model folder; only headers are read."""
    return ModelFolder(folder).stored


def read_tensor(folder: Path, name: str) -> Tensor:
    """One tensor of a model folder, with its scales multiplied out; the others are not read."""
    return decoded(ModelFolder(folder).read(name), torch.device("cpu"))


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
