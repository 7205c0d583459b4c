"""What every method must do, on tiny real transformers: the table of methods is the list of cases.

Under shared noise the tokens are the true ones, in company, when pages run out, when requests come and go; under
rejection they are at temperature 0, and at temperature 1 a function of the seed. Both page pools balance after every
round. What was prepared is what would have been drafted: the adopted keys and values are those of the text.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from saguaro import methods
from saguaro.draft.block_drafter import BlockDrafter
from saguaro.draft.combined import Combined
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.policy import learnt
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool
from saguaro.link.inline import Inline
from saguaro.link.null import NullLink
from saguaro.method import MODEL_FALLBACKS
from saguaro.methods import METHODS, Method
from saguaro.model.transformer import Transformer
from saguaro.round import DraftSide, Pending, Round
from saguaro.runner.runner import make_runner
from saguaro.target.graphed import captured_steps
from saguaro.target.request import Request
from saguaro.target.sampler import Sampler
from saguaro.target.scheduler import Batch, Commit, Scheduler
from saguaro.target.verifier import Verifier
from saguaro.types import DraftLink, Joined, Outcome, Speculation
from tests.clock import Clock
from tests.draft.config import new_config
from tests.draft.trees import entries
from tests.round.dflashes import near_dflash
from tests.round.tabular import RULES, under
from tests.target.test_round import CPU, N_KNOWN, SPEC, new_model, new_requests, true_output

N_REQUESTS = 8
TREES = [f"{name} trees" for name, method in METHODS.items() if method.trees]  # the same with trees (see variant)
BESIDE = ["sd suffix", "ssd suffix", "ssd suffix trees", "pearl suffix"]  # beside what followed earlier in the text
ALONE = ["suffix", "suffix trees"]  # without a model
MODEL_VARIANTS = [name for name in (*METHODS, *TREES, *BESIDE) if METHODS[name.split()[0]].needs_model]
# With a draft of blocks in place of one that drafts token by token (tests/round/test_dflash.py has the other methods).
BLOCKS = ["ssd-uniform block", "ssd block trees"]
VARIANTS = [*METHODS, *TREES, *BESIDE, *ALONE, *BLOCKS]
SIZES = [(1, 1), (1, 6), (4, 1), (4, 6)]  # lookahead, budget


def model_of(side: DraftSide) -> TreeDrafter | BlockDrafter | None:
    """What drafts with a model, if anything does."""
    drafter = side.drafter.model if isinstance(side.drafter, Combined) else side.drafter
    return drafter if isinstance(drafter, TreeDrafter | BlockDrafter) else None


@dataclass
class Rig:
    """An engine without its outer layer; its page pools and the draft's texts are checked after every round."""

    scheduler: Scheduler
    round: Round
    side: DraftSide
    sources: Counter[str] = field(default_factory=Counter)

    def play(self) -> list[Commit]:
        commits = self.round.play()
        self.scheduler.pool.check(self.scheduler.tables())
        drafter = model_of(self.side)
        if drafter is not None:
            drafter.pool.check(trunk.table for trunk in drafter.trunks.values())
            if isinstance(drafter, TreeDrafter):
                for slot in drafter._in_flight:
                    entries(drafter.trees, slot)
        for request in self.scheduler.running:
            row = self.side.rows.get(request.slot)
            assert row is None or request.tokens[: len(row.text)] == row.text, "the draft believes in another text"
        self.sources.update(commit.source for commit in commits)
        return commits

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve them all; their outputs."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.play()
        return [request.output for request in requests]


def variant(name: str) -> tuple[Method, dict[str, Any]]:
    """A method under shared noise, and what new_rig is told of its trees and of a suffix drafter beside its model."""
    words = name.split()
    parts = under("shared", "sd", fallback="suffix") if words[0] == "suffix" else under("shared", words[0])
    given = {"width": 2 if "trees" in words else 1, "suffix": "suffix" in words[1:]}
    return parts, given | ({"block": True} if "block" in words else {})


CASES = [  # without preparing the budget says nothing, and of what drafts nothing there is one case
    (name, lookahead, budget)
    for name in VARIANTS
    for method, _ in [variant(name)]
    for lookahead, budget in SIZES
    if (method.prepares or budget > 1) and (method.drafts or lookahead > 1)
    if name not in BLOCKS or (lookahead, budget) == SIZES[-1]
]
ROOMS = [  # a method, and the tokens that its draft has room for; 0: a text or two
    (name, n) for name in VARIANTS for n in (1200, 0) if n or variant(name)[0].needs_model
]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How large a rig is, and what it is made of."""

    width: int = 1  # R
    suffix: bool = False  # beside the model
    block: bool = False  # a draft of blocks in place of the given one
    n_more: int = 3  # nodes of a tree beyond the lookahead
    lookahead: int = 4
    budget: int = 6
    n_pages: int = 300
    page_size: int = 4
    max_rows: int = N_REQUESTS
    max_tokens: int = 400
    draft_tokens: int = 1200
    link: Callable[[DraftSide], DraftLink] = Inline
    kernels: Kernels | None = None

    @property
    def nodes(self) -> int:
        """N of a tree; of a chain, its length."""
        return self.lookahead + self.n_more if self.width > 1 else self.lookahead


def new_rig(method: Method, target: Transformer, draft: Transformer, **given: Any) -> Rig:
    """A method as the engine puts it together; `given` are fields of Setup."""
    setup = Setup(**given)
    draft = near_dflash(target) if setup.block else draft
    side = new_side(method, draft, setup)
    taps = draft.reads.taps if draft.reads is not None and method.needs_model else ()
    scheduler = Scheduler(
        PagePool(setup.n_pages, setup.page_size),
        max_length=SPEC.max_length,
        max_rows=setup.max_rows,
        max_tokens=setup.max_tokens,
        lookahead=setup.nodes if method.drafts else 0,
        depth=setup.lookahead if method.drafts else 0,
    )
    verifier = new_verifier(method, target, setup, scheduler, taps)
    return Rig(scheduler, Round(scheduler, verifier, setup.link(side) if method.drafts else NullLink()), side)


def new_side(method: Method, draft: Transformer, setup: Setup) -> DraftSide:
    """The draft's side. Memory that was never written holds NaN."""
    config = new_config(
        N_KNOWN,
        draft="a model" if method.needs_model else None,
        growth=method.growth,
        suffix=setup.suffix,
        fallback=method.fallback,
        verification=method.verification,
        cut=method.cut,
        lookahead=setup.lookahead,
        nodes=setup.nodes,
        width=setup.width,
        budget=setup.budget,
        max_rows=setup.max_rows,
        n_tokens=setup.draft_tokens,
        page_size=setup.page_size,
    )
    side = methods.draft_side(config, draft if method.needs_model else None, setup.kernels)
    drafter = model_of(side)
    if drafter is not None:
        drafter.cache.memory.fill_(math.nan)
    return side


def new_verifier(
    method: Method, target: Transformer, setup: Setup, scheduler: Scheduler, taps: Sequence[int]
) -> Verifier:
    """The target's side, as if captured if there are kernels; its memory is NaN where nothing was written."""
    kernels, longest = setup.kernels, SPEC.max_length
    plan = KVPlan(setup.n_pages, setup.page_size, SPEC.kv_bytes_per_token(torch.float64), longest)
    cache = KVCache(plan, SPEC, CPU, torch.float64)
    cache.memory.fill_(math.nan)
    rule = RULES[method.verification](Sampler(N_KNOWN, *((kernels.rank, kernels.limits) if kernels else ())))
    sizes = {"max_rows": setup.max_rows, "depth": scheduler.depth, "nodes": scheduler.lookahead, "longest": longest}
    captured = captured_steps(kernels, cache, n_known=N_KNOWN, **sizes) if kernels else None
    return Verifier(make_runner(target, cache, kernels, longest, captured, taps), rule, n_known=N_KNOWN)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return new_model(seed=0)


@pytest.fixture(scope="module")
def draft(target: Transformer) -> Transformer:
    """Good enough to be right now and then."""
    return target.without([1])


@pytest.fixture(scope="module")
def truth(target: Transformer) -> list[list[int]]:
    """The outputs of new_requests(n=N_REQUESTS)."""
    return [true_output(target, request) for request in new_requests(n=N_REQUESTS)]


@pytest.mark.parametrize(("method", "lookahead", "budget"), CASES)
def test_shared_noise_gives_the_true_tokens(
    method: str, lookahead: int, budget: int, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, draft, **given, lookahead=lookahead, budget=budget)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    if budget > 1:
        assert bool(rig.sources["cache"]) == (parts.prepares)
    assert bool(rig.sources["draft"]) == (parts.fallback in MODEL_FALLBACKS)
    assert bool(rig.sources["suffix"]) == ("suffix" in method)


@pytest.mark.parametrize(("method", "lookahead", "budget"), CASES)
def test_captured_steps_give_the_true_tokens(
    method: str, lookahead: int, budget: int, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, draft, **given, lookahead=lookahead, budget=budget, kernels=plain_kernels())
    assert rig.round.verifier.runs_ahead
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert (model_of(rig.side) is not None) == parts.needs_model
    if budget > 1:
        assert bool(rig.sources["cache"]) == (parts.prepares)
    assert bool(rig.sources["draft"]) == (parts.fallback in MODEL_FALLBACKS)
    assert bool(rig.sources["suffix"]) == ("suffix" in method)


@pytest.mark.parametrize("width", [1, 2])
def test_a_launch_ahead_that_fails_loses_nothing(
    width: int, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    """What was decided before it is told first, then the failure, and everything goes on."""
    rig = new_rig(under("shared", "ssd"), target, draft, width=width, kernels=plain_kernels())
    requests, launch, n_launches = new_requests(n=N_REQUESTS), rig.round.verifier.launch, 0

    def fails_now_and_then(batch: Batch, spec: Speculation) -> Pending:
        nonlocal n_launches
        n_launches += 1
        if n_launches % 4 == 0:
            raise RuntimeError("no launch today")
        return launch(batch, spec)

    rig.round.verifier.launch = fails_now_and_then  # type: ignore[method-assign]
    for request in requests:
        rig.scheduler.add(request)
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    n_failures = 0
    while rig.scheduler.has_work:
        try:
            for commit in rig.play():
                outputs[commit.request.id] += commit.tokens
        except RuntimeError:
            n_failures += 1
    assert n_failures == n_launches // 4 > 2
    assert list(outputs.values()) == truth


@pytest.mark.parametrize("width", [1, 2])
def test_whoever_leaves_while_a_round_is_in_flight_leaves_the_others_alone(
    width: int, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    rig = new_rig(under("shared", "ssd"), target, draft, width=width, kernels=plain_kernels(), max_rows=4)
    requests = new_requests(n=N_REQUESTS)
    for request in requests:
        rig.scheduler.add(request)
    gone = requests[::3]
    for n_rounds in range(10**6):
        if not rig.scheduler.has_work:
            break
        if n_rounds % 4 == 2 and gone:
            rig.scheduler.abort(gone.pop())
        rig.play()
    for index, (request, output) in enumerate(zip(requests, truth, strict=True)):
        assert request.output == output[: len(request.output)]
        assert len(request.output) == len(output) or index % 3 == 0


@pytest.mark.parametrize("method", VARIANTS)
def test_a_draft_that_is_always_wrong_changes_nothing(method: str, target: Transformer, truth: list[list[int]]) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, new_model(seed=1), **given, lookahead=3, budget=3)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth


@pytest.mark.parametrize(("method", "draft_tokens"), ROOMS)
def test_preemption_changes_nothing(
    method: str, draft_tokens: int, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    """Rooms shrink to nothing on the way."""
    parts, given = variant(method)
    sizes: dict[str, Any] = {"n_pages": 14, "max_tokens": 64, "draft_tokens": draft_tokens}
    rig = new_rig(parts, target, draft, **given, lookahead=3, budget=3, **sizes)
    assert rig.run(new_requests(n=N_REQUESTS)) == truth
    assert rig.scheduler.n_preemptions > 0


class AbortsInMidStep(Inline):
    """Requests are aborted while the target computes, as another thread's client may."""

    during: Callable[[], None]

    def overlap(self) -> None:
        self.during()
        super().overlap()


@pytest.mark.parametrize("is_mid_step", [False, True])
@pytest.mark.parametrize("method", [name for name in VARIANTS if variant(name)[0].drafts])
def test_requests_that_come_and_go(
    method: str, is_mid_step: bool, target: Transformer, draft: Transformer, truth: list[list[int]]
) -> None:
    """Three rows, a new request every other round, every third aborted: slots are reused."""
    link = AbortsInMidStep if is_mid_step else Inline
    parts, given = variant(method)
    rig = new_rig(parts, target, draft, **given, lookahead=3, budget=4, max_rows=3, link=link)
    requests = new_requests(n=N_REQUESTS)
    waiting, aborted = list(requests), requests[1::3]

    def abort() -> None:
        for request in aborted:
            if request.n_output >= 3:
                rig.scheduler.abort(request)

    if isinstance(rig.round.draft, AbortsInMidStep):
        rig.round.draft.during = abort
    for n_round in range(1000):
        if n_round % 2 == 0 and waiting:
            rig.scheduler.add(waiting.pop(0))
        rig.play()
        if not is_mid_step:
            abort()
        if not waiting and not rig.scheduler.has_work:
            break
    assert not rig.scheduler.has_work
    assert any(request.finish_reason == "abort" for request in aborted)
    for request, output in zip(requests, truth, strict=True):
        assert request.output == (output[: request.n_output] if request in aborted else output)


@pytest.mark.parametrize("method", METHODS)
def test_rejection_at_temperature_0_gives_the_true_tokens(method: str, target: Transformer, draft: Transformer) -> None:
    requests = new_requests(["greedy"], n=N_REQUESTS)
    rig = new_rig(under("rejection", method), target, draft, lookahead=3, budget=4)
    assert rig.run(requests) == [true_output(target, request) for request in requests]


@pytest.mark.parametrize("method", METHODS)
def test_rejection_at_temperature_1_is_a_function_of_the_seed(
    method: str, target: Transformer, draft: Transformer
) -> None:
    outputs = []
    for _ in range(2):
        with patch.object(learnt, "clock", Clock()):
            rig = new_rig(under("rejection", method), target, draft, lookahead=3, budget=4, n_pages=24, max_rows=5)
            outputs.append(rig.run(new_requests(["warm"], n=N_REQUESTS, max_tokens=12)))
    assert outputs[0] == outputs[1]
    assert all(len(output) == 12 for output in outputs[0])
    assert len({tuple(output[:6]) for output in outputs[0]}) == N_REQUESTS


@pytest.mark.parametrize("n_tokens", [5, 6, 7, 40, 64, 65, 100])
def test_a_text_read_in_chunks_has_the_candidates_of_one_read_at_once(
    n_tokens: int, target: Transformer, draft: Transformer
) -> None:
    """However much of it was read ahead of time, and up to its very end."""
    text = [at % N_KNOWN for at in range(n_tokens)]

    def candidates(is_near: bool) -> tuple[Tensor, Tensor]:
        side = new_rig(under("shared", "ssd"), target, draft, lookahead=2, budget=4).side
        drafter = side.drafter
        assert isinstance(drafter, TreeDrafter)
        if is_near:
            drafter.is_near = lambda row: True  # type: ignore[method-assign]
        side.admit([Joined(0, text, n_tokens, seed=7)])
        side.respond(Outcome.nothing(), [0], [0])
        rows = list(side.rows)
        drafter.read(rows, lambda: False)
        assert drafter.propose(rows, 2).tokens[0]
        trees, root = drafter.trees, int(drafter.trees.root[0])
        return trees.token[0, root].clone(), trees.score[0, root].clone()

    found, wanted = candidates(is_near=False), candidates(is_near=True)
    assert found[0].equal(wanted[0])
    assert torch.allclose(found[1], wanted[1], atol=1e-4)
