"""The tensor names and shapes that a model's spec implies, checked against the files before the model is built.

A config.json can claim any size. It is compared with the names and shapes in the files, so that memory is allocated
only for weights that exist.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch

from saguaro.errors import CorruptModel
from saguaro.model.files import AGAIN, brief, shortened
from saguaro.model.layout import Layout
from saguaro.model.rounded import Shape
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import Layer

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
IGNORED = (".rotary_emb.inv_freq",)  # in old checkpoints; computed from the config

_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)")


def is_ignored(name: str, is_tied: bool) -> bool:
    """Whether a stored tensor is not needed: computed from the config, or a second copy of a tied embedding."""
    return name.endswith(IGNORED) or (is_tied and name == HEAD)


class Shapes:
    """The tensors that a model needs. Memory does not grow with the layers, since a config.json can claim a billion."""

    def __init__(self, spec: ModelSpec, n_head: int | None = None, *, is_lent: bool = False) -> None:
        """n_head: rows of a reduced head, which is never tied; is_lent: the embedding is that of another model."""
        self._spec, self._is_lent, self.is_tied = spec, is_lent, spec.is_tied and n_head is None
        self._top: dict[str, Shape] = {NORM: (spec.hidden,)}
        if not is_lent:
            self._top[EMBEDDING] = (spec.n_vocab, spec.hidden)
        if not self.is_tied:
            self._top[HEAD] = (spec.n_vocab if n_head is None else n_head, spec.hidden)

    @cached_property
    def _layer(self) -> dict[str, Shape]:
        """The tensors of one layer, built without memory."""
        parts = Layer(self._spec, Layout(torch.device("meta"), torch.float32)).places()
        return {name: tuple(place.shape) for name, place in parts.items()}

    def check(self, held: Iterable[tuple[str, Shape]], source: Path, said_by: str = "config.json") -> None:
        """Raise unless source holds these tensors and no others; said_by: the source of the spec, for messages."""
        try:
            n_parts = len(self._layer)
        except (RuntimeError, TypeError) as e:  # its sizes overflow
            raise CorruptModel(f"{source}: {said_by} describes layers larger than any memory; {AGAIN}") from e
        found: set[str] = set()
        for name, shape in held:
            if is_ignored(name, self.is_tied):
                continue
            if name == EMBEDDING and self._is_lent:
                raise CorruptModel(f"{source} holds {name!r}, which its {said_by} says is the target's; write it again")
            wanted = self.get(name)
            if wanted is None:
                raise CorruptModel(
                    f"{source} holds {shortened(name)!r}, which {self._spec.architecture} does not have as {said_by} "
                    "describes it: weights and config do not belong together"
                )
            if wanted != shape:
                raise CorruptModel(
                    f"{name!r} in {source} is {list(shape)}; {said_by} says {brief(list(wanted))}: weights and config "
                    "do not belong together"
                )
            found.add(name)
        n_missing = len(self._top) + self._spec.n_layers * n_parts - len(found)
        if n_missing:
            some = ", ".join(islice((name for name in self if name not in found), 3))
            raise CorruptModel(f"{source} lacks {brief(n_missing)} tensors ({some}, ...); {AGAIN}")

    def get(self, name: str) -> Shape | None:
        """The shape of a tensor; None if the model has no tensor of this name."""
        inner = _LAYER.fullmatch(name)
        if inner is None:
            return self._top.get(name)
        return self._layer.get(inner[2]) if int(inner[1]) < self._spec.n_layers else None

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""
        yield from self._top
        for index in range(self._spec.n_layers):
            yield from (f"model.layers.{index}.{part}" for part in self._layer)
