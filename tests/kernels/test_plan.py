"""The joint planner's kernels against Joint in plain torch: the same plans, and the same tables, round by round."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from saguaro.algo.planning import NEVER, Ahead, Planned
from saguaro.device.graphs import Graphs
from saguaro.draft.planner import Joint
from saguaro.kernels.plan import TritonJoint
from saguaro.types import Outcome
from tests.algo.test_planning import aheads, outcomes, possible

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK = settings(max_examples=6, deadline=None, derandomize=True, database=None)
UNVERIFIED = 2**30  # the length of an outcome that is not known


def moved(ahead: Ahead, to: torch.device = DEVICE) -> Ahead:
    names = ("slots", "tokens", "length", "candidates", "scores", "is_primary")
    return Ahead(*(getattr(ahead, name).to(to) for name in names))


def flight(B: int, K: int, C: int, g: torch.Generator, n_vocab: int = 700) -> Ahead:
    """Speculations as a draft makes them: mostly its best candidates, some cut short, some rows mere padding."""
    logits = torch.randn(B, K + 1, n_vocab, generator=g) * torch.empty(B, K + 1, 1).uniform_(0.5, 4, generator=g)
    scores, candidates = logits.topk(C)
    n_real = torch.randint(0, 4 * C, (B, K + 1, 1), generator=g)
    scores = scores.masked_fill(torch.arange(C) >= n_real, NEVER)
    other = torch.randint(0, n_vocab, (B, K), generator=g)
    tokens = torch.where(torch.rand(B, K, generator=g) < 0.8, candidates[:, :K, 0], other)
    is_short = torch.rand(B, generator=g) < 0.3
    length = torch.where(is_short, torch.randint(-1, K + 1, (B,), generator=g), K)
    tokens = tokens.masked_fill(torch.arange(K) >= length[:, None], 0)
    slots = torch.randperm(2 * B, generator=g)[:B].masked_fill(length < 0, 2 * B)
    return Ahead(slots, tokens, length, candidates, scores, torch.rand(B, generator=g) < 0.5)


def verified(ahead: Ahead, g: torch.Generator) -> Outcome:
    """What may become of them: some cut, some not verified, some of rows that nobody planned for."""
    length = (ahead.length - (torch.rand(ahead.length.shape, generator=g) < 0.3).long()).clamp(min=0)
    k = (torch.rand(length.shape, generator=g).sqrt() * (length + 1)).long().minimum(length)
    column = torch.randint(0, min(3, ahead.candidates.shape[2]), k.shape, generator=g)
    bonus = ahead.candidates[torch.arange(len(k)), k, column] + (torch.rand(k.shape, generator=g) < 0.2).long()
    is_decided = torch.rand(k.shape, generator=g) < 0.8
    length = torch.where(is_decided & (ahead.length >= 0), length, UNVERIFIED)
    slots = torch.where(torch.rand(k.shape, generator=g) < 0.1, ahead.slots + 1000, ahead.slots)
    order = torch.randperm(len(k), generator=g)
    lines = torch.stack((slots, length, k, bonus), 1)[order].to(
        DEVICE
    )  # columns of lines, as a captured round has them
    return Outcome(lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3])


class Pair:
    """The twin and the kernels, in step."""

    def __init__(self, n_rows: int = 0) -> None:
        self.plain, self.fused = Joint(), Joint(TritonJoint(), n_rows)

    def plan(self, ahead: Ahead, M: int) -> Planned:
        """The kernel's plan; it is the twin's, but for outcomes that are as likely."""
        expected, found = (planner.plan(moved(ahead), M) for planner in (self.plain, self.fused))
        assert found.k.shape == found.token.shape == (len(ahead.slots), M)
        assert found.k.dtype == found.token.dtype == torch.int64
        chance = self.plain.chance(moved(ahead)).cpu()
        for b in range(len(ahead.slots)):
            pairs, twins = outcomes(found, b), outcomes(expected, b)
            assert len(set(pairs)) == len(pairs) == len(twins)
            assert set(pairs) <= set(possible(ahead, b))
            at = [
                [float(chance[b, k, ahead.candidates[b, k].tolist().index(token)]) for k, token in each]
                for each in (pairs, twins)
            ]
            for pair, twin, mine, theirs in zip(pairs, twins, *at, strict=True):
                assert pair == twin or mine == pytest.approx(theirs, rel=1e-6)
        return found

    def learn(self, outcome: Outcome) -> None:
        """The tables are the same afterwards, and so are the rows that are still waited for."""
        for planner in (self.plain, self.fused):
            planner.learn(outcome)
        for mine, theirs in zip(self.tables(self.fused), self.tables(self.plain), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-12)
        assert self.waiting(self.fused) == self.waiting(self.plain)

    def tables(self, planner: Joint) -> tuple[Tensor, Tensor]:
        return planner._accept.on(DEVICE), planner._bonus.on(DEVICE)

    def waiting(self, planner: Joint) -> list[int]:
        held = planner._waiting.held
        return [] if held is None else [slot for slot in held.slots.tolist() if slot >= 0]


@QUICK
@given(rounds=st.lists(aheads(), min_size=1, max_size=3), M=st.integers(0, 12), seed=st.integers(0, 99))
def test_any_rows(rounds: list[Ahead], M: int, seed: int) -> None:
    pair, g = Pair(), torch.Generator().manual_seed(seed)
    for ahead in rounds:
        pair.plan(ahead, M)
        pair.learn(verified(ahead, g))


@pytest.mark.parametrize(
    ("B", "K", "C", "M", "n_rounds"),
    [
        pytest.param(3, 6, 9, 8, 4, id="as it is used"),
        pytest.param(24, 3, 5, 4, 1, id="a large batch"),
        pytest.param(5, 1, 600, 3, 2, id="more than is learnt from at a time"),
        pytest.param(2, 15, 65, 64, 1, id="a large tile"),
        pytest.param(2, 16, 33, 5, 2, id="more candidates than needed"),
        pytest.param(2, 1, 2, 9, 4, id="more places than outcomes"),
        pytest.param(3, 0, 1, 2, 4, id="nothing in flight"),
        pytest.param(2, 3, 4, 0, 2, id="no budget"),
    ],
)
def test_rounds(B: int, K: int, C: int, M: int, n_rounds: int) -> None:
    pair, g = Pair(), torch.Generator().manual_seed(B * K + C)
    for _ in range(n_rounds):
        ahead = flight(B, K, C, g)
        pair.plan(ahead, M)
        pair.learn(verified(ahead, g))
    assert bool(pair.tables(pair.fused)[1][:2].any())  # something was learnt


def test_batches_of_many_sizes_share_the_room_of_the_largest() -> None:
    pair, g = Pair(n_rows=4), torch.Generator().manual_seed(3)
    pair.plan(flight(2, 3, 4, g), 4)
    held = pair.fused._waiting.held
    assert held is not None
    assert len(held.slots) == 4
    before = [x.data_ptr() for x in (held.slots, held.candidates, *pair.tables(pair.fused))]
    for B in (4, 1, 0, 3):
        ahead = flight(B, 3, 4, g)
        pair.plan(ahead, 4)
        pair.learn(verified(ahead, g))
        pair.learn(verified(ahead, g))  # what is known is not learnt again
    assert pair.fused._waiting.held is held
    assert [x.data_ptr() for x in (held.slots, held.candidates, *pair.tables(pair.fused))] == before


def test_there_is_no_growing_after_a_capture() -> None:
    planner, g = Joint(TritonJoint()), torch.Generator().manual_seed(4)
    planner.plan(moved(flight(2, 3, 4, g)), 4)
    planner._waiting._is_captured = True
    planner.plan(moved(flight(1, 3, 4, g)), 4)
    with pytest.raises(AssertionError, match="3 rows, and those before were captured with less room"):
        planner.plan(moved(flight(3, 3, 4, g)), 4)


def test_padding_is_neither_planned_nor_learnt() -> None:
    pair, g = Pair(), torch.Generator().manual_seed(5)
    ahead = flight(4, 3, 5, g)
    nobody = torch.tensor([False, True, False, True])
    length = torch.where(nobody, -1, 3)
    ahead = replace(ahead, slots=torch.tensor([4, 9, 6, 9]), length=length, scores=ahead.scores.nan_to_num(neginf=-9.0))
    planned = pair.plan(ahead, 4)
    assert (planned.k >= 0).any(1).tolist() == [True, False, True, False]
    before = [table.clone() for table in pair.tables(pair.fused)]
    slots = ahead.slots.to(DEVICE)
    pair.learn(Outcome(slots, torch.full_like(slots, UNVERIFIED), slots * 0, slots * 0))
    assert all(a.equal(b) for a, b in zip(before, pair.tables(pair.fused), strict=True))
    assert pair.waiting(pair.fused) == [4, 9, 6, 9]


def test_columns_of_a_wider_matrix_are_read_where_they_are() -> None:
    pair, g = Pair(), torch.Generator().manual_seed(6)
    ahead = flight(5, 4, 5, g)
    lines = torch.cat((ahead.slots[:, None], ahead.length[:, None], ahead.tokens), 1)
    wide = torch.cat((ahead.scores, ahead.scores), 2)
    ahead = replace(ahead, slots=lines[:, 0], length=lines[:, 1], tokens=lines[:, 2:], scores=wide[..., :5])
    pair.plan(ahead, 6)
    pair.learn(verified(ahead, g))


@pytest.mark.parametrize("scale", [0.0, 0.25], ids=["all alike", "on the edges of the bins"])
def test_ties_go_to_the_first(scale: float) -> None:
    ahead = flight(2, 3, 6, torch.Generator().manual_seed(7))
    ahead = replace(ahead, scores=-scale * torch.arange(6.0).expand(2, 4, 6).clone())
    plain, fused = Joint().plan(moved(ahead), 30), Joint(TritonJoint()).plan(moved(ahead), 30)
    assert fused.k.equal(plain.k)
    assert fused.token.equal(plain.token)


def test_a_captured_round_finds_its_state_again() -> None:
    """Where there is CUDA, replayed; elsewhere it is simply called."""
    pair, graphs, g = Pair(n_rows=4), Graphs(DEVICE), torch.Generator().manual_seed(8)
    last = {B: flight(B, 3, 4, g) for B in (1, 2)}
    outcome = {B: verified(ahead, g) for B, ahead in last.items()}
    at = {B: moved(ahead) for B, ahead in last.items()}  # what is captured reads from here
    found = {B: torch.zeros(2, B, 5, dtype=torch.int64, device=DEVICE) for B in (1, 2)}

    def learn_and_plan(B: int) -> None:
        pair.fused.learn(outcome[B])
        planned = pair.fused.plan(at[B], 5)
        found[B].copy_(torch.stack((planned.k, planned.token)))

    for B in (1, 2, 2, 1, 2):
        ahead, decided = flight(B, 3, 4, g), verified(last[B], g)
        for name in ("slots", "length", "n_accepted", "bonus"):
            getattr(outcome[B], name).copy_(getattr(decided, name))
        for name in ("slots", "tokens", "length", "candidates", "scores"):
            getattr(at[B], name).copy_(getattr(ahead, name))
        pair.plain.learn(decided)
        expected = pair.plain.plan(moved(ahead), 5)
        graphs.run(B, partial(learn_and_plan, B))
        assert found[B][0].equal(expected.k)
        assert found[B][1].equal(expected.token)
        last[B] = ahead
    assert pair.waiting(pair.fused) == pair.waiting(pair.plain)
    for mine, theirs in zip(pair.tables(pair.fused), pair.tables(pair.plain), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-12)
