"""The kinds of drafts that are trained: how each begins, learns and is written.

model     layers of the target and rows of its head (saguaro.distill.student)
eagle3    an EAGLE-3 head (saguaro.distill.eagle_head)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from saguaro.distill.eagle_head import load_head, make_head, pick_taps, save_head, with_rows
from saguaro.distill.eagle_learner import EagleLearner
from saguaro.distill.learner import Learner, ModelLearner
from saguaro.distill.recipe import Recipe
from saguaro.distill.student import make_student, pick_layers, save_student, with_head
from saguaro.errors import ConfigError
from saguaro.model.default import DRAFT
from saguaro.model.eagle import Eagle
from saguaro.model.load import Loaded, borrows, load_borrower
from saguaro.model.transformer import Transformer

LAYERS, HEAD, EAGLE_HEAD = 3, 8192, 32000


class Kind(Protocol):
    """How a draft begins, learns and is written."""

    @property
    def layers(self) -> int | None:
        """Layers of a new draft, which are the target's; None: it has others."""

    @property
    def head(self) -> int | None:
        """Rows of its head; None: those it begins from."""

    def check(self, target: Loaded) -> None:
        """Raise if such a draft cannot be made for the target."""

    def begin(self, target: Loaded, counts: Tensor, ends: frozenset[int]) -> Transformer:  # [V]
        """The draft at first, in float32; counts: how often the target says each token; ends: those that end a text."""

    def learner(self, draft: Transformer, target: Transformer, recipe: Recipe) -> Learner:
        """How it learns."""

    def save(self, draft: Transformer, folder: Path) -> None:
        """Write the folder for --draft."""


@dataclass(frozen=True)
class ModelKind:
    """A small language model. See Kind."""

    layers: int | None
    head: int | None
    start: str | None
    dtype: torch.dtype | None  # that it is stored in; None: half precision

    def check(self, target: Loaded) -> None:
        """See Kind."""
        if self.layers is not None:
            pick_layers(target.model.spec.n_layers, self.layers)
        if self.start is not None:
            self._load(self.start, target)

    def begin(self, target: Loaded, counts: Tensor, ends: frozenset[int]) -> Transformer:
        """See Kind: another draft, or layers of the target and its most frequent tokens."""
        model = target.model
        ids = frequent(counts, self.head, ends) if self.head is not None else None
        if self.start is not None:
            draft = self._load(self.start, target)
            return draft if ids is None else with_head(draft, model, ids)
        assert self.layers is not None
        assert ids is not None
        return make_student(model, pick_layers(model.spec.n_layers, self.layers), ids)

    def learner(self, draft: Transformer, target: Transformer, recipe: Recipe) -> Learner:
        """See Kind."""
        return ModelLearner(draft, target, recipe)

    def save(self, draft: Transformer, folder: Path) -> None:
        """See Kind."""
        save_student(draft, folder, self.dtype)

    @staticmethod
    def _load(start: str, target: Loaded) -> Transformer:
        folder = DRAFT if start == "default" else Path(start)
        if not borrows(folder):
            raise ConfigError(f"start is {start}, which is no draft that `saguaro distill` made; give one")
        return load_borrower(folder, target.path, target.model.embedding, target.model.device, torch.float32)


@dataclass(frozen=True)
class EagleKind:
    """An EAGLE-3 head. See Kind."""

    head: int | None
    start: str | None
    feature_layers: Sequence[int] | None  # of a new one; None: the usual ones
    seed: int
    layers: int | None = None

    def check(self, target: Loaded) -> None:
        """See Kind."""
        if self.start is None:
            pick_taps(target.model.spec.n_layers, self.feature_layers)
        else:
            load_head(Path(self.start), target)

    def begin(self, target: Loaded, counts: Tensor, ends: frozenset[int]) -> Transformer:
        """See Kind: another head, or a new one. Rows are in the order of tokens, as other trainers have them."""
        model = target.model
        ids = None if self.head is None else frequent(counts, self.head, ends).sort().values
        if self.start is None:
            assert ids is not None
            return make_head(model, pick_taps(model.spec.n_layers, self.feature_layers), ids, self.seed)
        draft = load_head(Path(self.start), target)
        if ids is None and draft.token_map is None:  # its head is the target's
            ids = torch.arange(model.spec.n_vocab)
        return draft if ids is None else with_rows(draft, model, ids)

    def learner(self, draft: Transformer, target: Transformer, recipe: Recipe) -> Learner:
        """See Kind."""
        assert isinstance(draft, Eagle)
        return EagleLearner(draft, target, recipe)

    def save(self, draft: Transformer, folder: Path) -> None:
        """See Kind."""
        assert isinstance(draft, Eagle)
        save_head(draft, folder)


def frequent(counts: Tensor, n: int, always: frozenset[int]) -> Tensor:  # [V] -> [at most n] int64
    """The most frequent tokens, most frequent first, including those in `always`.

    >>> frequent(torch.tensor([5, 0, 9, 2]), 2, frozenset({1}))
    tensor([2, 1])
    """
    worth = counts.clone()
    worth[list(always)] = torch.iinfo(worth.dtype).max
    chosen = worth.argsort(descending=True, stable=True)[:n]
    chosen = chosen[worth[chosen] > 0]
    return chosen[counts[chosen].argsort(descending=True, stable=True)]
