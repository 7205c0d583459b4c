"""Loads an EAGLE-3 draft. Its tensors are named as in SafeAILab's or SpecForge's files or as in speculators':

midlayer.*, layers.N.*      the layers; the projections of the first read twice the hidden size
fc, fc_norm.0 ..            from features to a state; older names of the norms: aux_norm_low, _mid, _high
norm, lm_head               lm_head has draft_vocab_size rows; without it the target's head is used
d2t [draft_vocab_size]      row i of lm_head is the token i + d2t[i]
embed_tokens                without it the target's embedding is used
t2d                         not read: it follows from d2t
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.eagle import Eagle
from saguaro.model.eagle_config import EagleSpec
from saguaro.model.files import AGAIN, brief, shortened
from saguaro.model.linear import Linear, Packed, PackedPart
from saguaro.model.load import decode_of
from saguaro.model.norm import Norm
from saguaro.model.rounded import FLOATS, Shape
from saguaro.model.shapes import EMBEDDING, HEAD, IGNORED
from saguaro.model.token_map import fault
from saguaro.model.weights import destinations, headers_in, packed_parts, read_tensor

MAP, UNREAD = "d2t", ("t2d",)
_PREFIXES = {
    "midlayer.": "model.layers.0.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "embed_tokens.": "model.embed_tokens.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


class EagleFiles:
    """The tensors of an EAGLE-3 draft's folder, by the names of Saguaro's modules."""

    def __init__(self, folder: Path, eagle: EagleSpec) -> None:
        """Raise unless these are the tensors that its config describes."""
        self.folder, held = folder, headers_in(folder)
        unread = (MAP, *UNREAD)
        self._stored = {_named(name): name for name in held if name not in unread and not name.endswith(IGNORED)}
        has_norms = any(name.startswith("fc_norm.") for name in self._stored)  # older files do not say so
        self.eagle = replace(eagle, norms_features=eagle.norms_features or has_norms)
        self._shapes = {name: held[own][1] for name, own in self._stored.items()}
        for name, own in self._stored.items():
            if held[own][0] not in FLOATS:
                raise CorruptModel(f"{folder} holds {name!r} as {held[own][0]}; weights are {', '.join(FLOATS)}")
        self.has_embedding, self.has_head = EMBEDDING in self._stored, HEAD in self._stored
        self.has_fc = "fc.weight" in self._stored or eagle.n_features != eagle.layers.hidden
        self.token_map = self._read_token_map(MAP in held) if self.has_head else None
        self._check()

    def fill(self, model: Eagle, kind: type[Packed] | None) -> None:
        """Copy or pack every tensor into the model."""
        plain, packed, copy = places(model), _packed(model), decode_of(kind)
        for name, own in self._stored.items():
            found = read_tensor(self.folder, own)
            if name in plain:
                copy(found, plain[name])
            else:
                packed[name].fill(found)

    def _read_token_map(self, has_map: bool) -> Tensor:  # [head rows] int64
        n_rows, n_vocab = self._shapes[HEAD][0], self.eagle.layers.n_vocab
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
        eagle, folder = self.eagle, self.folder
        if eagle.layers.n_layers > len(self._stored):
            raise CorruptModel(f"{folder} holds fewer tensors than its config.json has layers; {AGAIN}")
        if not self.has_head and eagle.n_draft_vocab not in (None, eagle.layers.n_vocab):
            raise CorruptModel(f"{folder} has no 'lm_head.weight' for its {eagle.n_draft_vocab} tokens; {AGAIN}")
        try:
            wanted = self._wanted()
        except (RuntimeError, TypeError) as e:  # its sizes overflow
            raise CorruptModel(f"{folder}: config.json describes layers larger than any memory; {AGAIN}") from e
        for name, shape in self._shapes.items():
            if name not in wanted:
                raise UnsupportedModel(
                    f"{folder} holds {shortened(self._stored[name])!r}, which an EAGLE-3 draft does not have as its "
                    "config.json describes it"
                )
            if wanted[name] != shape:
                raise CorruptModel(self._misfit(name, shape, wanted[name]))
        missing = sorted(wanted.keys() - self._shapes.keys())
        if missing:
            raise CorruptModel(f"{folder} lacks {len(missing)} tensors ({', '.join(missing[:3])}); {AGAIN}")

    def _misfit(self, name: str, found: Shape, wanted: Shape) -> str:
        eagle, folder = self.eagle, self.folder
        if name == "fc.weight" and found[:1] == wanted[:1]:
            return (
                f"'fc.weight' in {folder} reads {found[-1]} numbers; {len(eagle.taps)} layers of a target of hidden "
                f"size {eagle.target_hidden} give {eagle.n_features}: it was made for another target"
            )
        return (
            f"{self._stored[name]!r} in {folder} is {list(found)}; config.json says {brief(list(wanted))}: weights and "
            "config do not belong together"
        )

    def _wanted(self) -> Mapping[str, Shape]:
        rows = self.eagle.n_draft_vocab or (self._shapes[HEAD][0] if self.has_head else 1)
        token_map = torch.empty(rows, device="meta", dtype=torch.int64)
        model = Eagle(self.eagle, torch.device("meta"), torch.float32, token_map=token_map, has_fc=self.has_fc)
        lent = {EMBEDDING: self.has_embedding, HEAD: self.has_head}
        return {name: tuple(place.shape) for name, place in places(model).items() if lent.get(name, True)}


def _named(name: str) -> str:
    """A tensor's name by the modules of Saguaro.

    >>> _named("midlayer.mlp.up_proj.weight"), _named("norm.weight"), _named("fc.weight")
    ('model.layers.0.mlp.up_proj.weight', 'model.norm.weight', 'fc.weight')
    """
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def stored_name(name: str, n_layers: int) -> str:
    """The opposite, in SafeAILab's and SpecForge's files.

    >>> stored_name("model.layers.0.mlp.up_proj.weight", 1), stored_name("model.norm.weight", 1)
    ('midlayer.mlp.up_proj.weight', 'norm.weight')
    """
    plain = name.removeprefix("model.")
    return plain.replace("layers.0.", "midlayer.", 1) if n_layers == 1 else plain


def places(model: Eagle) -> dict[str, Tensor]:
    """Name -> the view that a tensor fills; of plain weights."""
    found = destinations(model)
    for part in _others(model):
        found |= part.places()
    return found


def _packed(model: Eagle) -> dict[str, PackedPart]:
    """Name -> the part of a packed weight that a tensor fills."""
    found = packed_parts(model)
    for part in _others(model):
        found |= part.packed_parts() if isinstance(part, Linear) else {}
    return found


def _others(model: Eagle) -> Iterator[Linear | Norm]:
    """The modules with weights that no other transformer has."""
    yield from () if model.fc is None else (model.fc,)
    for norm in model.fc_norms:
        assert isinstance(norm, Norm)
        yield norm


def load_eagle(
    files: EagleFiles,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[Packed] | None,
    *,
    embedding: Tensor | None,  # [V, D] of the target, if the files have none
    head: Linear | None,  # of the target, if the files have none
) -> Eagle:
    """An EAGLE-3 draft with what its target lends it."""
    token_map = files.token_map
    model = Eagle(
        files.eagle, device, dtype, token_map=token_map, has_fc=files.has_fc, embedding=embedding, head=head, kind=kind
    )
    files.fill(model, kind)
    return model
