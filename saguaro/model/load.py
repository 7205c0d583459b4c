"""Find and load a model by name: a local folder, a .gguf file, or a Hub id."""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saguaro.errors import CapacityError, CorruptModel, DownloadError, ModelNotFound, UnsupportedModel
from saguaro.model.feature_config import reads_features
from saguaro.model.files import AGAIN, brief, is_there, read_json, shortened
from saguaro.model.folder import ModelFolder
from saguaro.model.gguf import GGUFModel
from saguaro.model.hf_config import read_spec
from saguaro.model.layout import Layout
from saguaro.model.linear import Linear, Packed
from saguaro.model.shapes import EMBEDDING, HEAD, Shapes
from saguaro.model.spec import ModelSpec
from saguaro.model.split import ALONE, Split, check_split
from saguaro.model.stored import Found
from saguaro.model.token_map import FILE as TOKEN_MAP
from saguaro.model.token_map import read_token_map
from saguaro.model.transformer import Transformer
from saguaro.model.weights import cuts, decode, fill, read_tensor
from saguaro.types import Progress

log = logging.getLogger(__name__)

TOKENIZER_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "config.json", "*.jinja"]
TOKENIZER_FILES += ["vocab.json", "vocab.txt", "merges.txt"]
HUB_FILES = [*TOKENIZER_FILES, "*.json", "*.safetensors"]
# Second copies of the weights, and everything in subfolders: `*` matches a slash too.
HUB_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Loaded:
    """A loaded model and its source."""

    name: str
    path: Path
    model: Transformer

    @property
    def n_params(self) -> int:
        """Number of weights, of all ranks; a tied embedding counts once."""
        if self.model.split.size > 1:
            token_map = self.model.token_map
            every = Shapes(self.model.spec, None if token_map is None else len(token_map))
            return sum(math.prod(every.get(name) or ()) for name in every)
        packed = self.model.packed
        twice = self.model.embedding.numel() if self.model.is_tied and self.model.head.packed_parts() else 0
        return sum(p.numel() for p in self.model.parameters()) + sum(weight.n_params for weight in packed) - twice

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are held here."""
        plain = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return plain + sum(weight.n_bytes for weight in self.model.packed)


def locate(name: str, revision: str | None = None, *, tokenizer_only: bool = False) -> Path:
    """The folder or .gguf file of a model name; a Hub id is downloaded unless it is in the Hub's cache.

    With tokenizer_only the weights are not downloaded and need not exist.
    """
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as e:  # the name is too long, has an unknown user or a NUL
        why = e.strerror if isinstance(e, OSError) else e
        raise ModelNotFound(f"{shortened(name)!r} cannot be a folder or a file ({why}); check the spelling") from e
    if is_folder:
        if not tokenizer_only:
            _refuse_gguf_folder(path)
        return path
    if is_file and path.suffix == ".gguf":
        return path
    if is_file:
        raise ModelNotFound(f"{path} is a file but not .gguf; give the folder that holds config.json")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf":
        return _from_hub(name, revision, tokenizer_only)
    raise ModelNotFound(f"{name!r} is no folder, no .gguf file and no Hub id (owner/name); check the spelling")


def load(
    name: str,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None = None,
    progress: Progress = lambda *_: None,
    split: Split = ALONE,
) -> Loaded:
    """Build the transformer, or one rank's part of it, and fill it from the folder or .gguf file at path; kind: see
    Layout."""
    if path.suffix == ".gguf":
        source = GGUFModel(path)
        source.check_shapes()
        factors = source.rope_factors()
        check_split(source.spec, split.size)
        model = _allocate(source.spec, device, dtype, kind=kind, split=split)
        fill(model, source.parts(cuts(model)), progress, decode_of(kind))
        if factors is not None:
            model.frequencies = model.frequencies / factors.to(device)
    else:
        if borrows(path):
            raise UnsupportedModel(
                f"{path} is a draft without an embedding of its own: it reads its target's; pass it as the draft of "
                "the target it was made for"
            )
        seen = reads_features(path)
        if seen is not None:
            raise UnsupportedModel(
                f"{path} is a draft of kind {seen}: it reads features of its target; pass it as the draft of that "
                "target"
            )
        spec = read_spec(path)
        token_map = read_token_map(path, spec.n_vocab)
        folder = ModelFolder(path)
        Shapes(spec, None if token_map is None else len(token_map)).check(folder.shapes(), path)
        check_split(spec, split.size)
        model = _allocate(spec, device, dtype, token_map, kind, split)
        if kind is None and split.rank == 0:
            _say_conversion(name, folder, device, dtype)
        fill(model, folder.tensors(cuts(model)), progress, decode_of(kind))
    _check_frequencies(model.frequencies, path)
    return Loaded(name, path, model)


def _say_conversion(name: str, folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
    """Say what loading plain weights of this dtype changes: their size, or their precision."""
    into = str(dtype).removeprefix("torch.")
    if folder.quantization is not None:
        remedy = "" if device.type == "cpu" else ": quantization fp8 keeps 8 bits"
        log.warning(
            "%s is stored in %s; it is converted to %s while loading, and takes the memory of %s%s",
            *(name, folder.quantization.name, into, into, remedy),
        )
    elif folder.formats[:1] == ["float16"] and dtype == torch.bfloat16:
        log.warning("%s is stored in float16; it is rounded to bfloat16, 8 bits of 11: dtype float32 keeps all", name)


def stored_as(path: Path) -> str:
    """How the file or folder of a model stores its weights, for people; of several formats the most used first."""
    if path.suffix != ".gguf":
        return f"safetensors: {'; '.join(ModelFolder(path).formats)}"
    n_bytes: Counter[str] = Counter()
    for info in GGUFModel(path).infos.values():
        n_bytes[info.kind.name] += info.n_bytes
    return f"GGUF: {'; '.join(kind for kind, _ in n_bytes.most_common())}"


def borrows(path: Path) -> bool:
    """Whether a draft folder has no embedding and uses its target's (saguaro.distill.student writes such folders)."""
    if path.suffix == ".gguf":
        return False
    whose = _about(path).get("embedding", "own")
    if whose not in ("own", "target"):
        raise CorruptModel(f"{path}/config.json says the embedding is {brief(whose)}; it is 'own' or 'target'")
    return bool(whose == "target")


def _about(folder: Path) -> dict[str, Any]:
    """The `saguaro` object of a draft's config.json."""
    about = read_json(folder / "config.json").get("saguaro", {})
    if not isinstance(about, dict):
        raise CorruptModel(
            f"{folder}/config.json says saguaro is {brief(about)}; it is an object: write the draft again"
        )
    return about


def load_borrower(
    path: Path,
    target: Path,
    embedding: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None = None,
) -> Transformer:
    """Load a draft that uses its target's embedding, [V, D] on this device and in this dtype."""
    spec = read_spec(path)
    if embedding.shape != (spec.n_vocab, spec.hidden):
        raise UnsupportedModel(
            f"the draft {path} was made for a target of {spec.n_vocab} tokens and hidden size {spec.hidden}; {target} "
            f"has {embedding.shape[0]} and {embedding.shape[1]}: make a draft for it with `saguaro distill`"
        )
    token_map = read_token_map(path, spec.n_vocab)
    if token_map is None:
        raise CorruptModel(f"{path} borrows its target's embedding and has no {TOKEN_MAP}; write the draft again")
    folder = ModelFolder(path)
    Shapes(spec, len(token_map), is_lent=True).check(folder.shapes(), path)
    model = borrower(spec, token_map, embedding, device, dtype, kind)
    fill(model, folder.tensors(), decode=decode_of(kind))
    frequencies = _about(path).get("frequencies")
    if frequencies is not None:
        model.frequencies = _as_frequencies(frequencies, spec, path).to(device)
    _check_frequencies(model.frequencies, path)
    return model


def _as_frequencies(found: object, spec: ModelSpec, path: Path) -> Tensor:  # [d / 2] float32
    """The rope frequencies in a draft's config.json."""
    n = spec.head_dim // 2
    if not isinstance(found, list) or len(found) != n or not all(type(each) is float for each in found):
        what = f"{len(found)} values" if isinstance(found, list) else brief(found)
        raise CorruptModel(f"{path}/config.json has {what} as frequencies; they are {n} numbers: write the draft again")
    return torch.tensor(found, dtype=torch.float32)


def _check_frequencies(frequencies: Tensor, path: Path) -> None:  # [d / 2]
    """Refuse infinite rope frequencies: they come from a rope_theta close to 0, or from divisors of 0."""
    if not bool(frequencies.isfinite().all()):
        raise CorruptModel(f"{path} has rotary frequencies that are not finite; check rope_theta, or {AGAIN}")


def borrower(
    spec: ModelSpec,
    token_map: Tensor,
    embedding: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None = None,
) -> Transformer:
    """An empty model with a reduced head, token_map [head rows], that shares the embedding [V, D] of another model."""
    model = _allocate(replace(spec, n_vocab=1), device, dtype, token_map, kind)  # its own embedding is discarded
    model.spec = spec
    del model.embedding
    model.embedding = embedding
    return model


def spec_of(path: Path) -> ModelSpec:
    """The spec of the model at path; its weights are not read."""
    return GGUFModel(path).spec if path.suffix == ".gguf" else read_spec(path)


def read_embedding(
    path: Path, device: torch.device, dtype: torch.dtype, kind: type[Packed] | None = None
) -> nn.Parameter:  # [V, D]
    """The embedding of the model at path; other tensors are not read."""
    found = _read_matrix(path, EMBEDDING, "token_embd.weight")
    embedding = torch.empty(found.shape, device=device, dtype=dtype)
    decode_of(kind)(found, embedding)
    return nn.Parameter(embedding, requires_grad=False)


def read_head(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kind: type[Packed] | None = None
) -> Linear:
    """The head of the model at path, which has this spec; other tensors are not read."""
    tied = EMBEDDING, "token_embd.weight"
    found = _read_matrix(path, *(tied if spec.is_tied else (HEAD, "output.weight")))
    if found.shape != (spec.n_vocab, spec.hidden):
        raise CorruptModel(f"{path} holds a head of shape {list(found.shape)}; it has {spec.n_vocab} tokens: {AGAIN}")
    head = Layout(device, dtype, kind).linear(spec.hidden, {"lm_head": spec.n_vocab})
    for place in head.places().values():
        decode_of(kind)(found, place)
    for part in head.packed_parts().values():
        part.fill(found)
    return head


def _read_matrix(path: Path, name: str, gguf_name: str) -> Found:
    found: Found
    if path.suffix == ".gguf":
        source = GGUFModel(path)
        source.infos = {own: info for own, info in source.infos.items() if own == gguf_name}
        found = next(weight for _, weight in source.tensors())
    else:
        found = read_tensor(path, name)
    if len(found.shape) != 2:
        raise CorruptModel(f"{path} holds {name!r} of shape {list(found.shape)}; it has two sizes: {AGAIN}")
    return found


def decode_of(kind: type[Packed] | None) -> Callable[[Found, Tensor], None]:
    """How tensors that are not packed are decoded."""
    return decode if kind is None else kind.decode


def _allocate(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    token_map: Tensor | None = None,
    kind: type[Packed] | None = None,
    split: Split = ALONE,
) -> Transformer:
    try:
        return Transformer(spec, device, dtype, token_map, kind, split)
    except RuntimeError as e:  # torch's out-of-memory errors, on any device
        reason = str(e).splitlines()[0]
        raise CapacityError(
            f"{spec.architecture} with {spec.n_layers} layers of {spec.hidden} does not fit the memory of {device} in "
            f"{dtype} ({reason}); use a smaller model, bfloat16 or another device"
        ) from e


def _refuse_gguf_folder(folder: Path) -> None:
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if found and not is_there(folder / "config.json"):
        raise ModelNotFound(
            f"{folder} has no config.json but {_some(found)}; pass the path of one of these files, "
            f"such as {folder / found[0]}"
        )


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _from_hub(name: str, revision: str | None, tokenizer_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = TOKENIZER_FILES if tokenizer_only else HUB_FILES
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=HUB_IGNORED))
    except HFValidationError as e:
        raise ModelNotFound(f"{name!r} is no local folder, and no Hub id either: {e}") from e
    except GatedRepoError as e:
        raise ModelNotFound(f"{name} is gated; accept its licence on the Hub and log in with `hf auth login`") from e
    except RepositoryNotFoundError as e:
        raise ModelNotFound(f"{name!r} is neither a local folder nor a model on the Hub; check the spelling") from e
    except LocalEntryNotFoundError as e:
        raise DownloadError(f"{name} is not in the Hub's cache and the Hub cannot be reached; check the network") from e
    except OSError as e:
        raise DownloadError(f"{name} could not be downloaded from the Hub ({e}); check network and disk space") from e
    if not tokenizer_only and not is_there(folder / "config.json"):
        _refuse_gguf_repo(name, revision)
    return folder


def _refuse_gguf_repo(name: str, revision: str | None) -> None:
    from huggingface_hub import HfApi

    try:
        found = sorted(file for file in HfApi().list_repo_files(name, revision=revision) if file.endswith(".gguf"))
    except Exception as e:  # any error of the HTTP library
        raise DownloadError(
            f"{name} has no config.json in the Hub's cache and its files cannot be listed ({e}); check the network"
        ) from e
    if found:
        raise ModelNotFound(
            f"{name} has no config.json but {_some(found)}; download one of these files, such as with "
            f"`hf download {name} {found[0]}`, and pass its path"
        )
