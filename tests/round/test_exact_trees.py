"""Losslessness of drafted trees, proved: over every random path of the real loop the output has the target's law.

As tests.round.test_exact, for sd and ssd with trees. The target reads its text by attention: the law of a token depends
on all keys before it, so a key that is not the text's is seen in the output. The last tests make such mistakes.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from saguaro.draft.grow import TreeDrafter
from saguaro.draft.rows import Wanted
from saguaro.target import verifier
from saguaro.target.rules import Decision
from saguaro.target.verifier import Verifier
from saguaro.types import Outcome
from tests.round.tabular import Found, Setting, draft_of, new_law, surer, under
from tests.round.test_exact import LENGTH, check, is_wrong

TARGET = torch.stack((new_law(24), new_law(5)))
DRAFT = torch.stack([surer(draft_of(law, 24, n_sure=LENGTH), 1, 0.4) for law in TARGET])
FOUR = torch.stack([new_law(seed, n_vocab=4, width=2) for seed in (2, 8)])


def setting(method: str = "ssd", **others: object) -> Setting:
    """One row, trees of four nodes and two levels."""
    usual = {"lookahead": 2, "width": 2, "nodes": 4, "budget": 2, "max_tokens": LENGTH}
    return Setting(under("shared", method, fallback="draft"), TARGET, DRAFT, **(usual | others))  # type: ignore[arg-type]


def assert_varied(found: Found) -> None:
    """Or it would show little: some speculations are accepted, whole and in part, and some are not."""
    assert found.n_rejected > 0
    assert found.accepted[0] > 0
    assert found.accepted[1] > 0


@pytest.mark.parametrize(("nodes", "width"), [(2, 1), (3, 2), (4, 2), (4, 3)])
@pytest.mark.parametrize("method", ["sd", "ssd"])
def test_trees_have_the_targets_law(method: str, nodes: int, width: int) -> None:
    found = check(setting(method, nodes=nodes, width=width))
    assert_varied(found)
    assert found.accepted[2] > 0
    assert max(found.lengths) > 2 or nodes == 2
    assert bool(found.sources["cache"]) == (method == "ssd")
    assert found.sources["draft"] > 0


def test_trees_of_one_level() -> None:
    """Three candidates for the next token."""
    found = check(setting(lookahead=1, nodes=3, width=2))
    assert_varied(found)
    assert found.sources["cache"] > 0


@pytest.mark.parametrize("method", ["sd", "ssd"])
def test_a_vocabulary_of_four(method: str) -> None:
    draft = torch.stack([surer(draft_of(law, 2, n_sure=3), 1, 0.4) for law in FOUR])
    assert_varied(check(replace(setting(method, max_tokens=3), target=FOUR, draft=draft)))


PAIR = torch.stack([surer(law, 3, 0.35) for law in TARGET])
SURE = torch.stack([surer(draft_of(law, 24, n_sure=3), 10, 0.5) for law in TARGET])


@pytest.mark.parametrize("n_pages", [16, 4])  # 4: a row is preempted
@pytest.mark.parametrize("method", ["sd", "ssd"])
def test_two_rows_know_nothing_of_each_other(method: str, n_pages: int) -> None:
    page_size = 1 if n_pages < 16 else 4
    sizes = {"n_rows": 2, "max_tokens": 3, "n_pages": n_pages, "page_size": page_size}
    found = check(replace(setting(method, **sizes), target=PAIR, draft=SURE))
    assert found.n_accepted > 0
    assert (found.n_preemptions > 0) == (n_pages < 16)


def test_nothing_but_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are grown and never used: the root is always new."""

    def miss(self: TreeDrafter, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        self._is_prepared = False
        return serve(self, outcome, wanted)

    serve = TreeDrafter.serve
    monkeypatch.setattr(TreeDrafter, "serve", miss)
    found = check(setting())
    assert found.sources["cache"] == 0
    assert_varied(found)


@pytest.mark.parametrize("least", [0.0, 0.4])
def test_trees_that_end_where_they_do_not_pay(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a tree grows, and how much of it is verified, depends on what is in it."""
    growth = type("Growth", (), {"least": least, "goes_on": lambda self, rows, worth: sum(worth) > 0.3})()
    propose = TreeDrafter.propose
    monkeypatch.setattr(TreeDrafter, "propose", lambda self, rows, n, budget=None: propose(self, rows, n, growth))
    found = check(setting("sd"))
    assert_varied(found)
    assert len(found.lengths) > 2


def test_trees_by_measurement() -> None:
    """What drafts on a miss, and how far, is decided by the clock."""
    assert_varied(check(replace(setting(), method=under("shared", "ssd"))))


# Mistakes


def test_a_siblings_key_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted nodes are not moved behind the text: what lies there may be a sibling's."""
    monkeypatch.setattr(Verifier, "straighten", lambda self, batch, decision: None)
    assert is_wrong(setting("sd"))


def test_a_wrong_path_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first accepted node is taken for another: its key is moved, and the text has the other token."""
    decide = Verifier.decide

    def wrong(self: Verifier, *given: object) -> Decision:
        n_accepted, bonus, path = decide(self, *given)  # type: ignore[arg-type]
        if path is not None and path.shape[1] > 1:
            path[:, 0] = torch.where(path[:, 0] > 0, 0, path[:, 0])
        return n_accepted, bonus, path

    monkeypatch.setattr(Verifier, "decide", wrong)
    assert is_wrong(setting("sd"))


def test_a_tree_seen_as_a_chain_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node sees the nodes before it, whether they are on its path or not."""
    segment = verifier._segment
    monkeypatch.setattr(verifier, "_segment", lambda row, drafted, parents, *given: segment(row, drafted, None, *given))
    assert is_wrong(setting("sd"))
