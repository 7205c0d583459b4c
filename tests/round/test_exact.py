"""Losslessness, proved: over every random path of the real loop the output has exactly the target's law.

tests.round.tabular says how. Each test also says what must have happened for it to mean something, and the last ones
make mistakes on purpose, to show that they would be seen.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from saguaro import rng
from saguaro.algo import sampling
from saguaro.algo.planning import Ahead, Planned
from saguaro.config import FALLBACKS
from saguaro.draft import rows
from saguaro.draft.growth import Growth
from saguaro.draft.ngram import Ngram
from saguaro.draft.policy import free
from saguaro.draft.policy.budget import MeasuredBudget
from saguaro.draft.policy.critical import BatchSizeMisses
from saguaro.draft.policy.misses import MeasuredMisses
from saguaro.draft.random import RandomTokens
from saguaro.draft.ranking import Draws, Ranked
from saguaro.draft.rows import DraftRow, Proposal, stack_q
from saguaro.method import MODEL_FALLBACKS
from saguaro.methods import METHODS
from saguaro.target import sampler
from saguaro.target.sampler import Context
from saguaro.types import Speculation
from tests.round.tabular import (
    RULES,
    Chance,
    Everything,
    Found,
    Late,
    Seer,
    Setting,
    Shape,
    Text,
    distance,
    draft_of,
    enumerate_paths,
    new_law,
    surer,
    under,
    wanted_law,
)

EXACT = 1e-12
WRONG = 1e-3  # a mistake must show at least like this
SHORT_RUNS = (2, 1)  # of n-grams, so that they have something to say about so short a text
LENGTH = 4  # tokens of output, where nothing else is said
TARGET = new_law(24)
DRAFT = draft_of(TARGET, 24, n_sure=LENGTH)
SURER = surer(DRAFT, 1, 0.5)  # for long speculations
WIDE = new_law(5, width=3), draft_of(new_law(5, width=3), 5, n_sure=3)  # a residual has more than one token
PAIR = surer(TARGET, 3, 0.4), surer(draft_of(TARGET, 24, n_sure=3), 10, 0.3)  # for two rows of three tokens


def check(setting: Setting, shape: Shape | None = None, stop: int = -1) -> Found:
    """Enumerate a setting and compare its law with the target's."""
    found = enumerate_paths(setting)
    assert found.total == pytest.approx(1, abs=EXACT)
    assert distance(found.law, wanted_law(setting, shape, stop)) < EXACT
    return found


def is_wrong(setting: Setting, chance: Chance | None = None) -> bool:
    """Whether the law is seen to differ from the target's, though probabilities add up."""
    found = enumerate_paths(setting, chance)
    assert found.total == pytest.approx(1, abs=EXACT)
    return distance(found.law, wanted_law(setting)) > WRONG


def test_the_tables_are_worth_enumerating() -> None:
    """Much is rejected and much accepted, something is impossible, and positions differ."""
    alike = torch.minimum(TARGET, DRAFT)[:LENGTH].sum(-1)
    assert float(alike.min()) < 0.5 < float(alike.mean()) < 0.8 < float(alike.max())
    assert bool((TARGET[:LENGTH] == 0).any(-1).all())
    assert bool(((DRAFT > 0) & (TARGET == 0))[:LENGTH].any())
    assert not any(TARGET[i].equal(TARGET[j]) for i in range(LENGTH) for j in range(i))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_targets_law(method: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ngram.__init__, "__defaults__", SHORT_RUNS)
    parts = METHODS[method]
    budget = 1 if rule == "rejection" and parts.growth == "best" else 2  # every node that grows has paths of its own
    found = check(Setting(under(rule, method), TARGET, DRAFT, budget=budget, max_tokens=LENGTH))
    assert bool(found.sources["cache"]) == (parts.prepares)
    assert bool(found.sources["draft"]) == (parts.fallback in MODEL_FALLBACKS)
    if parts.drafts:
        assert found.n_accepted > 0
        assert found.n_rejected > 0


@pytest.mark.parametrize(
    ("method", "rule"),
    [("sd", "rejection"), ("pearl", "shared")]
    + [(m, rule) for m in ("specbranch", "ssd-uniform", "saguaro", "ssd") for rule in RULES],
)
def test_two_tokens_at_a_time(method: str, rule: str) -> None:
    found = check(Setting(under(rule, method), TARGET, SURER, lookahead=2, max_tokens=LENGTH))
    assert found.n_accepted > 0
    assert found.n_rejected > 0
    assert found.lengths[2] > 0
    if method == "specbranch":
        assert found.lengths[1] > found.lengths[2] / 10, "no speculation was cut"
    if method not in ("sd", "specbranch"):
        assert found.sources["cache"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_vocabulary_of_four(rule: str) -> None:
    target = new_law(2, n_vocab=4, width=3)
    found = check(Setting(under(rule, "pearl"), target, draft_of(target, 2, n_sure=3), budget=1))
    assert found.sources["cache"] > 0
    assert found.n_accepted > 0
    assert found.n_rejected > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fallback", [name for name in FALLBACKS if name != "auto"])
def test_every_fallback(fallback: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ngram.__init__, "__defaults__", SHORT_RUNS)
    found = check(Setting(under(rule, "amusd", fallback=fallback), TARGET, DRAFT, max_tokens=LENGTH, budget=1))
    assert found.sources["cache"] > 0
    is_chosen = fallback in ("batch", "batch-random", "measured")
    assert found.sources["draft" if is_chosen else fallback] > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("method", "fallback"),
    [("sd", "draft"), ("ssd", "measured"), ("pearl", "draft"), ("saguaro", "batch")],
)
def test_a_model_and_what_followed_earlier(method: str, fallback: str, rule: str) -> None:
    """A row is drafted by one of them or by both; a text of few tokens repeats itself soon."""
    found = check(
        Setting(under(rule, method, fallback=fallback), TARGET, DRAFT, budget=1, max_tokens=LENGTH, suffix=True)
    )
    assert found.sources["draft"] + found.sources["cache"] > 0
    assert found.n_accepted > 0
    assert found.n_rejected > 0


@pytest.mark.parametrize("rule", RULES)
def test_trees_of_what_followed_earlier(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings that were not drawn: each is tried as if it were certain."""
    monkeypatch.setattr(free, "paying", lambda proposal, *_: (proposal, 0.0))  # all of them, whatever they cost
    sizes = {"lookahead": 2, "width": 2, "nodes": 4, "max_tokens": 8}
    found = check(Setting(under(rule, "sd", fallback="suffix"), TARGET, DRAFT, **sizes))  # type: ignore[arg-type]
    assert found.sources["suffix"] > 0
    assert max(found.lengths) > 2
    assert found.accepted[2] > 0
    assert found.n_rejected > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("fallback", ["batch", "measured"])
def test_whoever_is_worth_the_wait(fallback: str, first: bool, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision goes this way and that within one text."""
    decisions: defaultdict[BatchSizeMisses | MeasuredMisses, Iterator[bool]] = defaultdict(
        lambda: cycle([first, not first])
    )
    monkeypatch.setattr(MeasuredMisses, "_chooses_model", lambda self, *_: next(decisions[self]))
    monkeypatch.setattr(BatchSizeMisses, "critical", property(lambda self: 99.0 * next(decisions[self])))
    monkeypatch.setattr(Ngram.__init__, "__defaults__", SHORT_RUNS)
    found = check(Setting(under(rule, "amusd", fallback=fallback), TARGET, DRAFT, max_tokens=LENGTH))
    assert found.sources["ngram"] > 0
    assert found.sources["draft"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_speculations_of_any_length(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted just in time is as long as pays: none, or one token and then another if that one is likely."""
    decisions: defaultdict[MeasuredMisses, Iterator[bool]] = defaultdict(lambda: cycle([True, True, False]))
    monkeypatch.setattr(MeasuredMisses, "_chooses_model", lambda self, *_: next(decisions[self]))
    ends: Counter[bool] = Counter()

    def goes_on(self: object, rows: Sequence[DraftRow], worth: Sequence[float]) -> bool:
        ends[worth[0] > 0.6] += 1
        return worth[0] > 0.6

    monkeypatch.setattr(MeasuredBudget, "goes_on", goes_on)
    method = under(rule, "sd" if rule == "rejection" else "ssd-uniform", fallback="measured")
    found = check(Setting(method, TARGET, SURER, 2, max_tokens=LENGTH, budget=1))
    assert found.sources["draft"] > 0
    assert ends[True] > 0
    assert ends[False] > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lookahead", [1, 2])
def test_nothing_but_hits(lookahead: int, rule: str) -> None:
    """The planner knows the outcome, so every speculation but the first was prepared."""
    method = under(rule, "ssd-uniform", fallback="draft")
    draft = DRAFT if lookahead == 1 else SURER
    setting = Setting(method, TARGET, draft, lookahead, budget=1, max_tokens=LENGTH, planner=lambda v: Seer(v, True))
    found = check(setting)
    assert found.sources["draft"] == found.n_paths
    assert found.sources["cache"] > found.n_paths / 2
    assert found.sources.keys() == {"draft", "cache", "empty"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fallback", ["draft", "random"])
def test_nothing_but_misses(fallback: str, rule: str) -> None:
    """The planner knows the outcome and plans another."""
    method = under(rule, "ssd-uniform", fallback=fallback)
    found = check(Setting(method, TARGET, DRAFT, max_tokens=LENGTH, planner=lambda v: Seer(v, False)))
    assert found.sources["cache"] == 0
    assert found.sources[fallback] > found.n_paths


@pytest.mark.parametrize("rule", RULES)
def test_everything_is_prepared(rule: str) -> None:
    draft = draft_of(TARGET, 24, n_sure=3)
    setting = Setting(under(rule, "ssd-uniform"), TARGET, draft, budget=6, max_tokens=3, planner=Everything)
    found = check(setting)
    assert found.sources["draft"] == found.n_paths
    assert found.sources["cache"] > 0


@pytest.mark.parametrize(("method", "lookahead"), [("sd", 1), ("saguaro", 1), ("ssd-uniform", 1), ("saguaro", 2)])
@pytest.mark.parametrize("c", [0.25, 0.75])
def test_saguaro_sampling(c: float, method: str, lookahead: int) -> None:
    draft = DRAFT if lookahead == 1 else SURER
    plain = Setting(under("rejection", method), TARGET, draft, lookahead, max_tokens=LENGTH)
    found = check(replace(plain, saguaro_c=c))
    assert found.n_accepted > 0
    assert found.n_rejected > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["sd", "pearl", "ssd-uniform", "saguaro", "ssd"])
def test_two_rows_know_nothing_of_each_other(method: str, rule: str) -> None:
    """Their joint law is the product."""
    found = check(Setting(under(rule, method), *PAIR, budget=2 if method == "saguaro" else 1, n_rows=2))
    if method != "sd":
        assert found.sources["cache"] > 0
        assert found.sources["empty" if method == "pearl" else "draft"] > 0


def always_hit(rule: str) -> Setting:
    """Two rows after different texts; every speculation but the first was prepared."""
    target, draft = surer(TARGET, 1, 0.4), surer(draft_of(TARGET, 24, n_sure=3), 2, 0.2)
    return Setting(under(rule, "ssd-uniform"), target, draft, budget=1, n_rows=2, planner=lambda v: Seer(v, True))


@pytest.mark.parametrize("rule", RULES)
def test_two_rows_that_always_hit(rule: str) -> None:
    """Each gets its own branch, and its q."""
    found = check(always_hit(rule))
    assert found.sources["draft"] == 2 * found.n_paths
    assert found.sources["cache"] > found.n_paths / 2


def test_the_q_of_another_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = Growth.laws
    monkeypatch.setattr(Growth, "laws", lambda self, slot, nodes: laws(self, 1 - slot, nodes))
    assert is_wrong(always_hit("rejection"))


class OnlyTheFirst(Seer):
    """It knows only what is coming for the first row."""

    def plan(self, ahead: Ahead, budget: int) -> Planned:
        planned = super().plan(ahead, budget)
        return replace(planned, k=torch.where(planned.slots[:, None] == 0, planned.k, -1))


def test_a_row_without_q_beside_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hits, the other gets tokens that were not drawn; told as if they had been, it is seen."""
    method = under("rejection", "ssd-uniform", fallback="random")
    first = always_hit("rejection")
    setting = replace(first, method=method, target=TARGET, planner=lambda v: OnlyTheFirst(v, True))
    found = check(setting)
    assert found.sources["cache"] > 0
    assert found.sources["random"] > 0

    def wrong(spec: Speculation, each: Sequence[Tensor | None], n_vocab: int) -> Tensor:
        told = torch.full((*spec.tokens.shape, n_vocab), 1 / n_vocab, dtype=torch.float64)
        return stack_q(spec, [told[b] if q is None else q for b, q in enumerate(each)], n_vocab)

    monkeypatch.setattr(rows, "stack_q", wrong)
    assert is_wrong(setting)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_a_preempted_row_goes_on_where_it_was(method: str, rule: str) -> None:
    setting = Setting(under(rule, method), *PAIR, budget=1, n_rows=2, n_pages=5, page_size=1)
    assert check(setting).n_preemptions > 0


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_always_late(rule: str) -> None:
    """Its branches have one token instead of two."""
    setting = Setting(under(rule, "ssd-uniform"), TARGET, SURER, lookahead=2, max_tokens=LENGTH, link=Late)
    found = check(setting)
    assert found.sources["cache"] > 0
    assert found.lengths[1] > 0


def warmer(row: Tensor, text: Text) -> Tensor:
    """Temperature 1/2 and the two likeliest tokens."""
    squared = row**2 * (row >= row.topk(2).values[-1])
    return squared / squared.sum()


def penalised(row: Tensor, text: Text) -> Tensor:
    """A presence penalty of 1: what was written is e times less likely."""
    left = row * torch.tensor([-1.0 if token in text else 0.0 for token in range(len(row))]).double().exp()
    return left / left.sum()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("params", "shape", "stop"),
    [
        ({"temperature": 0.5, "top_k": 2}, warmer, -1),
        ({"presence_penalty": 1.0}, penalised, -1),
        ({"stop_token_ids": (1,)}, None, 1),
    ],
)
def test_the_law_that_a_request_asks_for(params: dict[str, object], shape: Shape | None, stop: int, rule: str) -> None:
    target = new_law(5, width=3)
    method = under(rule, "ssd-uniform", growth="continuation")
    setting = Setting(method, target, draft_of(target, 5, n_sure=3), budget=1, params=params)
    assert check(setting, shape, stop).n_accepted > 0


JEALOUS = surer(new_law(2), 2, 0.3)  # here what is grown depends on the tokens in flight
WORRIED = surer(draft_of(JEALOUS, 52, n_sure=LENGTH), 2, 0.4)


def test_noise_that_is_the_same_for_every_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared would then depend on the noise of what is drafted after it, and be used only where it is."""
    method = under("rejection", "ssd", fallback="random")
    setting = Setting(method, JEALOUS, WORRIED, lookahead=2, max_tokens=LENGTH)
    assert check(setting).sources["cache"] > 0
    derive = rng.derive_seeds
    monkeypatch.setattr(rng, "derive_seeds", lambda seeds, indices: derive(seeds, torch.ones_like(seeds)))
    assert is_wrong(setting)


def test_draft_noise_that_is_the_targets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bonus would be drawn with the noise of the token that was rejected."""
    monkeypatch.setattr(rng, "derive_seeds", lambda seeds, indices: seeds)
    assert is_wrong(Setting(under("rejection", "sd"), *WIDE, max_tokens=2))


def test_coins_that_are_not_their_own_are_seen() -> None:
    """A bonus would be drawn with the noise that rejected the token before it."""
    chance = Chance()
    chance.coins = "noise"
    assert is_wrong(Setting(under("rejection", "sd"), *WIDE, max_tokens=2), chance)


def told(change: Callable[[Ranked, Tensor], Tensor]) -> Callable[..., tuple[Ranked, Tensor]]:
    """What Draws gives, with another q for the target: of the children and the logits."""
    draw = Draws.__call__

    def wrong(self: Draws, logits: Tensor, *given: Any) -> tuple[Ranked, Tensor]:
        ranked, _ = draw(self, logits, *given)
        return ranked, change(ranked, logits)

    return wrong


@pytest.mark.parametrize("method", ["sd", "saguaro"])
def test_saguaro_samples_told_as_plain_ones_are_seen(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draws, "__call__", told(lambda ranked, logits: logits.softmax(-1)))
    setting = Setting(under("rejection", method), TARGET, DRAFT)
    assert not is_wrong(setting), "with C = 1 it is no mistake"
    assert is_wrong(replace(setting, saguaro_c=0.25))


def test_a_sample_may_be_told_as_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot is true of any token once it is there, so a fallback can always say it."""
    one_hot = told(lambda ranked, logits: torch.nn.functional.one_hot(ranked[0][:, 0], 3).double())
    monkeypatch.setattr(Draws, "__call__", one_hot)
    check(Setting(under("rejection", "sd"), TARGET, DRAFT))


@pytest.mark.parametrize("proposer", [RandomTokens, Ngram])
def test_fallback_tokens_told_as_samples_are_seen(
    proposer: type[RandomTokens] | type[Ngram], monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = proposer.propose

    def wrong(self: RandomTokens | Ngram, missed: Sequence[DraftRow], lookahead: int) -> Proposal:
        found = propose(self, missed, lookahead)  # type: ignore[arg-type]
        return Proposal(found.tokens, [torch.full((lookahead, 3), 1 / 3, dtype=torch.float64) for _ in missed])

    monkeypatch.setattr(Ngram.__init__, "__defaults__", SHORT_RUNS)
    fallback = "random" if proposer is RandomTokens else "ngram"
    setting = Setting(under("rejection", "ngram", fallback=fallback), TARGET, DRAFT, max_tokens=LENGTH)
    assert check(setting).sources[fallback] > 0
    monkeypatch.setattr(proposer, "propose", wrong)
    assert is_wrong(setting)


def test_the_q_of_another_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = Growth.laws

    def wrong(self: Growth, slot: int, nodes: Sequence[int]) -> Tensor | None:
        others = [(node // self._width + 1) % self.trees.unused * self._width for node in nodes]
        return laws(self, slot, others)

    monkeypatch.setattr(Growth, "laws", wrong)
    setting = Setting(under("rejection", "ssd-uniform"), TARGET, DRAFT)
    with patch.object(Tensor, "new_empty", lambda self, *shape: self.new_full(shape, 1 / 3)):
        assert is_wrong(setting)


def test_noise_of_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus after an accepted token would be drawn with that token's own noise."""
    rules = sampler.rules

    def wrong(places: Sequence[Context], device: torch.device) -> sampling.Rules:
        first = torch.tensor([len(request.tokens) for request, _ in places])
        return replace(rules(places, device), positions=first)

    monkeypatch.setattr(sampler, "rules", wrong)
    assert is_wrong(Setting(under("shared", "sd"), TARGET, DRAFT))
