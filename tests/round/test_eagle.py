"""The loop with EAGLE-3 drafts: the tokens are the target's own, and the draft reads what the description says.

A draft that reads a wrong feature changes no token, so its proposals are compared with those of a draft that has never
heard of the text before.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro import methods
from saguaro.attention.sdpa import kv_indices
from saguaro.config import SamplingParams
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.rows import DraftRow
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.link.inline import Inline
from saguaro.model.eagle import Eagle
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide
from saguaro.target.sampler import Sampler
from saguaro.types import DRAFT, Features, Joined, Outcome, Speculation
from tests.draft.config import new_config
from tests.model.eagle_reference import watched
from tests.round.eagles import calm_model, near_eagle, random_eagle
from tests.round.features import ATTENDED, MANY, PLAIN, Forgets, accepted, check_captured, check_law, one, whole
from tests.round.tabular import under
from tests.round.test_conformance import MODEL_VARIANTS, N_REQUESTS, new_rig, variant
from tests.target.test_round import N_KNOWN, STYLES, new_requests, true_output


@pytest.fixture(scope="module")
def target() -> Transformer:
    return calm_model(seed=0)


@pytest.fixture(scope="module")
def near(target: Transformer) -> Eagle:
    return near_eagle(target)


@pytest.fixture(scope="module")
def truth(target: Transformer) -> list[list[int]]:
    """The outputs of new_requests(n=N_REQUESTS)."""
    return [true_output(target, request) for request in new_requests(n=N_REQUESTS)]


class Checked(Inline):
    """What the draft says just in time is what one says that reads the whole text now, and so are its keys and values;
    after a preparation too."""

    target: Transformer
    draft: Eagle
    tolerance = 1e-9
    n_checked = n_prepared = n_with_gaps = 0

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        spec = super().speculate(outcome, slots, room)
        facts = zip(slots, spec.source.tolist(), spec.length.tolist(), spec.tokens.tolist(), strict=True)
        for slot, source, n, tokens in facts:
            row = self.whole_row(slot) if source == DRAFT else None
            if row is not None:
                other = self.afresh(row, n)
                assert torch.equal(other.tokens[0, :n], torch.tensor(tokens[:n]))
                self.n_checked += 1
        return spec

    def overlap(self) -> None:
        super().overlap()
        assert isinstance(self.side.drafter, TreeDrafter)
        for slot in self.side.drafter._in_flight if self.side.drafter.prepares else ():
            row = self.whole_row(slot)
            if row is not None:
                self.afresh(row, 2)
                self.n_prepared += 1

    def whole_row(self, slot: int) -> DraftRow | None:
        """A row without gaps."""
        assert isinstance(self.side.drafter, TreeDrafter)
        has_gaps = self.side.drafter.trunks[slot].shift > 1  # the target's cache had more than the draft's
        self.n_with_gaps += has_gaps
        return None if has_gaps else self.side.rows.get(slot)

    def afresh(self, row: DraftRow, n: int) -> Speculation:
        """What another draft says, which has the same keys and values."""
        side, features, none = new_side(self.draft, lookahead=max(n, 2), n_tokens=256), self.features(row), one(0)
        side.admit([Joined(0, list(row.text), len(row.request.prompt), row.request.seed, row.request.params)])
        given = Features(none, none, none + len(features), features)
        side.respond(replace(Outcome.nothing(), features=given), [], [])
        side.prepare()
        spec = side.respond(Outcome.nothing(), [0], [n])
        assert spec.source.tolist() == [DRAFT]
        ours, theirs = memory_of(self.side, row.slot), memory_of(side, 0)
        assert torch.allclose(ours[:, : len(row.text) - 2], theirs[:, : len(row.text) - 2], atol=self.tolerance)
        return spec

    def features(self, row: DraftRow) -> Tensor:
        return whole(self.target, row.text)


def memory_of(side: DraftSide, slot: int) -> Tensor:  # [layers, n, 2 * H_kv, d]
    """The keys and values of a row's places."""
    drafter = side.drafter
    assert isinstance(drafter, TreeDrafter)
    row = side.rows.get(slot)
    assert row is not None
    kv_index = kv_indices(drafter.trunks[slot].table.pages, drafter.length(row), drafter.cache.page_size)
    return drafter.cache.memory[:, kv_index]


def new_side(draft: Eagle, kernels: Kernels | None = None, **settings: int) -> DraftSide:
    """A draft's side that drafts just in time."""
    return methods.draft_side(new_config(N_KNOWN, **settings), draft, kernels)


@pytest.mark.parametrize("method", ["sd", "ssd-uniform", "swiftspec", "ssd trees"])
def test_captured_steps_give_the_true_tokens(
    method: str, target: Transformer, near: Eagle, truth: list[list[int]]
) -> None:
    """As on a GPU, but that nothing is captured: of the target, and of the draft."""
    parts, trees = variant(method)
    rig = new_rig(parts, target, near, **trees, kernels=plain_kernels())
    check_captured(rig, truth, prepares=parts.prepares)


@pytest.mark.parametrize("method", MODEL_VARIANTS)
def test_shared_noise_gives_the_true_tokens(
    method: str, target: Transformer, near: Eagle, truth: list[list[int]]
) -> None:
    parts, trees = variant(method)
    rig = new_rig(parts, target, near, **trees)
    outputs, n_accepted = accepted(rig, new_requests(n=N_REQUESTS))
    assert outputs == truth
    assert n_accepted > 0, "it is right now and then"
    if parts.growth != "continuation":  # which is a hit only if all was accepted
        assert bool(rig.sources["cache"]) == parts.prepares


@pytest.mark.parametrize("method", ["sd trees", "swiftspec", "ssd trees", "ssd-uniform"])
def test_a_draft_that_is_nearly_always_wrong_changes_nothing(
    method: str, target: Transformer, truth: list[list[int]]
) -> None:
    parts, trees = variant(method)
    rig = new_rig(parts, target, random_eagle(target, seed=1), **trees, lookahead=3, budget=3)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert rig.sources["draft"] > 0


@pytest.mark.parametrize("draft_tokens", [1200, 0])  # 0: the draft has room for a text or two
@pytest.mark.parametrize("method", ["sd", "ssd-uniform", "swiftspec trees"])
def test_preemption_changes_nothing(
    method: str, draft_tokens: int, target: Transformer, near: Eagle, truth: list[list[int]]
) -> None:
    parts, trees = variant(method)
    sizes: dict[str, Any] = {"n_pages": 14, "max_tokens": 64, "draft_tokens": draft_tokens}
    rig = new_rig(parts, target, near, lookahead=3, budget=3, **trees, **sizes)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert rig.scheduler.n_preemptions > 0


@pytest.mark.parametrize(
    ("method", "n_pages", "is_captured"),
    [
        ("sd", 14, False),
        ("ssd-uniform", 300, False),
        ("swiftspec", 14, False),
        ("sd", 14, True),
        ("ssd-uniform", 300, True),
        ("swiftspec", 14, True),
    ],
)
def test_what_is_drafted_is_what_a_draft_says_that_reads_the_whole_text(
    method: str, n_pages: int, is_captured: bool, target: Transformer, near: Eagle
) -> None:
    """In company, after hits, with prompts in parts; rows are preempted, and the second time their pages are cached.
    What captured steps say is what eager ones do."""
    sizes: dict[str, Any] = {"n_pages": n_pages, "max_tokens": 24, "lookahead": 3}
    kernels, styles = (plain_kernels(), PLAIN) if is_captured else (None, tuple(STYLES))
    rig = new_rig(variant(method)[0], target, near, link=Checked, kernels=kernels, **sizes)
    link = rig.round.draft
    assert isinstance(link, Checked)
    link.target, link.draft, link.tolerance = target, near, ATTENDED if is_captured else link.tolerance
    true = [true_output(target, request) for request in new_requests(styles, n=N_REQUESTS, max_tokens=8)]
    for _ in range(2):
        assert rig.run(new_requests(styles, n=N_REQUESTS, max_tokens=8)) == true
    assert link.n_checked > 30
    assert bool(link.n_prepared) == (method != "sd")
    assert link.n_with_gaps < link.n_checked


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_a_draft_that_lost_features_goes_on_without_them(
    method: str, kernels: Kernels | None, target: Transformer, near: Eagle, truth: list[list[int]]
) -> None:
    """What the target computed meanwhile is a gap in the text; after it the draft is of use at once."""
    rig = new_rig(variant(method)[0], target, near, link=Forgets, kernels=kernels)
    outputs, n_accepted = accepted(rig, new_requests(n=N_REQUESTS))
    assert outputs == truth
    assert n_accepted > 10
    assert isinstance(rig.side.drafter, TreeDrafter)


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@torch.inference_mode()
def test_after_a_gap_positions_are_those_of_the_text(kernels: Kernels | None, target: Transformer, near: Eagle) -> None:
    """A row whose first features are lost computes what one does that never had those tokens, and is drafted with the
    noise of its own positions."""
    text, said = [5, 9, 2, 7, 7, 1, 30, 12, 4], dict[int, list[Tensor]]({0: [], 3: []})
    features, none = whole(target, text), one(0)
    for lost in said:
        side, own = new_side(near, kernels), text[3 - lost :]
        assert isinstance(side.drafter, TreeDrafter)
        side.drafter.runner.logits = watched(side.drafter.runner.logits, said[lost])  # type: ignore[assignment]
        side.admit([Joined(0, own, 1, 3, SamplingParams(temperature=1.0))])
        n = len(own) - 1 - lost
        given = Features(none, none + lost, none + n, features[-n:])
        tokens = side.respond(replace(Outcome.nothing(), features=given), [0], [4]).tokens[0].tolist()
        row = side.rows.get(0)
        assert row is not None
        for k, logits in enumerate(said[lost]):
            assert int(Sampler(N_KNOWN)(logits.clone(), [(row.request, tokens[:k])])) == tokens[k]
    assert torch.allclose(said[0][0], said[3][0], atol=1e-5)


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@pytest.mark.parametrize("method", ["sd", "saguaro", "ssd-uniform"])
def test_rejection_at_temperature_0_gives_the_true_tokens(
    method: str, kernels: Kernels | None, target: Transformer, near: Eagle
) -> None:
    requests = new_requests(["greedy"], n=N_REQUESTS)
    rig = new_rig(under("rejection", method), target, near, lookahead=3, budget=4, kernels=kernels)
    assert rig.run(requests) == [true_output(target, request) for request in requests]


@pytest.mark.parametrize(
    ("method", "width", "kernels"),
    [
        ("sd", 1, None),
        ("ssd-uniform", 1, None),
        ("swiftspec", 2, None),
        pytest.param("swiftspec", 2, plain_kernels(), id="captured"),
    ],
)
def test_rejection_at_temperature_1_keeps_the_targets_law(
    method: str, width: int, kernels: Kernels | None, target: Transformer, near: Eagle
) -> None:
    rig = new_rig(under("rejection", method), target, near, width=width, n_more=2, kernels=kernels, **MANY)
    check_law(rig, target, 600)
