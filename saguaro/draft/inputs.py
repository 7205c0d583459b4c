"""What a draft model reads beside tokens: nothing (any language model), or features of its target.

A text's tokens have places: consecutive keys and values on the row's pages. For a language model the token at position
i of the text has place i. An EAGLE-3 draft reads a token together with the feature of the token before, so the first
token has no place. A DFlash draft has places for features alone, so the last token has none yet. Neither have tokens
whose feature never arrived:

    text       t0  t1  t2  t3  t4  t5        the features of t0, t1 and t4 arrived; those of t2 and t3 are lost
    EAGLE-3        0   1           2         shift: tokens of the text before the last place that have none, here 3
    DFlash     0   1           2             shift 2

The rotary position is that of the feature. A feature is dropped when its place is computed; of EAGLE-3 the last one is
kept. Nodes of a tree are read with an EAGLE-3 draft's own state of the node above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro.model.eagle import Eagle
from saguaro.model.feature_draft import FeatureDraft
from saguaro.model.transformer import Transformer


class TextInputs(Protocol):
    """What a draft model reads texts with, and where they begin for it. Positions are those of the text."""

    first: int  # position of the first token that has a place

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:  # [n, F]
        """Add a row's features from position `start` on; needed: position of the first that is not read yet. Returns
        how many are lost."""

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """How many of a text's n places can be computed, or are."""

    def keys(self, text: list[int]) -> list[int]:
        """What the places of a text depend on, for the prefix cache: place i on the first i + 1."""

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:  # [n, D]
        """What the tokens from position `first` on are read with; 0 for what is not held."""

    def positions(self, places: Tensor, shift: Tensor) -> Tensor:  # [B, n], [B]
        """Positions in the text."""

    def rotary(self, places: Tensor, shift: Tensor) -> Tensor:  # [B, n], [B]
        """Positions for rotary embedding."""


class Inputs(TextInputs, Protocol):
    """The same for a model that reads nodes of a tree, too."""

    nodes_are_text: bool  # whether keys and values of accepted nodes are those that the text has

    def of_nodes(self, slots: Tensor, above: Tensor) -> Tensor | None:  # [B], [B, R] -> [B * R, D]
        """What children of the nodes at these places are read with."""

    def keep(self, slots: Tensor, places: Tensor, hidden: Tensor) -> None:  # [B], [B, R], [B * R, D]
        """Keep what children of these nodes are read with."""


class TokenInputs:
    """A language model: tokens are all that it reads."""

    first, nodes_are_text = 0, True

    def retire(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:
        """Features are not read."""
        return 0

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """All."""
        return n

    def keys(self, text: list[int]) -> list[int]:
        """The tokens."""
        return text

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:
        """Nothing."""
        return None

    def of_nodes(self, slots: Tensor, above: Tensor) -> Tensor | None:
        """Nothing."""
        return None

    def keep(self, slots: Tensor, places: Tensor, hidden: Tensor) -> None:
        """Nothing is kept."""

    def positions(self, places: Tensor, shift: Tensor) -> Tensor:
        """A place is a position."""
        return places

    def rotary(self, places: Tensor, shift: Tensor) -> Tensor:
        """A place is a position."""
        return places


@dataclass(frozen=True)
class _Held:
    """Features of consecutive tokens of a text."""

    start: int  # position of the first
    values: Tensor  # [n, F]

    @property
    def end(self) -> int:
        return self.start + len(self.values)


class FeatureTexts:
    """Features of a target, of texts: those of the token before each place, or of its own token."""

    def __init__(self, model: FeatureDraft, first: int) -> None:
        """first: 1: a place is read with the feature of the token before; 0: with that of its own token."""
        self.first, self._model = first, model
        self._held: dict[int, _Held] = {}

    def retire(self, slots: Sequence[int]) -> None:
        """See TextInputs."""
        for slot in slots:
            self._held.pop(slot, None)

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:
        """See TextInputs. What is computed is dropped. Numbers that are not finite, of a damaged target, become 0, so
        that they do not reach other rows."""
        held, values = self._held.get(slot), values.nan_to_num(0.0, 0.0, 0.0)
        if held is not None and held.end == start:
            kept = held.values[max(0, needed - held.start) :]
            self._held[slot] = _Held(start - len(kept), torch.cat((kept, values)))
            return 0
        n_known = min(len(values), max(0, needed - start))
        self._held[slot] = _Held(start + n_known, values[n_known:])
        return max(0, start - needed)

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """See TextInputs. With features of its own tokens alone, the last token needs none: it is not text yet."""
        held = self._held.get(slot)
        known = n_computed if held is None else min(n, max(n_computed, held.end - shift + self.first))
        return n if not self.first and known == n - 1 else known

    def keys(self, text: list[int]) -> list[int]:
        """The tokens. If the first has no place: from the second on; the first, on which every feature depends, is part
        of the second's key.

        >>> FeatureTexts(None, 1).keys([1, 2, 3]) == [2**32 + 2, 3], FeatureTexts(None, 0).keys([1, 2])
        (True, [1, 2])
        """
        if not self.first:
            return text
        return [(text[0] << 32) | text[1], *text[2:]] if len(text) > 1 else []

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:
        """See TextInputs."""
        held, first = self._held[slot], first - self.first
        n_before = min(n, max(0, held.start - first))
        begin = first + n_before - held.start
        states = self._model.read_features(held.values[begin : begin + n - n_before])
        return torch.cat((states.new_zeros(n_before, states.shape[1]), states)) if n_before else states

    def positions(self, places: Tensor, shift: Tensor) -> Tensor:
        """See TextInputs."""
        return places + shift[:, None]

    def rotary(self, places: Tensor, shift: Tensor) -> Tensor:
        """See TextInputs: the position of the feature."""
        return (places + shift[:, None] - self.first).clamp(min=0)


class FeatureInputs(FeatureTexts):
    """An EAGLE-3 draft: features of its target for text, its own states for nodes."""

    nodes_are_text = False

    def __init__(self, model: Eagle, n_slots: int, n_places: int) -> None:
        super().__init__(model, first=1)
        self._eagle = model
        # [slots, places, D]: what children of the node at a place are read with
        self._states = torch.zeros(n_slots, n_places, model.spec.hidden, device=model.device, dtype=model.dtype)

    def of_nodes(self, slots: Tensor, above: Tensor) -> Tensor | None:
        """See Inputs."""
        return self._states[slots[:, None], above.clamp(0, self._states.shape[1] - 1)].flatten(0, 1)

    def keep(self, slots: Tensor, places: Tensor, hidden: Tensor) -> None:
        """See Inputs."""
        self._states[slots[:, None], places] = self._eagle.state_of(hidden).view(*places.shape, -1)


def inputs_of(model: Transformer, n_slots: int, n_places: int) -> Inputs:
    """What this model reads to grow trees, of so many rows with trees of so many places."""
    return FeatureInputs(model, n_slots, n_places) if isinstance(model, Eagle) else TokenInputs()
