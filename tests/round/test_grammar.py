"""With a grammar the output has exactly the law of the masked target, over every random path of the real loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from saguaro.draft.rows import DraftRows
from saguaro.target.grammar import Guide, Mask
from saguaro.target.request import Request
from tests.round import tabular
from tests.round.tabular import (
    RULES,
    Found,
    Setting,
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
TARGET = new_law(24, width=3)
DRAFT = draft_of(TARGET, 24, n_sure=3)


class NoTwins:
    """No token twice in a row, and the first is not 0; its masks after so many tokens take long."""

    def __init__(self, slow_after: Sequence[int] = ()) -> None:
        self.is_slow, self._slow_after = False, slow_after

    def may(self, output: Sequence[int]) -> list[int]:
        last = output[-1] if output else 0
        return [token for token in range(3) if token != last]

    def mask(self, output: Sequence[int]) -> Mask:
        self.is_slow = len(output) in self._slow_after
        return np.array([sum(1 << token for token in self.may(output))], np.uint8)

    def accepts(self, output: Sequence[int]) -> bool:
        return True


def masked(law: Tensor, text: Text) -> Tensor:
    """A row of the table with what is forbidden taken out."""
    may = NoTwins().may(text)
    return law.new_tensor([p if token in may else 0.0 for token, p in enumerate(law.tolist())]) / float(law[may].sum())


@pytest.fixture(params=["target", "both", "slow"])
def guided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who knows the grammar: the target alone, or the draft too; slow: both, and now and then a mask takes long, so
    that rows sit rounds out, get no speculation, and the draft gives the grammar up."""
    plain, slow_after = tabular.new_requests, (0, 2) if request.param == "slow" else ()

    def new_requests(setting: Setting) -> list[Request]:
        requests = plain(setting)
        for one in requests:
            one.grammar = NoTwins(slow_after)
        return requests

    admit = DraftRows.admit

    def admit_guided(self: DraftRows, joined: Any) -> Any:
        rows = admit(self, joined)
        for row in rows:
            row.request.grammar = Guide(NoTwins((1,) if slow_after else ()))
        return rows

    monkeypatch.setattr(tabular, "new_requests", new_requests)
    if request.param != "target":
        monkeypatch.setattr(DraftRows, "admit", admit_guided)
    return str(request.param)


def check(setting: Setting) -> Found:
    found = enumerate_paths(setting)
    assert found.total == pytest.approx(1, abs=EXACT)
    assert distance(found.law, wanted_law(setting, masked)) < EXACT
    assert distance(found.law, wanted_law(setting)) > 1e-2, "the grammar changed nothing"
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["ar", "sd", "ssd-uniform", "saguaro", "ssd"])
def test_the_law_is_the_masked_targets(method: str, rule: str, guided: str) -> None:
    found = check(Setting(under(rule, method), TARGET, DRAFT, max_tokens=3))
    if method != "ar":
        assert found.n_accepted > 0
        assert found.n_rejected > 0


@pytest.mark.parametrize("rule", RULES)
def test_two_tokens_at_a_time(rule: str, guided: str) -> None:
    """The draft is mostly sure, so that there are fewer paths."""
    found = check(Setting(under(rule, "ssd-uniform"), TARGET, surer(DRAFT, 1, 0.6), lookahead=2, max_tokens=4))
    assert found.lengths[2] > 0
    assert found.sources["cache"] > 0


@pytest.mark.parametrize("rule", RULES)
def test_with_a_draft_of_blocks(rule: str, guided: str) -> None:
    setting = Setting(under(rule, "ssd-uniform"), TARGET, surer(DRAFT, 1, 0.6), block=4, max_tokens=3)
    assert check(setting).n_accepted > 0


@pytest.mark.parametrize("rule", RULES)
def test_with_preemption(rule: str, guided: str) -> None:
    """Two rows in memory for one and a half."""
    setting = Setting(under(rule, "sd"), TARGET, DRAFT, n_rows=2, max_tokens=3, n_pages=3, page_size=2)
    assert check(setting).n_preemptions > 0
