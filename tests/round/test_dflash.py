"""The loop with DFlash drafts: the tokens are the target's own, and the draft reads what the description says.

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
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.block_pass import Asked
from saguaro.draft.rows import DraftRow
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.link.inline import Inline
from saguaro.model.dflash import DFlash
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide
from saguaro.target.sampler import Sampler
from saguaro.types import CACHE, DRAFT, Features, Joined, Outcome, Speculation
from tests.draft.config import new_config
from tests.model.eagle_reference import watched
from tests.round.dflashes import near_dflash, random_dflash
from tests.round.eagles import calm_model
from tests.round.features import ATTENDED, MANY, PLAIN, Forgets, accepted, check_captured, check_law, one, whole
from tests.round.tabular import under
from tests.round.test_conformance import N_REQUESTS, new_rig, variant
from tests.target.test_round import N_KNOWN, STYLES, new_requests, true_output

# Beside BLOCKS of tests.round.test_conformance.
OTHERS = ["sd trees", "amusd", "pearl", "specbranch", "saguaro", "swiftspec trees", "ssd suffix trees"]


@pytest.fixture(scope="module")
def target() -> Transformer:
    return calm_model(seed=0)


@pytest.fixture(scope="module")
def near(target: Transformer) -> DFlash:
    return near_dflash(target)


@pytest.fixture(scope="module")
def truth(target: Transformer) -> list[list[int]]:
    """The outputs of new_requests(n=N_REQUESTS)."""
    return [true_output(target, request) for request in new_requests(n=N_REQUESTS)]


class Checked(Inline):
    """What the draft says just in time is what one says that reads the whole text now; and what it had prepared is what
    one says that reads the text as it was then. So are the keys and values of the text."""

    target: Transformer
    draft: DFlash
    tolerance = 1e-9
    n_checked = n_prepared = 0

    def speculate(self, outcome: Outcome, slots: Sequence[int], room: Sequence[int]) -> Speculation:
        before = {row.slot: list(row.text) for row in self.side.rows}
        spec = super().speculate(outcome, slots, room)
        facts = zip(slots, spec.source.tolist(), spec.length.tolist(), spec.tokens.tolist(), strict=True)
        for slot, source, n, tokens in facts:
            row = self.whole_row(slot) if source in (DRAFT, CACHE) else None
            if row is not None:
                text = before[slot] if source == CACHE else row.text
                assert self.afresh(row, text, n) == tokens[:n]
                self.n_checked += source == DRAFT
                self.n_prepared += source == CACHE
        return spec

    def whole_row(self, slot: int) -> DraftRow | None:
        """A row without gaps."""
        assert isinstance(self.side.drafter, BlockDrafter)
        has_gaps = self.side.drafter.trunks[slot].shift > 0
        return None if has_gaps else self.side.rows.get(slot)

    def afresh(self, row: DraftRow, text: list[int], n: int) -> list[int]:
        """The chain that another draft says after the row's text, that has the features of this beginning of it."""
        drafter = self.side.drafter
        assert isinstance(drafter, BlockDrafter)
        side, known = new_side(self.draft, lookahead=4, n_tokens=256), row.text[len(text) :]
        other, none = side.drafter, one(0)
        assert isinstance(other, BlockDrafter)
        features = whole(self.target, text)
        side.admit([Joined(0, list(text), len(row.request.prompt), row.request.seed, row.request.params)])
        side.respond(replace(Outcome.nothing(), features=Features(none, none, none + len(features), features)), [], [])
        side.prepare()
        own = side.rows.get(0)
        assert own is not None
        other.catch_up(other.ready([own]))
        with torch.inference_mode():
            n_positions = drafter._pass.n_positions(4 + drafter.prepares)
            said = other._pass([Asked(own, tuple(known), n_positions)], torch.ones(5))[0]
        mine, theirs = memory_of(drafter, row), memory_of(other, own)
        shared = min(mine.shape[1], theirs.shape[1])
        assert torch.allclose(mine[:, :shared], theirs[:, :shared], atol=self.tolerance)
        return [each[0].token for each in said.positions[:n]]


def memory_of(drafter: BlockDrafter, row: DraftRow) -> Tensor:  # [layers, n, 2 * H_kv, d]
    """The keys and values of a row's computed places."""
    trunk = drafter.trunks[row.slot]
    return drafter.cache.memory[:, kv_indices(trunk.table.pages, trunk.n_computed, drafter.cache.page_size)]


def new_side(draft: DFlash, kernels: Kernels | None = None, **settings: Any) -> DraftSide:
    """A draft's side that drafts just in time."""
    return methods.draft_side(new_config(N_KNOWN, **settings), draft, kernels)


@pytest.mark.parametrize("method", ["sd", "ssd-uniform", "swiftspec trees", "ssd suffix trees"])
def test_captured_steps_give_the_true_tokens(
    method: str, target: Transformer, near: DFlash, truth: list[list[int]]
) -> None:
    """As on a GPU, but that nothing is captured: of the target, and of the draft."""
    parts, given = variant(method)
    rig = new_rig(parts, target, near, **given, kernels=plain_kernels())
    check_captured(rig, truth, prepares=parts.prepares)


@pytest.mark.parametrize("method", OTHERS)
def test_shared_noise_gives_the_true_tokens(
    method: str, target: Transformer, near: DFlash, truth: list[list[int]]
) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, near, **given)
    outputs, n_accepted = accepted(rig, new_requests(n=N_REQUESTS))
    assert outputs == truth
    assert n_accepted > 0, "it is right now and then"
    if parts.growth != "continuation":  # which is a hit only if all was accepted
        assert bool(rig.sources["cache"]) == parts.prepares


@pytest.mark.parametrize("method", ["swiftspec trees"])
def test_a_draft_that_is_nearly_always_wrong_changes_nothing(
    method: str, target: Transformer, truth: list[list[int]]
) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, random_dflash(target, seed=1), **given, lookahead=3, budget=3)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert rig.sources["draft"] > 0


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
    method: str, n_pages: int, is_captured: bool, target: Transformer, near: DFlash
) -> None:
    """In company, after hits, with prompts in parts; rows are preempted, and the second time their pages are cached.
    What captured passes say is what eager ones do."""
    sizes: dict[str, Any] = {"n_pages": n_pages, "max_tokens": 24, "lookahead": 4}
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
    assert (rig.scheduler.n_preemptions > 0) == (n_pages < 300)


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_a_draft_that_lost_features_goes_on_without_them(
    method: str, kernels: Kernels | None, target: Transformer, near: DFlash, truth: list[list[int]]
) -> None:
    """What the target computed meanwhile is a gap in the text; after it the draft is of use at once."""
    rig = new_rig(variant(method)[0], target, near, link=Forgets, kernels=kernels)
    outputs, n_accepted = accepted(rig, new_requests(n=N_REQUESTS))
    assert outputs == truth
    assert n_accepted > 10


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@torch.inference_mode()
def test_after_a_gap_positions_are_those_of_the_text(
    kernels: Kernels | None, target: Transformer, near: DFlash
) -> None:
    """A row whose first features are lost computes what one does that never had those tokens, and is drafted with the
    noise of its own positions."""
    text, said = [5, 9, 2, 7, 7, 1, 30, 12, 4], dict[int, list[Tensor]]({0: [], 3: []})
    features, none = whole(target, text), one(0)
    for lost in said:
        side, own = new_side(near, kernels), text[3 - lost :]
        assert isinstance(side.drafter, BlockDrafter)
        side.drafter.runner.logits = watched(side.drafter.runner.logits, said[lost])  # type: ignore[method-assign,assignment]
        side.admit([Joined(0, own, 1, 3, SamplingParams(temperature=1.0))])
        n = len(own) - 1 - lost
        given = Features(none, none + lost, none + n, features[-n:])
        tokens = side.respond(replace(Outcome.nothing(), features=given), [0], [4]).tokens[0].tolist()
        row = side.rows.get(0)
        assert row is not None
        for k, logits in enumerate(said[lost][0]):
            assert int(Sampler(N_KNOWN)(logits[None].clone(), [(row.request, tokens[:k])])) == tokens[k]
    assert torch.allclose(said[0][0], said[3][0], atol=1e-5)


@pytest.mark.parametrize("kernels", [None, plain_kernels()], ids=["eager", "captured"])
@pytest.mark.parametrize(("method", "width"), [("saguaro", 1), ("swiftspec", 2)])
def test_rejection_at_temperature_0_gives_the_true_tokens(
    method: str, width: int, kernels: Kernels | None, target: Transformer, near: DFlash
) -> None:
    requests = new_requests(["greedy"], n=N_REQUESTS)
    rig = new_rig(under("rejection", method), target, near, width=width, lookahead=3, budget=4, kernels=kernels)
    assert rig.run(requests) == [true_output(target, request) for request in requests]


@pytest.mark.parametrize(
    ("method", "width", "kernels"),
    [("ssd-uniform", 1, None), ("swiftspec", 2, None), pytest.param("swiftspec", 2, plain_kernels(), id="captured")],
)
def test_rejection_at_temperature_1_keeps_the_targets_law(
    method: str, width: int, kernels: Kernels | None, target: Transformer, near: DFlash
) -> None:
    rig = new_rig(under("rejection", method), target, near, width=width, n_more=2, kernels=kernels, **MANY)
    check_law(rig, target, 300)
