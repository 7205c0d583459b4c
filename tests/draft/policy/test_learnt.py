"""What is learnt from rounds, and from which of them. The clock is a number."""

import pytest
import torch

from saguaro.draft.policy.learnt import ASSUMED, OF_ROW, Learnt
from saguaro.draft.rows import DraftRows
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM, Joined, Outcome
from tests.draft.policy.world import Clock


class Side:
    """The calls of a draft's side, round by round."""

    def __init__(self, n_rows: int = 1, *, is_prepared_alike: bool = True) -> None:
        self.clock = Clock()
        self.learnt = Learnt(self.clock, is_prepared_alike=is_prepared_alike)
        self.rows = DraftRows()
        self.admit(*range(n_rows))

    def admit(self, *slots: int) -> None:
        self.rows.admit([Joined(slot, [1]) for slot in slots])

    def round(
        self,
        seconds: float,
        length: int = 0,
        k: int = 0,
        source: int = DRAFT,
        n_asked: int | None = None,
        is_beside: bool = False,
        is_disturbed: bool = False,
    ) -> None:
        """A round of the first n_asked rows, with a speculation of this length each, of which k tokens stand."""
        asked = list(self.rows)[:n_asked]
        for row in asked:
            row.propose([1] * length, source)
        self.learnt.answered(self.rows, asked)
        self.learnt.until_outcome(is_beside, is_disturbed)
        self.clock.now += seconds
        slots = torch.tensor([row.slot for row in asked], dtype=torch.int64)
        same = torch.ones_like(slots)
        self.learnt.outcome(Outcome(slots, length * same, k * same, same), self.rows)


def test_a_verification_lasts_from_the_reply_to_the_outcome() -> None:
    side = Side(n_rows=2)
    side.round(9.0)  # all rows are new
    for _ in range(60):
        side.round(1.0)
        side.clock.now += 5.0  # drafting
        side.round(3.0, length=4)
    assert side.learnt.alone.at(2) == pytest.approx(1.0, rel=0.05)
    assert side.learnt.alone.at(10) == pytest.approx(3.0, rel=0.05)
    assert side.learnt.alone.slope() == pytest.approx(0.25, rel=0.05)


def test_rounds_that_something_disturbs_say_nothing() -> None:
    """A row that is read, one that joins, one that leaves, or a text that the draft reads."""
    side = Side(n_rows=2)
    side.round(1.0)
    side.round(1.0)
    n = side.learnt.alone.n
    assert n == 1
    side.round(7.0, n_asked=1)
    side.round(7.0, is_disturbed=True)
    side.admit(2)
    side.round(7.0)
    assert side.learnt.alone.n == n
    asked = list(side.rows)
    side.learnt.answered(side.rows, asked)
    side.rows.retire([2])
    one = torch.tensor([0])
    side.learnt.outcome(Outcome(one, one, one, one), side.rows)
    assert side.learnt.alone.n == n
    side.round(1.0)
    assert side.learnt.alone.n > n


def test_beside_a_preparation_is_another_thing() -> None:
    side = Side()
    side.round(1.0)
    for _ in range(20):
        side.round(1.0)
        side.round(2.0, is_beside=True)
    assert side.learnt.alone.at(1) == pytest.approx(1.0)
    assert side.learnt.beside.at(1) == pytest.approx(2.0)
    assert side.learnt.verification is side.learnt.beside
    side.learnt.until_outcome(is_beside=False, is_disturbed=False)
    assert side.learnt.verification is side.learnt.alone


def test_each_proposer_has_its_own_account() -> None:
    """What was prepared counts as the model's; a row without a speculation, as the backup's."""
    side = Side()
    side.round(1.0, length=4, k=3, source=CACHE)
    side.round(1.0, length=2, k=1, source=DRAFT)
    side.round(1.0, length=1, k=1, source=NGRAM)
    side.round(1.0, length=0, source=EMPTY)
    learnt = side.learnt
    assert learnt.by_model.accepted.mean(0.0) == pytest.approx((0.99 * 3 + 1) / 1.99)
    assert learnt.by_backup.accepted.mean(0.0) == pytest.approx(0.99 / 1.99)
    assert learnt.by_model.length.n + learnt.by_backup.length.n == pytest.approx(2 * 1.98)
    assert {kind: average.mean(0.0) for kind, average in learnt.worth.items()} == {
        (DRAFT, 4): 3,
        (DRAFT, 2): 1,
        (NGRAM, 1): 1,
        (EMPTY, 0): 0,
    }


def test_what_is_prepared_from_less_is_learnt_apart() -> None:
    """It is the model's still."""
    side = Side(is_prepared_alike=False)
    side.round(1.0, length=4, k=1, source=CACHE)
    side.round(1.0, length=4, k=3, source=DRAFT)
    assert {kind: average.mean(0.0) for kind, average in side.learnt.worth.items()} == {(CACHE, 4): 1, (DRAFT, 4): 3}
    assert side.learnt.by_model.accepted.mean(0.0) == pytest.approx((0.99 + 3) / 1.99)


def test_a_text_is_expected_to_be_like_others_until_it_is_known() -> None:
    side = Side(n_rows=2)
    rows = list(side.rows)
    assert side.learnt.model_accepts(rows, most=4) == 8.0, "full acceptance before anything is known"
    side.round(1.0, length=4, k=0, n_asked=1)
    usual = 4.0 * (ASSUMED - 1) / ASSUMED
    assert side.learnt.model_accepts(rows[1:], most=4) == pytest.approx(usual)
    assert side.learnt.model_accepts(rows[:1], most=4) == pytest.approx(usual * OF_ROW / (OF_ROW + 1))
    for _ in range(400):
        side.round(1.0, length=4, k=2, n_asked=1)
    assert side.learnt.model_accepts(rows, most=4) == pytest.approx(4.0, rel=0.02)


def test_what_left_counts_for_nothing() -> None:
    side = Side()
    gone = torch.tensor([7])
    side.learnt.outcome(Outcome(gone, gone, gone, gone), side.rows)
    assert not side.learnt.worth
    assert side.learnt.by_backup.accepted.n == 0


def test_how_much_of_a_chain_is_worth_verifying() -> None:
    """The third token stands once in eight times: 0.5 x 0.5 x 0.5."""
    side = Side()
    assert side.learnt.by_backup.worth(0.9) == 1, "a chain is tried"
    for at in range(512):
        side.round(1.0, length=3, k=(0, 1, 0, 2, 0, 1, 0, 3)[at % 8], source=NGRAM)
    worth = side.learnt.by_backup.worth
    assert [worth(least) for least in (0.6, 0.4, 0.2, 0.1)] == [0, 1, 2, 4], "one more than is known"
