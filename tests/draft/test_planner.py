"""Planners: what they plan, and that learning moves them the right way."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo import fanout
from saguaro.algo.planning import Ahead, Planned
from saguaro.draft.planner import FanOut, Kind, Last, Planner, Shape, make_planner
from saguaro.method import GROWTHS
from saguaro.types import Outcome
from tests.algo.test_planning import aheads, outcomes, possible

QUICK = settings(max_examples=30, deadline=None, derandomize=True, database=None)
LIST = (3, 2, 2, 4)
NAMES = [name for name in GROWTHS if name not in ("nothing", "best")]
KINDS: list[Kind] = ["uniform", "geometric", "general"]


def named(name: str) -> Planner:
    planner = make_planner(name, LIST)
    assert planner is not None
    return planner


def flight(n_rows: int = 1, K: int = 3, C: int = 8, is_primary: bool = True) -> Ahead:
    """Rows whose candidates are 10, 11, 12 .. at every position; 10 is in flight."""
    candidates = torch.arange(10, 10 + C).expand(n_rows, K + 1, C).clone()
    known = torch.ones_like(candidates, dtype=torch.bool)
    tokens, length = torch.full((n_rows, K), 10), torch.full((n_rows,), K)
    return Ahead(torch.arange(n_rows), tokens, length, candidates, known, torch.full((n_rows,), is_primary))


def shorter(ahead: Ahead, length: int) -> Ahead:
    """The same rows with fewer tokens in flight."""
    is_beyond = torch.arange(ahead.tokens.shape[1]) >= length
    return replace(ahead, length=torch.full_like(ahead.length, length), tokens=ahead.tokens.masked_fill(is_beyond, 0))


def outcome(slots: list[int], length: list[int], k: list[int], bonus: list[int]) -> Outcome:
    return Outcome(torch.tensor(slots), torch.tensor(length), torch.tensor(k), torch.tensor(bonus))


def lists(planner: FanOut, M: int, K: int = 3, C: int = 8) -> Tensor:
    """The lists of a planner."""
    return planner.lists(Shape(K, C, M, torch.device("cpu")))


def teach(planner: Planner, ahead: Ahead, k: int, bonus: int, times: int = 50, length: int | None = None) -> None:
    """The same outcome for every row, again and again."""
    n = len(ahead.slots)
    verified = ahead.length.tolist() if length is None else [length] * n
    for _ in range(times):
        planner.plan(ahead, 4)
        planner.learn(outcome(ahead.slots.tolist(), verified, [k] * n, [bonus] * n))


@QUICK
@given(rounds=st.lists(aheads(), min_size=1, max_size=3), M=st.integers(0, 12), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_is_possible_and_every_outcome_is_learnt(name: str, rounds: list[Ahead], M: int, seed: int) -> None:
    planner, g = named(name), torch.Generator().manual_seed(seed)
    for ahead in rounds:
        planned = planner.plan(ahead, M)
        assert planned.k.shape == planned.token.shape == (len(ahead.slots), M)
        for b in range(len(ahead.slots)):
            found = outcomes(planned, b)
            assert len(set(found)) == len(found)
            assert set(found) <= set(possible(ahead, b))
        length = (ahead.length - torch.randint(0, 2, ahead.length.shape, generator=g)).clamp(min=0)  # often cut
        k = (torch.rand(length.shape, generator=g) * (length + 1)).long()
        planner.learn(Outcome(ahead.slots, length, k, torch.randint(0, 9, k.shape, generator=g)))


@pytest.mark.parametrize("name", ["uniform", "geometric", "general"])
def test_the_whole_budget_is_spent(name: str) -> None:
    planner, ahead = named(name), flight(C=16)
    for _ in range(3):
        assert len(outcomes(planner.plan(ahead, 12), 0)) == 12
        teach(planner, ahead, k=3, bonus=10, times=40)


def test_the_names() -> None:
    assert make_planner("nothing") is make_planner("best") is None
    assert [repr(make_planner(kind)) for kind in KINDS] == [f"FanOut({kind!r})" for kind in KINDS]
    assert repr(make_planner("list", LIST)) == "FanOut((3, 2, 2, 4))"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("continuation", [(3, 10)]),
        ("branch", [(3, 10), (3, 11), (3, 12), (3, 13)]),
        ("uniform", [(0, 11), (1, 11), (2, 11), (3, 10)]),
        ("list", [(0, 11), (1, 11), (2, 11), (3, 10)]),
    ],
)
def test_what_the_simple_ones_plan(name: str, expected: list[tuple[int, int]]) -> None:
    assert outcomes(named(name).plan(flight(), 4), 0) == expected


def test_a_short_speculation_is_all_accepted_at_its_own_length() -> None:
    ahead = shorter(flight(), 1)
    assert outcomes(Last(1).plan(ahead, 4), 0) == [(1, 10)]
    assert outcomes(FanOut("uniform").plan(ahead, 4), 0) == [(0, 11), (1, 10), (0, 12), (1, 11)]
    assert outcomes(FanOut(LIST).plan(ahead, 7), 0).count((1, 10)) == 1
    assert [k for k, _ in outcomes(FanOut(LIST).plan(ahead, 7), 0)].count(1) == 4  # the last number


def test_a_list_is_planned_as_it_is_given() -> None:
    counts = [k for k, _ in outcomes(FanOut(LIST).plan(flight(), 11), 0)]
    assert [counts.count(k) for k in range(4)] == list(LIST)


@pytest.mark.parametrize("name", NAMES)
def test_the_fan_out_is_what_is_planned(name: str) -> None:
    """Of a whole speculation; Saguaro sampling holds back so many."""
    planner = named(name)
    found = planner.fan_out(Shape(3, 16, 11, torch.device("cpu")))
    for is_primary in (False, True):
        counts = [k for k, _ in outcomes(planner.plan(flight(C=16, is_primary=is_primary), 11), 0)]
        assert [counts.count(k) for k in range(4)] == found[int(is_primary)].tolist()


def test_the_lists_before_anything_is_known_are_those_of_the_paper() -> None:
    planner = FanOut("geometric")
    found = lists(planner, 24, K=7, C=16)
    for n in range(8):
        assert found[0, n].tolist() == [*fanout.geometric(0.8, 1.0, n, 24), *[0] * (7 - n)]
    assert found[0].equal(found[1])


def test_recorded_rounds_are_of_one_kind_and_length() -> None:
    planner = FanOut("geometric")
    assert planner.recorded(True, 3, 8) is None
    teach(planner, flight(), k=1, bonus=12, times=2)
    teach(planner, flight(), k=3, bonus=10, times=1)
    teach(planner, flight(), k=2, bonus=10, times=1, length=2)  # cut short
    found = planner.recorded(True, 3, 8)
    assert found is not None
    assert (found.k.tolist(), found.rank.tolist()) == ([1, 1, 3], [1, 1, 0]), "12 is second after 10, which was refused"
    few = planner.recorded(True, 3, 1)
    assert few is not None
    assert few.rank.tolist() == [-1, -1, 0]
    assert planner.recorded(False, 3, 8) is None


@pytest.mark.parametrize("kind", ["geometric", "general"])
def test_lists_follow_the_outcomes_after_primary_and_backup_apart(kind: Kind) -> None:
    planner = FanOut(kind)
    teach(planner, flight(8, is_primary=True), k=3, bonus=10)
    teach(planner, flight(8, is_primary=False), k=0, bonus=11)
    backup, primary = lists(planner, 12)[:, 3].tolist()
    assert primary[3] > 6 > primary[0]
    assert backup[0] > 6 > backup[3]
    assert sum(primary) == sum(backup) == 12
    short = lists(planner, 12)[1, 1].tolist()  # length 1: the last k is 1
    assert short[1] > short[0]
    assert short[2:] == [0, 0]
    both = replace(flight(2), is_primary=torch.tensor([True, False]))
    planned = planner.plan(both, 12)
    assert [[k for k, _ in outcomes(planned, b)].count(3) for b in range(2)] == [min(8, primary[3]), backup[3]]


def test_the_general_list_knows_where_one_candidate_is_enough() -> None:
    planner = FanOut("general")
    for bonus in (11, 12, 13, 14, 15, 16):  # rejected at 0: any of six; all accepted: always the first
        for k, token in ((0, bonus), (3, 10)):
            teach(planner, flight(8), k=k, bonus=token, times=8)
    first, *_, last = lists(planner, 8)[1, 3].tolist()
    assert last < first


def test_a_short_speculation_teaches_the_general_list_no_rejection() -> None:
    planner = FanOut("general")
    teach(planner, shorter(flight(8), 1), k=1, bonus=10)
    _, second, _, last = lists(planner, 8)[1, 3].tolist()
    assert last > second  # the second token was never tested


@pytest.mark.parametrize("accepted", [1, 3])
def test_all_accepted_is_the_same_at_any_length(accepted: int) -> None:
    """Rejected at 0: any of six; all accepted, at whatever length: always the first candidate."""
    planner, full = FanOut("general"), flight(8)
    for bonus in (11, 12, 13, 14, 15, 16):
        teach(planner, full, k=0, bonus=bonus, times=8)
        teach(planner, shorter(full, accepted), k=accepted, bonus=10, times=8)
    for length in (1, 2, 3):
        of = lists(planner, 8)[1, length].tolist()
        assert of[0] == 6
        assert of[length] <= 2
    _, h = planner._fit_tables(planner._rounds[1], 3, 8)
    assert float(h[3, 1]) > 0.9
    assert float(h[1, 1]) < 0.4


def test_lists_keep_their_addresses() -> None:
    """Each batch size may have its own, and what was captured has the address."""
    planner, ahead = FanOut("geometric"), flight(4)
    four, two = lists(planner, 4), lists(planner, 2)
    before = four.clone(), two.clone()
    teach(planner, ahead, k=3, bonus=10, times=7)  # 28 rounds: too few
    assert lists(planner, 4).equal(before[0])
    teach(planner, ahead, k=3, bonus=10, times=33)
    assert lists(planner, 4) is four
    assert lists(planner, 2) is two
    assert not four.equal(before[0])
    assert len(outcomes(planner.plan(ahead, 4), 0)) == 4


def test_the_lists_forget() -> None:
    planner, fresh, ahead = FanOut("geometric"), FanOut("geometric"), flight(4)
    teach(planner, ahead, k=3, bonus=10, times=8)
    for one in (planner, fresh):
        teach(one, ahead, k=0, bonus=11, times=FanOut.WINDOW // 4 + FanOut.REFIT)
    assert lists(planner, 4).equal(lists(fresh, 4))


@pytest.mark.parametrize("name", ["geometric", "general"])
def test_only_what_was_planned_for_is_learnt_and_only_once(name: str) -> None:
    planner, same = named(name), named(name)
    ahead = flight(2, K=2)
    ahead = replace(ahead, slots=torch.tensor([5, 9]))
    for one in (planner, same):
        one.learn(outcome([5], [2], [2], [10]))  # nothing was planned yet
    for _ in range(40):
        planner.plan(ahead, 4)
        planner.learn(outcome([7, 9], [2, 2], [0, 1], [11, 12]))  # 7 was not in flight
        planner.learn(outcome([5, 9], [2, 2], [2, 0], [10, 15]))  # 9 is known already
        planner.learn(outcome([5, 9], [2, 2], [0, 0], [11, 11]))  # both are
        planner.learn(Outcome.nothing())
        same.plan(ahead, 4)
        same.learn(outcome([9, 5], [2, 2], [1, 2], [12, 10]))
    assert planner.plan(ahead, 8).k.equal(same.plan(ahead, 8).k)
    assert isinstance(planner, FanOut)
    assert isinstance(same, FanOut)
    assert lists(planner, 8, K=2).equal(lists(same, 8, K=2))


def rounds(n: int, K: int, C: int, seed: int, noise: float) -> tuple[Ahead, Tensor, Tensor]:
    """A workload with shared noise: the draft's scores are the target's, disturbed; ahead, k [n] and bonus [n].

    Texts are easy and hard: the logits of a position have their own spread.
    """
    g = torch.Generator().manual_seed(seed)
    spread = torch.empty(n, K + 1, 1).uniform_(0.5, 4, generator=g)
    logits = torch.randn(n, K + 1, 64, generator=g) * spread
    gumbel = -torch.empty_like(logits).exponential_(generator=g).log()
    target = logits.log_softmax(-1) + gumbel
    draft = (logits + noise * torch.randn(logits.shape, generator=g)).log_softmax(-1) + gumbel
    candidates = draft.topk(C).indices
    tokens, own = candidates[:, :K, 0], target.argmax(-1)
    k = (tokens == own[:, :K]).long().cumprod(1).sum(1)
    known = torch.ones_like(candidates, dtype=torch.bool)
    ahead = Ahead(torch.arange(n), tokens, torch.full((n,), K), candidates, known, torch.ones(n, dtype=torch.bool))
    return ahead, k, own.gather(1, k[:, None])[:, 0]


def hit_rate(planner: Planner, n: int, M: int, noise: float = 0.8) -> float:
    """How many of n batches of 16 rounds find their outcome prepared."""
    n_hits = 0
    for seed in range(n):
        ahead, k, bonus = rounds(16, K=5, C=16, seed=seed, noise=noise)
        planned: Planned = planner.plan(ahead, M)
        n_hits += int(((planned.k == k[:, None]) & (planned.token == bonus[:, None])).any(1).sum())
        planner.learn(Outcome(ahead.slots, ahead.length, k, bonus))
    return n_hits / (16 * n)


@pytest.mark.parametrize("M", [6, 12])
def test_fitted_lists_hit_more_often_than_equal_ones(M: int) -> None:
    rate = {name: hit_rate(named(name), 80, M) for name in ("uniform", "geometric", "general")}
    assert rate["geometric"] >= rate["uniform"]
    assert rate["general"] >= rate["uniform"]
