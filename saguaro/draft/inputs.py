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

The last features of every row are in a ring on the device, by position in the text, where captured functions find them:

    position   5   6   7   8   9                 n_recent = 4
    ring       8 | 9 | 6 | 7                     position p is at p % 4

Of a text that is further behind, they are held in another tensor until it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro.device.graphs import to_device
from saguaro.model.eagle import Eagle
from saguaro.model.feature_draft import FeatureDraft
from saguaro.model.transformer import Transformer
from saguaro.types import Features


class TextInputs(Protocol):
    """What a draft model reads texts with, and where they begin for it. Positions are those of the text."""

    first: int  # position of the first token that has a place
    reads_features: bool

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:  # [n, F]
        """Add a row's features from position `start` on; needed: position of the first that is not read yet. Returns
        how many are lost."""

    def put_recent(self, features: Features) -> None:
        """Put the last of these features of each row into the ring, after `put` of all of them."""

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """How many of a text's n places can be computed, or are."""

    def keys(self, text: list[int]) -> list[int]:
        """What the places of a text depend on, for the prefix cache: place i on the first i + 1."""

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:  # [n, D]
        """What the tokens from position `first` on are read with; 0 for what is not held."""

    def of_places(self, slots: Tensor, places: Tensor, shift: Tensor) -> Tensor | None:  # [B], [B, n], [B]
        """What these places are read with, from the ring [B * n, D]; anything finite for those that it lacks."""

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

    first, nodes_are_text, reads_features = 0, True, False

    def retire(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:
        """Features are not read."""
        return 0

    def put_recent(self, features: Features) -> None:
        """Features are not read."""

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """All."""
        return n

    def keys(self, text: list[int]) -> list[int]:
        """The tokens."""
        return text

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:
        """Nothing."""
        return None

    def of_places(self, slots: Tensor, places: Tensor, shift: Tensor) -> Tensor | None:
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
    end: int
    values: Tensor | None  # [n, F]; None: the ring has them all


class FeatureTexts:
    """Features of a target, of texts: those of the token before each place, or of its own token."""

    reads_features = True

    def __init__(self, model: FeatureDraft, first: int, *, n_slots: int, n_recent: int) -> None:
        """first: 1: a place is read with the feature of the token before; 0: with that of its own token. n_recent:
        features of a row in the ring: one more than the last places that a captured function computes."""
        self.first, self._model = first, model
        self._held: dict[int, _Held] = {}
        shape = n_slots, n_recent, model.reads.n_features
        self._ring = torch.zeros(shape, device=model.device, dtype=model.dtype)

    def retire(self, slots: Sequence[int]) -> None:
        """See TextInputs."""
        for slot in slots:
            self._held.pop(slot, None)

    def put(self, slot: int, start: int, values: Tensor, needed: int) -> int:
        """See TextInputs. What is computed is dropped."""
        held, end = self._held.get(slot), start + len(values)
        if held is not None and held.end == start:
            n_lost, first = 0, max(held.start, min(needed, start))
        else:
            held, n_lost, first = None, max(0, start - needed), max(start, min(needed, end))
        if end - first <= self._ring.shape[1]:
            self._held[slot] = _Held(first, end, None)
        elif held is None or first == start:
            self._held[slot] = _Held(first, end, self._finite(values[first - start :]))
        else:
            kept = self._values(slot, held, first, start)
            self._held[slot] = _Held(first, end, torch.cat((kept, self._finite(values))))
        return n_lost

    def put_recent(self, features: Features) -> None:
        """See TextInputs."""
        n_recent, first = self._ring.shape[1], 0
        slots: list[int] = []
        places: list[int] = []
        taken: list[int] = []
        facts = (each.tolist() for each in (features.slots, features.start, features.length))
        for slot, start, n in zip(*facts, strict=True):
            last = range(max(0, n - n_recent), n)
            slots += [slot] * len(last)
            places += [(start + at) % n_recent for at in last]
            taken += [first + at for at in last]
            first += n
        at = to_device([slots, places, taken], self._ring.device)
        values = features.values.to(self._ring.device).index_select(0, at[2])
        self._ring[at[0], at[1]] = self._finite(values)

    def n_ready(self, slot: int, n: int, shift: int, n_computed: int) -> int:
        """See TextInputs. With features of its own tokens alone, the last token needs none: it is not text yet."""
        held = self._held.get(slot)
        known = n_computed if held is None else min(n, max(n_computed, held.end - shift + self.first))
        return n if not self.first and known == n - 1 else known

    def keys(self, text: list[int]) -> list[int]:
        """See keys_from."""
        return keys_from(self.first, text)

    def of_text(self, slot: int, first: int, n: int) -> Tensor | None:
        """See TextInputs."""
        held, first = self._held[slot], first - self.first
        n_before = min(n, max(0, held.start - first))
        states = self._model.read_features(self._values(slot, held, first + n_before, first + n))
        return torch.cat((states.new_zeros(n_before, states.shape[1]), states)) if n_before else states

    def of_places(self, slots: Tensor, places: Tensor, shift: Tensor) -> Tensor | None:
        """See TextInputs."""
        at = (places + shift[:, None] - self.first) % self._ring.shape[1]
        return self._model.read_features(self._ring[slots[:, None], at].flatten(0, 1))

    def positions(self, places: Tensor, shift: Tensor) -> Tensor:
        """See TextInputs."""
        return places + shift[:, None]

    def rotary(self, places: Tensor, shift: Tensor) -> Tensor:
        """See TextInputs: the position of the feature."""
        return (places + shift[:, None] - self.first).clamp(min=0)

    def _values(self, slot: int, held: _Held, start: int, end: int) -> Tensor:  # [end - start, F]
        """Features that are held, from the position `start` on."""
        if held.values is not None:
            return held.values[start - held.start : end - held.start]
        at = torch.arange(start, end, device=self._ring.device) % self._ring.shape[1]
        return self._ring[slot].index_select(0, at)

    def _finite(self, values: Tensor) -> Tensor:
        """As they are kept. Numbers that are not finite, of a damaged target, become 0, so that they do not reach other
        rows."""
        return values.to(self._ring.device, self._ring.dtype).nan_to_num(0.0, 0.0, 0.0)


class FeatureInputs(FeatureTexts):
    """An EAGLE-3 draft: features of its target for text, its own states for nodes."""

    nodes_are_text = False

    def __init__(self, model: Eagle, *, n_slots: int, n_places: int, n_recent: int) -> None:
        super().__init__(model, first=1, n_slots=n_slots, n_recent=n_recent)
        self._eagle = model
        # [slots, places, D]: what children of the node at a place are read with
        self._states = torch.zeros(n_slots, n_places, model.spec.hidden, device=model.device, dtype=model.dtype)

    def of_nodes(self, slots: Tensor, above: Tensor) -> Tensor | None:
        """See Inputs."""
        return self._states[slots[:, None], above.clamp(0, self._states.shape[1] - 1)].flatten(0, 1)

    def keep(self, slots: Tensor, places: Tensor, hidden: Tensor) -> None:
        """See Inputs."""
        self._states[slots[:, None], places] = self._eagle.state_of(hidden).view(*places.shape, -1)


def keys_from(first: int, text: list[int]) -> list[int]:
    """The tokens. If the first has no place: from the second on; the first, on which every feature depends, is part of
    the second's key.

    >>> keys_from(1, [1, 2, 3]) == [2**32 + 2, 3], keys_from(0, [1, 2])
    (True, [1, 2])
    """
    if not first:
        return text
    return [(text[0] << 32) | text[1], *text[2:]] if len(text) > 1 else []


def inputs_of(model: Transformer, *, n_slots: int, n_places: int, n_recent: int) -> Inputs:
    """What this model reads to grow trees, of so many rows with trees of so many places; n_recent: see FeatureTexts."""
    if isinstance(model, Eagle):
        return FeatureInputs(model, n_slots=n_slots, n_places=n_places, n_recent=n_recent)
    return TokenInputs()
