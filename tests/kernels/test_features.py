"""Drafts that read features, with Triton's kernels and with their plain twins: the same speculations.

Where there is no GPU the kernels run in the interpreter, and nothing is captured.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro import methods
from saguaro.config import SamplingParams
from saguaro.kernels import linear
from saguaro.kernels.bundle import Kernels, plain_kernels, triton_kernels
from saguaro.model.feature_draft import FeatureDraft
from saguaro.model.linear import Linear
from saguaro.model.transformer import Transformer
from saguaro.types import Features, Joined, Outcome
from tests.draft.config import new_config
from tests.round.dflashes import near_dflash
from tests.round.eagles import calm_model, near_eagle
from tests.round.features import whole
from tests.target.test_round import N_KNOWN

CPU = torch.device("cpu")
TEXTS = [[5, 9, 2, 7, 7, 1, 30, 12, 4], [3, 14, 15, 9, 2, 6]]
FEW = 8  # multiprocessors


def in_float32(model: FeatureDraft) -> FeatureDraft:
    """The same model, with weights in the order of a GPU. Its target's embedding changes with it."""
    model = model.float()
    model.dtype = torch.float32
    if not isinstance(model.embedding, torch.nn.Parameter):
        model.embedding = model.embedding.float()
    for part in model.modules():
        if isinstance(part, Linear):
            part.matrix.data = part.matrix.data.float().t().contiguous().t()
    return model


def features_of(target: Transformer) -> Features:
    """Of both texts but their last tokens."""
    each = [whole(target, text) for text in TEXTS]
    lengths = torch.tensor([len(one) for one in each])
    return Features(torch.tensor([0, 1]), torch.tensor([0, 0]), lengths, torch.cat(each).float())


def said(draft: FeatureDraft, features: Features, kernels: Kernels, **settings: Any) -> list[Tensor]:
    """Tokens, parents and sources: after the texts, and after an outcome that was prepared for or not."""
    side = methods.draft_side(new_config(N_KNOWN, lookahead=2, budget=3, **settings), draft, kernels)
    params = SamplingParams(temperature=1.0)
    side.admit([Joined(slot, list(text), 1, 3 + slot, params) for slot, text in enumerate(TEXTS)])
    side.respond(replace(Outcome.nothing(), features=features), [], [])
    side.prepare()
    spec = side.respond(Outcome.nothing(), [0, 1], [4, 4])
    side.prepare()
    slots, none = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
    told = Outcome(slots, spec.length, none, spec.tokens[:, 0] * 0 + 9)
    ends = torch.tensor([len(text) - 1 for text in TEXTS])
    own = Features(slots, ends, none + 1, features.values[:2])
    after = side.respond(replace(told, features=own), [0, 1], [4, 4])
    found = [spec.tokens, spec.source, after.tokens, after.source]
    return [*found, *(each.parent for each in (spec, after) if each.parent is not None)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has whole engines")
@pytest.mark.parametrize(
    ("make", "shape"),
    [(near_eagle, {"growth": "best", "nodes": 5, "width": 2}), (near_dflash, {"growth": "uniform"})],
    ids=["eagle", "dflash"],
)
def test_kernels_draft_as_their_twins(
    make: Callable[[Transformer], FeatureDraft],
    shape: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "choose_on", lambda device: partial(linear.choose, n_multiprocessors=FEW))
    target = calm_model(seed=0)
    features = features_of(target)
    draft = in_float32(make(target))
    ours, twins = (said(draft, features, kernels, **shape) for kernels in (triton_kernels(CPU), plain_kernels()))
    assert all(torch.equal(one, other) for one, other in zip(ours, twins, strict=True))
