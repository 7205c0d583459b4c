"""Loads a draft that reads features of its target (model/feature_spec.py). Its tensors are named as in the files of
SafeAILab, SpecForge or z-lab, or as in speculators':

midlayer.*, layers.N.*      the layers; of EAGLE-3 the projections of the first read twice the hidden size
fc, hidden_norm             from features to a state; of EAGLE-3 hidden_norm is part of the first layer
fc_norm.0 ..                EAGLE-3.1; older names: aux_norm_low, _mid, _high
norm, lm_head               lm_head has draft_vocab_size rows; without it the target's head is used
d2t [draft_vocab_size]      row i of lm_head is the token i + d2t[i]
embed_tokens                without it the target's embedding is used
t2d, verifier_*             not read: they follow from d2t, and from the target
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.dflash import DFlash
from saguaro.model.dflash_config import DFlashSpec
from saguaro.model.eagle import Eagle
from saguaro.model.eagle_config import EagleSpec
from saguaro.model.feature_draft import FeatureDraft
from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.files import AGAIN, brief, shortened
from saguaro.model.linear import Linear, Packed, PackedPart
from saguaro.model.load import decode_of
from saguaro.model.rounded import FLOATS, Shape
from saguaro.model.shapes import EMBEDDING, HEAD, IGNORED
from saguaro.model.token_map import fault
from saguaro.model.weights import destinations, headers_in, packed_parts, read_tensor

MAP, UNREAD = "d2t", ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
MODELS: dict[type[FeatureSpec], type[Any]] = {EagleSpec: Eagle, DFlashSpec: DFlash}
_PREFIXES = {
    "midlayer.": "model.layers.0.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


class FeatureFiles:
    """The tensors of a draft's folder, by the names of Saguaro's modules."""

    def __init__(self, folder: Path, reads: FeatureSpec) -> None:
        """Raise unless these are the tensors that its config describes."""
        self.folder, held = folder, headers_in(folder)
        unread = (MAP, *UNREAD)
        self._stored = {_named(name): name for name in held if name not in unread and not name.endswith(IGNORED)}
        if isinstance(reads, EagleSpec) and any(name.startswith("fc_norm.") for name in self._stored):
            reads = replace(reads, norms_features=True)  # older files do not say so
        self.reads = reads
        self._shapes = {name: held[own][1] for name, own in self._stored.items()}
        for name, own in self._stored.items():
            if held[own][0] not in FLOATS:
                raise CorruptModel(f"{folder} holds {name!r} as {held[own][0]}; weights are {', '.join(FLOATS)}")
        self.has_embedding, self.has_head = EMBEDDING in self._stored, HEAD in self._stored
        can_do_without = isinstance(reads, EagleSpec) and reads.n_features == reads.layers.hidden
        self.has_fc = "fc.weight" in self._stored or not can_do_without
        self.token_map = self._read_token_map(MAP in held) if self.has_head else None
        self._check()

    def fill(self, model: FeatureDraft, kind: type[Packed] | None) -> None:
        """Copy or pack every tensor into the model."""
        plain, packed, copy = places(model), _packed(model), decode_of(kind)
        for name, own in self._stored.items():
            found = read_tensor(self.folder, own)
            if name in plain:
                copy(found, plain[name])
            else:
                packed[name].fill(found)

    def _read_token_map(self, has_map: bool) -> Tensor:  # [head rows] int64
        n_rows, n_vocab = self._shapes[HEAD][0], self.reads.layers.n_vocab
        if not has_map:
            if n_rows != n_vocab:
                raise CorruptModel(
                    f"{self.folder} has no {MAP!r}, and its head has {n_rows} of {n_vocab} tokens; without "
                    f"{MAP} these tokens are not known: {AGAIN}"
                )
            return torch.arange(n_rows)
        offsets = read_tensor(self.folder, MAP)
        if offsets.dtype not in (torch.int32, torch.int64) or offsets.shape != (n_rows,):
            raise CorruptModel(
                f"{self.folder} holds {MAP!r} of {offsets.dtype} and shape {list(offsets.shape)}; it must be whole "
                f"numbers, one for each of the head's {n_rows} rows: {AGAIN}"
            )
        tokens = offsets.long() + torch.arange(n_rows)
        wrong = fault(tokens, n_vocab)
        if wrong is not None:
            raise CorruptModel(f"{self.folder}: {MAP} {wrong}")
        return tokens

    def _check(self) -> None:
        """Compare names and shapes with those of an empty model, which takes no memory."""
        reads, folder = self.reads, self.folder
        if reads.layers.n_layers > len(self._stored):
            raise CorruptModel(f"{folder} holds fewer tensors than its config.json has layers; {AGAIN}")
        if not self.has_head and reads.n_draft_vocab not in (None, reads.layers.n_vocab):
            raise CorruptModel(f"{folder} has no 'lm_head.weight' for its {reads.n_draft_vocab} tokens; {AGAIN}")
        try:
            wanted = self._wanted()
        except (RuntimeError, TypeError) as e:  # its sizes overflow
            raise CorruptModel(f"{folder}: config.json describes layers larger than any memory; {AGAIN}") from e
        for name, shape in self._shapes.items():
            if name not in wanted:
                raise UnsupportedModel(
                    f"{folder} holds {shortened(self._stored[name])!r}, which a draft of kind {reads.name} does "
                    "not have as its config.json describes it"
                )
            if wanted[name] != shape:
                raise CorruptModel(self._misfit(name, shape, wanted[name]))
        missing = sorted(wanted.keys() - self._shapes.keys())
        if missing:
            raise CorruptModel(f"{folder} lacks {len(missing)} tensors ({', '.join(missing[:3])}); {AGAIN}")

    def _misfit(self, name: str, found: Shape, wanted: Shape) -> str:
        reads, folder = self.reads, self.folder
        if name == "fc.weight" and found[:1] == wanted[:1]:
            return (
                f"'fc.weight' in {folder} reads {found[-1]} numbers; {len(reads.taps)} layers of a target of hidden "
                f"size {reads.target_hidden} give {reads.n_features}: it was made for another target"
            )
        return (
            f"{self._stored[name]!r} in {folder} is {list(found)}; config.json says {brief(list(wanted))}: weights and "
            "config do not belong together"
        )

    def _wanted(self) -> Mapping[str, Shape]:
        rows = self.reads.n_draft_vocab or (self._shapes[HEAD][0] if self.has_head else 1)
        token_map = torch.empty(rows, device="meta", dtype=torch.int64)
        model = MODELS[type(self.reads)](
            self.reads, torch.device("meta"), torch.float32, token_map=token_map, has_fc=self.has_fc
        )
        lent = {EMBEDDING: self.has_embedding, HEAD: self.has_head}
        return {name: tuple(place.shape) for name, place in places(model).items() if lent.get(name, True)}


def _named(name: str) -> str:
    """A tensor's name by the modules of Saguaro.

    >>> _named("midlayer.mlp.up_proj.weight"), _named("norm.weight"), _named("fc.weight")
    ('model.layers.0.mlp.up_proj.weight', 'model.norm.weight', 'fc.weight')
    """
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def places(model: FeatureDraft) -> dict[str, Tensor]:
    """Name -> the view that a tensor fills; of plain weights."""
    found = destinations(model)
    for part in model.own_parts():
        found |= part.places()
    return found


def _packed(model: FeatureDraft) -> dict[str, PackedPart]:
    """Name -> the part of a packed weight that a tensor fills."""
    found = packed_parts(model)
    for part in model.own_parts():
        found |= part.packed_parts() if isinstance(part, Linear) else {}
    return found


def load_feature_draft(
    files: FeatureFiles,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None,
    *,
    embedding: Tensor | None,  # [V, D] of the target, if the files have none
    head: Linear | None,  # of the target, if the files have none
) -> FeatureDraft:
    """A draft with what its target lends it."""
    model: FeatureDraft = MODELS[type(files.reads)](
        files.reads,
        device,
        dtype,
        token_map=files.token_map,
        has_fc=files.has_fc,
        embedding=embedding,
        head=head,
        kind=kind,
    )
    files.fill(model, kind)
    return model
