"""Loads a draft model and checks that it has the target's vocabulary, and of one that reads features that it fits."""

import re
from pathlib import Path

import torch
from torch import Tensor

from saguaro.config import DraftConfig
from saguaro.errors import ConfigError, TokenizerMismatch, UnsupportedModel
from saguaro.kernels.formats import computed_in, packed_kind, ready
from saguaro.model.feature_config import read_feature_spec, reads_features
from saguaro.model.feature_files import FeatureFiles, load_feature_draft
from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.linear import Linear, Packed
from saguaro.model.load import borrows, load, load_borrower, read_embedding, read_head, spec_of
from saguaro.model.spec import ModelSpec
from saguaro.model.tokenizer import has_tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer

MOST_ODD = 0.005  # share of tokens that may differ: models of one family have different special tokens


def load_draft(config: DraftConfig, target: Transformer | None) -> Transformer:
    """Load the draft model, ready to run. A part of the target is already prepared with the target."""
    model = read_draft(config, target, packed_kind(config.dtype, torch.device(config.device)))
    is_part = str(config.draft).startswith("drop:") and target is not None and model.head is target.head
    return model if is_part else ready(model, config.dtype)


def read_draft(config: DraftConfig, target: Transformer | None, kind: type[Packed] | None = None) -> Transformer:
    """Load the draft model; kind: see Layout. `drop:` and a borrowing draft share the target's weights if they are on
    the same device."""
    assert config.draft is not None
    device, dtype = torch.device(config.device), computed_in(config.dtype)
    if config.draft.startswith("drop:"):
        if target is None or target.device != device:
            target = load(config.target, Path(config.target), device, dtype, kind).model
        return target.without(dropped_layers(config.draft, target.spec.n_layers))
    path = Path(config.draft)
    if reads_features(path):
        return _read_feature_draft(config, target, device, dtype, kind)
    if borrows(path):
        embedding = _embedding(config, target, device, dtype, kind)
        model = load_borrower(path, Path(config.target), embedding, device, dtype, kind)
    else:
        model = load(config.draft, path, device, dtype, kind).model
    check_vocabulary(config, model)
    return model


def features_read(draft: str | None, target: ModelSpec) -> FeatureSpec | None:
    """The spec of a draft that reads features of this target; None if the draft reads tokens only. Its files are
    checked, and its weights are not read."""
    if draft is None or draft.startswith("drop:") or not reads_features(Path(draft)):
        return None
    return FeatureFiles(Path(draft), read_feature_spec(Path(draft), target)).reads


def dropped_layers(name: str, n_layers: int) -> list[int]:
    """The layers that drop:I,J,... removes.

    >>> dropped_layers("drop:3,5-7", n_layers=30)
    [3, 5, 6, 7]
    """
    parts = [part.strip() for part in name.removeprefix("drop:").split(",")]
    matches = [match for part in parts if (match := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is not None]
    ranges = [(int(match[1]), int(match[2] or match[1])) for match in matches]
    if len(matches) < len(parts) or any(first > last for first, last in ranges):
        raise ConfigError(f"draft is {name!r}; write drop: and layers, such as drop:20 or drop:4,9-12")
    found = {layer for first, last in ranges for layer in range(first, min(last, n_layers) + 1)}
    if max(last for _, last in ranges) >= n_layers or len(found) >= n_layers:
        raise ConfigError(f"draft is {name!r}; the target has layers 0 to {n_layers - 1}, and one must be left")
    return sorted(found)


def check_vocabulary(config: DraftConfig, model: Transformer) -> None:
    """Raise unless draft and target have the same tokens."""
    draft, target = Path(str(config.draft)), Path(config.tokenizer)
    remedy = "a draft must have the target's vocabulary: take a smaller model of the target's family"
    if model.spec.n_vocab < config.n_vocab:
        raise TokenizerMismatch(
            f"the draft {draft} knows {model.spec.n_vocab} tokens, the target {target} says {config.n_vocab}; {remedy}"
        )
    if not (has_tokenizer(draft) and has_tokenizer(target)):
        return  # weights without a tokenizer, made for this target
    theirs, ours = (load_tokenizer(path, model.spec.n_vocab).spelling for path in (draft, target))
    odd = sorted(token for token in ours if theirs.get(token) != ours[token])
    if len(odd) > MOST_ODD * len(ours):
        first = f"token {odd[0]} is {theirs.get(odd[0])!r} to the draft and {ours[odd[0]]!r} to the target"
        raise TokenizerMismatch(
            f"{len(odd)} of {len(ours)} tokens mean something else to the draft {draft} than to the target {target} "
            f"({first}); {remedy}"
        )


def _read_feature_draft(
    config: DraftConfig,
    target: Transformer | None,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None,
) -> Transformer:
    """A draft that reads features. What its files lack is shared with the target, or read from the target's files."""
    path, target_path = Path(str(config.draft)), Path(config.target)
    spec = spec_of(target_path) if target is None else target.spec
    files = FeatureFiles(path, read_feature_spec(path, spec))
    if files.reads.layers.hidden != spec.hidden and not (files.has_embedding and files.has_head):
        raise UnsupportedModel(
            f"the draft {path} has hidden size {files.reads.layers.hidden} and uses its target's embedding or head; "
            f"{target_path} has hidden size {spec.hidden}: it was made for another target"
        )
    embedding = None if files.has_embedding else _embedding(config, target, device, dtype, kind)
    model = load_feature_draft(
        files,
        device,
        dtype,
        kind,
        embedding=embedding,
        head=None if files.has_head else _head(target, target_path, spec, device, dtype, kind),
    )
    check_vocabulary(config, model)
    return model


def _head(
    target: Transformer | None,
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None,
) -> Linear:
    """The target's head: shared if device and dtype agree, else read from the file."""
    if target is not None and (target.device, target.dtype) == (device, dtype) and target.token_map is None:
        return target.head
    return read_head(path, spec, device, dtype, kind)


def _embedding(
    config: DraftConfig,
    target: Transformer | None,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None,
) -> Tensor:
    """The target's embedding [V, D]: shared if device and dtype agree, else read from the file."""
    if target is not None and target.embedding.device == device and target.embedding.dtype == dtype:
        return target.embedding
    return read_embedding(Path(config.target), device, dtype, kind)
