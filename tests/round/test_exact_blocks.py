"""Losslessness of drafted blocks, proved: over every random path of the real loop the output has the target's law.

As tests.round.test_exact. The candidates of all positions come from one pass: under rejection they are drawn together,
and nodes of one depth share them. The draft reads its text by attention, and checks that its keys are features.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro.draft.best_first import Nodes
from saguaro.draft.block import Block
from saguaro.draft.block_drafter import BlockDrafter
from tests.round.tabular import Found, Late, Setting, under
from tests.round.test_exact import LENGTH, PAIR, SURER, TARGET, check, is_wrong
from tests.round.test_exact_trees import DRAFT as READING
from tests.round.test_exact_trees import TARGET as READ

CASES = [("sd", "shared", LENGTH), ("sd", "rejection", LENGTH), ("pearl", "shared", 3), ("ssd-uniform", "shared", 3)]
CASES += [("ssd-uniform", "rejection", 3), ("saguaro", "rejection", 3), ("ssd", "shared", LENGTH)]


def setting(rule: str, method: str = "ssd", **others: object) -> Setting:
    """One row; two tokens are verified, and a third is drafted for the bonus."""
    usual = {"lookahead": 2, "block": 4, "budget": 1 if rule == "rejection" else 2, "max_tokens": LENGTH}
    return Setting(under(rule, method), TARGET, SURER, **(usual | others))  # type: ignore[arg-type]


def trees(rule: str, method: str, **others: object) -> Setting:
    """The same with trees of four nodes, after a target and a draft that read all keys."""
    fallback = under(rule, method, fallback="draft")
    return replace(setting(rule, method, width=2, nodes=4, **others), method=fallback, target=READ, draft=READING)


def assert_varied(found: Found) -> None:
    """Or it would show little: some speculations are accepted, whole and in part, and some are not."""
    assert found.n_rejected > 0
    assert found.accepted[0] > 0
    assert found.accepted[1] > 0


@pytest.mark.parametrize(("method", "rule", "n"), CASES)
def test_blocks_have_the_targets_law(method: str, rule: str, n: int) -> None:
    found = check(setting(rule, method, max_tokens=n))
    assert found.n_accepted > 0
    assert found.n_rejected > 0
    assert found.lengths[2] > 0 or n == 3
    assert method in ("sd", "pearl") or found.sources["draft"] > 0
    if rule == "shared":
        assert bool(found.sources["cache"]) == (method != "sd")


def test_a_prepared_block_that_was_drawn_has_the_targets_law() -> None:
    assert check(setting("rejection", "ssd-uniform", lookahead=1, budget=2)).sources["cache"] > 0


def test_saguaro_sampling_has_the_targets_law() -> None:
    assert_varied(check(setting("rejection", "saguaro", lookahead=1, budget=2, saguaro_c=0.5)))


@pytest.mark.parametrize(("method", "rule"), [("sd", "shared"), ("sd", "rejection"), ("ssd", "shared")])
def test_trees_of_blocks_have_the_targets_law(method: str, rule: str) -> None:
    found = check(trees(rule, method))
    assert_varied(found)
    assert max(found.lengths) > 2


def test_an_outcome_that_comes_early() -> None:
    """After the first part of what is prepared."""
    assert_varied(check(setting("shared", link=Late)))


def test_two_rows_know_nothing_of_each_other() -> None:
    """One of them is preempted."""
    sizes: dict[str, Any] = {"n_rows": 2, "max_tokens": 3, "n_pages": 4, "page_size": 1}
    found = check(replace(setting("shared", lookahead=1, budget=1, **sizes), target=PAIR[0], draft=PAIR[1]))
    assert found.n_accepted > 0
    assert found.n_preemptions > 0


# Mistakes


def test_the_law_of_another_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: Block, nodes: Nodes) -> Tensor | None:
        return torch.stack([self.laws[0]] * len(nodes.tokens)) if self.laws and nodes.tokens else None

    monkeypatch.setattr(Block, "families", first)
    assert is_wrong(setting("rejection", "sd"))


def test_what_is_verified_must_not_depend_on_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of one token is left out, another is not."""
    nodes = BlockDrafter._nodes

    def picky(self: BlockDrafter, *given: object) -> tuple[Nodes, Tensor | None]:
        found, q = nodes(self, *given)  # type: ignore[arg-type]
        return (Nodes(), None) if found.tokens and found.tokens[0] == 1 else (found, q)

    monkeypatch.setattr(BlockDrafter, "_nodes", picky)
    assert is_wrong(setting("rejection", "sd", lookahead=1, max_tokens=3))
