"""Drafted trees in the real loop: what a tree holds is what a model that reads every text anew would compute.

The tokens that come out are the target's in any case (test_conformance). Here a mistake in the draft's own memory must
show: a draft that is the target is always right, and the keys and values of text and tree are compared with fresh ones.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.attention.sdpa import kv_indices
from saguaro.config import SamplingParams
from saguaro.draft import growth, tree
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.tree import Landing, Picked, Trees
from saguaro.kv.memory import KVCache
from saguaro.methods import METHODS
from saguaro.model.products import KVWrite
from saguaro.model.transformer import Transformer
from saguaro.target.request import Request
from saguaro.target.sampler import Sampler
from saguaro.types import CACHE, RoundEvent
from tests.draft.trees import Deepening, entries, expanded
from tests.round.tabular import under
from tests.round.test_conformance import Rig, new_rig
from tests.round.test_unprepared import KERNELS, PLAIN, Moody
from tests.target.test_round import N_KNOWN, SPEC, Written, new_model, new_requests, true_output


@pytest.fixture(scope="module")
def target() -> Transformer:
    return new_model(seed=0)


def drafter_of(rig: Rig) -> TreeDrafter:
    assert isinstance(rig.side.drafter, TreeDrafter)
    return rig.side.drafter


def new_tree_rig(
    draft: Transformer, target: Transformer, kind: str = "eager", method: str = "ssd", **sizes: int
) -> Rig:
    usual: dict[str, Any] = {"width": 2, "lookahead": 3, "budget": 3, "max_rows": 3}
    return new_rig(under("shared", method, fallback="draft"), target, draft, kernels=KERNELS[kind](), **usual | sizes)


class Rightness:
    """Counts, of a draft that is the target, what was accepted and what should have been: the path of best children."""

    def __init__(self, rig: Rig) -> None:
        self.n_rounds = self.n_cached = 0
        self._rig, self._due = rig, defaultdict[Request, list[tuple[int, int]]](list)  # launched, oldest first
        launch = rig.round.verifier.launch

        def watched(batch, spec):  # type: ignore[no-untyped-def]
            for row, length, parents in zip(batch.sampling, spec.length.tolist(), self._parents(spec), strict=True):
                self._due[row.request].append((length, self._first_path(row.request.slot, length, parents)))
            return launch(batch, spec)

        rig.round.verifier.launch = watched  # type: ignore[method-assign]

    @staticmethod
    def _parents(spec) -> list[list[int]]:  # type: ignore[no-untyped-def]
        if spec.parent is None:
            return [list(range(-1, spec.tokens.shape[1] - 1))] * len(spec.length)
        found: list[list[int]] = spec.parent.tolist()
        return found

    def _first_path(self, slot: int, length: int, parents: list[int]) -> int:
        drafter = drafter_of(self._rig)
        nodes, width = drafter._in_flight.get(slot, [])[:length], drafter.trees.token.shape[2]
        at, depth = -1, 0
        for index, node in enumerate(nodes):
            if parents[index] == at and node % width == 0:
                at, depth = index, depth + 1
        return depth

    def run(self, requests: Sequence[Request]) -> None:
        """Serve them all; fails where less than the path of best children is accepted."""
        for request in requests:
            self._rig.scheduler.add(request)
        while self._rig.scheduler.has_work:
            for commit in self._rig.play():
                length, k = self._due[commit.request].pop(0)
                if commit.source in ("cache", "draft"):
                    assert commit.length == length
                    assert commit.k == k, "the draft was wrong"
                    self.n_rounds += 1
                    self.n_cached += commit.source == "cache"


def requests_of(n: int, max_tokens: int = 40) -> list[Request]:
    return new_requests(PLAIN, n=n, max_tokens=max_tokens)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize(("max_rows", "width", "n_more"), [(1, 2, 3), (3, 12, 8), (8, 3, 6)])
def test_a_draft_that_is_the_target_is_always_right(
    max_rows: int, width: int, n_more: int, share: float, kind: str, target: Transformer
) -> None:
    """With and without preparation, as rows come and go, and with more to expand than there are candidates."""
    rig = new_tree_rig(target, target, kind, max_rows=max_rows, width=width, n_more=n_more)
    rig.side.policy.prepare = Moody(seed=max_rows, share=share)
    rig.side.policy.depth = deepening = Deepening(drafter_of(rig), most=2)
    seen = Rightness(rig)
    seen.run(requests_of(6, max_tokens=24))
    assert seen.n_rounds > 20
    assert deepening.n_grown
    assert seen.n_cached > (5 if share < 1 else seen.n_rounds / 2)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("method", ["sd", "ssd"])
def test_texts_up_to_the_limit(method: str, kind: str, target: Transformer) -> None:
    """As a text nears the longest possible, its room shrinks to nothing; others go on beside it."""
    params = SamplingParams(max_tokens=None, temperature=0.0)
    near = Request("near", [(7 * at) % N_KNOWN for at in range(SPEC.max_length - 30)], params, seed=3)
    rig = new_tree_rig(target.without([1]), target, kind, method=method)
    others = requests_of(2, max_tokens=20)
    found = rig.run([near, *others])
    twin = Request("twin", near.prompt, replace(params, max_tokens=30), seed=3)
    assert found == [true_output(target, request) for request in (twin, *others)]


@pytest.mark.parametrize("kind", KERNELS)
def test_rows_that_are_not_prepared_for_are_never_hit(kind: str, target: Transformer) -> None:
    """Though a wide tree has more nodes than are verified, so that it could be hit without being grown."""
    rig = new_tree_rig(target.without([1]), target, kind, width=8, n_more=1, lookahead=4)
    requests = requests_of(6, max_tokens=20)
    for request in requests[::2]:
        request.params = replace(request.params, prepare=False)
    events: list[RoundEvent] = []
    rig.round.observers.append(events.append)
    assert rig.run(requests) == [true_output(target, request) for request in requests]
    hit = {row.request for event in events for row in event.rows if row.source == "cache"}
    assert hit
    assert hit <= {request.id for request in requests[1::2]}


# What the trees hold


class Recorded(Written):
    """Attention over one whole text that keeps the keys and values of every layer."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(n_tokens)
        self.layers: dict[int, Tensor] = {}

    def place(self, layer: int) -> KVWrite:
        self._memory = self.layers.setdefault(layer, torch.empty_like(self._memory))
        return super().place(layer)


@torch.inference_mode()
def anew(model: Transformer, text: Sequence[int]) -> tuple[Tensor, Tensor]:  # [layers, tokens, ...], [1, V]
    """Keys and values of a text, and the logits after it, computed from nothing."""
    attention = Recorded(len(text))
    hidden = model(torch.tensor(text), torch.arange(len(text)), attention)
    return torch.stack([attention.layers[layer] for layer in sorted(attention.layers)]), model.logits(hidden[-1:])


def check_memory(rig: Rig, draft: Transformer) -> tuple[int, int]:
    """Compare text and tree of every row in flight with those of a fresh read: how many rows, and how many nodes."""
    drafter, n_nodes, n_rows = drafter_of(rig), 0, 0
    layers = torch.stack(list(drafter.cache.layers))
    for row in rig.side.rows:
        if row.slot not in drafter._in_flight:
            continue
        n_rows += 1
        trunk, text = drafter.trunks[row.slot], list(row.text)
        assert trunk.n_computed == len(text)
        where = kv_indices(trunk.table.pages, len(text), drafter.cache.page_size)
        known, logits = anew(draft, text)
        assert torch.allclose(layers[:, where], known, rtol=0, atol=1e-5), "the text's keys are not those of the text"
        trees = drafter.trees
        scratch = drafter.scratch + row.slot * (trees.unused + 1)
        found = entries(trees, row.slot)
        places = {(): int(trees.root[row.slot]), **expanded(found)}
        for path, place in places.items():
            if path:
                known, logits = anew(draft, [*text, *path])
                own = layers[:, scratch + place]
                assert torch.allclose(own, known[:, -1], rtol=0, atol=1e-5), "a node's keys are not those of its path"
                n_nodes += 1
            with torch.inference_mode():
                tokens, _ = Sampler(N_KNOWN).rank(logits.clone(), [(row.request, path)], trees.token.shape[2])
            is_listed = trees.score[row.slot, place] > tree.NEVER
            assert trees.token[row.slot, place][is_listed].tolist() == tokens[0][is_listed].tolist()
    return n_rows, n_nodes


CHAINS = [name for name, method in METHODS.items() if method.prepares]  # and trees of 2 and 12 nodes a step
SHAPES = [("ssd", 2, 3, 0.8), ("ssd", 12, 10, 1.0), *((name, 1, 0, 0.8) for name in CHAINS)]


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("method", "width", "n_more", "share"), SHAPES)
def test_text_and_tree_are_those_of_a_fresh_read(
    method: str, width: int, n_more: int, share: float, kind: str, target: Transformer
) -> None:
    """After every round, whatever was accepted, kept, copied and grown: keys, values and candidates."""
    draft = target if METHODS[method].growth == "continuation" else target.without([1])  # these are seldom hit
    rig = new_tree_rig(draft, target, kind, method, width=width, n_more=n_more)
    rig.side.policy.prepare = Moody(seed=2, share=share)
    if METHODS[method].growth == "best":
        rig.side.policy.depth = Deepening(drafter_of(rig), most=2)
    for request in requests_of(4, max_tokens=14 if draft is not target else 40):
        rig.scheduler.add(request)
    n_rows = n_nodes = n_kept = 0
    while rig.scheduler.has_work:
        rig.play()
        more = check_memory(rig, draft)
        n_rows, n_nodes = n_rows + more[0], n_nodes + more[1]
        n_kept += sum(row.source == CACHE for row in rig.side.rows)
    assert n_rows > 20
    assert n_nodes > 60
    assert n_kept > 3


# Mistakes on purpose


def no_copy(self: KVCache, sources: Tensor, places: Tensor) -> None:
    """Accepted keys stay in the tree, and the text has none."""


def wrong_path(trees: Trees, n: int, depth: int, is_chain: bool) -> Picked:
    """A node below another sees the root's first child instead of its parent."""
    picked = tree.pick(trees, n, depth, is_chain)
    path = picked.path.clone()
    is_deep = picked.depth > 1
    path[..., 0] = torch.where(is_deep, (path[..., 0] % 3) + 1, path[..., 0])
    return replace(picked, path=path)


def freed_too_late(trees: Trees, landing: Landing) -> None:
    """Siblings of the new root, and what is below them, stay."""
    used, score = trees.is_used.clone(), trees.score.clone()
    tree.reroot(trees, landing)
    trees.is_used |= used & landing.is_hit[:, None]
    trees.score = torch.where(landing.is_hit[:, None, None] & (trees.score == tree.NEVER), score, trees.score)


def another_place(self: KVCache, sources: Tensor, places: Tensor, move: Callable[..., None] = KVCache.move) -> None:
    """The keys of the place beside the accepted one are copied."""
    move(self, torch.where(sources == places, sources, sources + 1), places)


def by_wrong_paths(patch: pytest.MonkeyPatch) -> None:
    """In the functions that define a growth step, which the kernels stand in for."""
    patch.setattr(growth, "tree_kernels_for", lambda device, kernels: None)
    patch.setattr(growth, "pick", wrong_path)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no copy": lambda patch: patch.setattr(KVCache, "move", no_copy),
    "another's keys": lambda patch: patch.setattr(KVCache, "move", another_place),
    "a wrong path": by_wrong_paths,
    "a sibling left": lambda patch: patch.setattr(growth, "reroot", freed_too_late),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, target: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    rig = new_tree_rig(target, target, max_rows=2)
    for request in requests_of(3):
        rig.scheduler.add(request)

    def play() -> None:
        while rig.scheduler.has_work:
            rig.play()
            check_memory(rig, target)

    with pytest.raises((AssertionError, RuntimeError)):
        play()
