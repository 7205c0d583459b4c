"""Planners: what they plan, and that learning moves them the right way."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saguaro.algo import fanout
from saguaro.algo.planning import Ahead, Planned
from saguaro.draft.planner import FanOut, Joint, Kind, Last, Planner, make_planner
from saguaro.errors import ConfigError
from saguaro.types import Outcome
from tests.algo.test_planning import aheads, outcomes, possible

QUICK = settings(max_examples=30, deadline=None, derandomize=True, database=None)
NAMES = ["last", "continuation", "branch", "uniform", "geometric", "general", "joint"]
KINDS: list[Kind] = ["uniform", "geometric", "general"]


def named(name: str) -> Planner:
    planner = make_planner(name)
    assert planner is not None
    return planner


def flight(n_rows: int = 1, K: int = 3, gap: float = 1.0, C: int = 8, is_primary: bool = True) -> Ahead:
    """Rows whose candidates are 10, 11, 12 .. at every position, each `gap` below the one before; 10 is in flight."""
    candidates = torch.arange(10, 10 + C).expand(n_rows, K + 1, C).clone()
    scores = -gap * torch.arange(C, dtype=torch.float32).expand(n_rows, K + 1, C)
    tokens, length = torch.full((n_rows, K), 10), torch.full((n_rows,), K)
    return Ahead(torch.arange(n_rows), tokens, length, candidates, scores, torch.full((n_rows,), is_primary))


def shorter(ahead: Ahead, length: int) -> Ahead:
    """The same rows with fewer tokens in flight."""
    is_beyond = torch.arange(ahead.tokens.shape[1]) >= length
    return replace(ahead, length=torch.full_like(ahead.length, length), tokens=ahead.tokens.masked_fill(is_beyond, 0))


def outcome(slots: list[int], length: list[int], k: list[int], bonus: list[int]) -> Outcome:
    return Outcome(torch.tensor(slots), torch.tensor(length), torch.tensor(k), torch.tensor(bonus))


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


@pytest.mark.parametrize("name", ["uniform", "geometric", "general", "joint"])
def test_the_whole_budget_is_spent(name: str) -> None:
    planner, ahead = named(name), flight(C=16)
    for _ in range(3):
        assert len(outcomes(planner.plan(ahead, 12), 0)) == 12
        teach(planner, ahead, k=3, bonus=10, times=40)


def test_the_names() -> None:
    assert make_planner("nothing") is None
    assert [repr(make_planner(kind)) for kind in KINDS] == [f"FanOut({kind!r})" for kind in KINDS]
    assert isinstance(make_planner("joint"), Joint)
    with pytest.raises(ConfigError, match="planner is 'best'; give nothing, last"):
        make_planner("best")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("last", [(3, 10)]),
        ("continuation", [(3, 10)]),
        ("branch", [(3, 10), (3, 11), (3, 12), (3, 13)]),
        ("uniform", [(0, 11), (1, 11), (2, 11), (3, 10)]),
    ],
)
def test_what_the_simple_ones_plan(name: str, expected: list[tuple[int, int]]) -> None:
    assert outcomes(named(name).plan(flight(), 4), 0) == expected


def test_a_short_speculation_is_all_accepted_at_its_own_length() -> None:
    ahead = shorter(flight(), 1)
    assert outcomes(Last(1).plan(ahead, 4), 0) == [(1, 10)]
    assert outcomes(FanOut("uniform").plan(ahead, 4), 0) == [(0, 11), (1, 10), (0, 12), (1, 11)]
    assert max(k for k, _ in outcomes(Joint().plan(ahead, 4), 0)) == 1


def test_the_lists_before_anything_is_known_are_those_of_the_paper() -> None:
    planner = FanOut("geometric")
    planner.plan(flight(K=7, C=16), 24)
    for n in range(8):
        assert planner.lists()[0, n].tolist() == [*fanout.geometric(0.8, 1.0, n, 24), *[0] * (7 - n)]
    assert planner.lists()[0].equal(planner.lists()[1])


@pytest.mark.parametrize("kind", ["geometric", "general"])
def test_lists_follow_the_outcomes_after_primary_and_backup_apart(kind: Kind) -> None:
    planner = FanOut(kind)
    teach(planner, flight(8, is_primary=True), k=3, bonus=10)
    teach(planner, flight(8, is_primary=False), k=0, bonus=11)
    planner.plan(flight(), 12)
    backup, primary = planner.lists()[:, 3].tolist()
    assert primary[3] > 6 > primary[0]
    assert backup[0] > 6 > backup[3]
    assert sum(primary) == sum(backup) == 12
    short = planner.lists()[1, 1].tolist()  # length 1: the last k is 1
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
    planner.plan(flight(), 8)
    first, *_, last = planner.lists()[1, 3].tolist()
    assert last < first


def test_a_short_speculation_teaches_the_general_list_no_rejection() -> None:
    planner = FanOut("general")
    teach(planner, shorter(flight(8), 1), k=1, bonus=10)
    planner.plan(flight(), 8)
    _, second, _, last = planner.lists()[1, 3].tolist()
    assert last > second  # the second token was never tested


@pytest.mark.parametrize("accepted", [1, 3])
def test_all_accepted_is_the_same_at_any_length(accepted: int) -> None:
    """Rejected at 0: any of six; all accepted, at whatever length: always the first candidate."""
    planner, full = FanOut("general"), flight(8)
    for bonus in (11, 12, 13, 14, 15, 16):
        teach(planner, full, k=0, bonus=bonus, times=8)
        teach(planner, shorter(full, accepted), k=accepted, bonus=10, times=8)
    planner.plan(full, 8)
    for length in (1, 2, 3):
        of = planner.lists()[1, length].tolist()
        assert of[0] == 6
        assert of[length] <= 2
    _, h = planner._fit_tables(planner._rounds[1], 3, 8)
    assert float(h[3, 1]) > 0.9
    assert float(h[1, 1]) < 0.4


def test_a_list_stays_where_it_is_when_another_budget_is_planned() -> None:
    """Each batch size may have its own, and what was captured has the address."""
    planner, ahead = FanOut("uniform"), flight()
    planner.plan(ahead, 4)
    four = planner.lists()
    assert outcomes(planner.plan(ahead, 2), 0) == outcomes(FanOut("uniform").plan(ahead, 2), 0)
    assert planner.lists() is not four
    assert len(outcomes(planner.plan(ahead, 4), 0)) == 4
    assert planner.lists() is four


def test_the_lists_are_refitted_now_and_then_and_forget() -> None:
    planner, ahead = FanOut("geometric"), flight(4)
    teach(planner, ahead, k=3, bonus=10, times=7)  # 28 rounds: too few
    planner.plan(ahead, 4)
    before = planner.lists()
    teach(planner, ahead, k=3, bonus=10, times=1)
    planner.plan(ahead, 4)
    assert planner.lists() is not before
    teach(planner, ahead, k=0, bonus=11, times=FanOut.WINDOW // 4 + FanOut.REFIT)
    fresh = FanOut("geometric")
    teach(fresh, ahead, k=0, bonus=11, times=FanOut.WINDOW // 4 + FanOut.REFIT)
    assert planner.lists().equal(fresh.lists())


def test_joint_begins_with_what_the_draft_thinks() -> None:
    sure, unsure = (Joint().chance(flight(gap=gap)) for gap in (4.0, 0.1))
    assert float(sure[0, 3, 0]) > 0.5 > float(unsure[0, 3, 0])
    assert outcomes(Joint().plan(flight(gap=4.0), 1), 0) == [(3, 10)]
    assert outcomes(Joint().plan(flight(gap=0.1), 1), 0) == [(0, 11)]


def test_joint_prefers_the_position_the_draft_doubts() -> None:
    ahead = flight(gap=3.0)
    ahead.scores[0, 1] /= 30  # after one accepted token the draft is unsure
    rejected = [pair for pair in outcomes(Joint().plan(ahead, 12), 0) if pair[0] < 3]
    assert rejected[:3] == [(1, 11), (1, 12), (1, 13)]


def test_joint_chances_are_chances() -> None:
    planner, ahead = Joint(), flight(2)
    for k, bonus in ((0, 11), (3, 10), (1, 99)):
        teach(planner, ahead, k, bonus)
        chance = planner.chance(ahead)
        assert bool((chance >= 0).all())
        assert bool((chance <= 1).all())


@pytest.mark.parametrize(("k", "bonus"), [(0, 11), (0, 14), (1, 12), (2, 13), (3, 10), (3, 13)])
def test_joint_learns_the_outcome_that_comes(k: int, bonus: int) -> None:
    """Of positions that look the same only what is the same at all of them can be learnt: make them differ."""
    ahead = flight(4)
    for j in range(4):
        ahead.scores[:, j] *= 0.3 + j
    planner = Joint()
    before = planner.chance(ahead)[0]
    teach(planner, ahead, k, bonus, times=100)
    after = planner.chance(ahead)[0]
    assert float(after[k, bonus - 10]) > 0.85 > float(before[k, bonus - 10])
    assert outcomes(planner.plan(ahead, 1), 0) == [(k, bonus)]


def test_joint_tells_a_rejection_from_full_acceptance() -> None:
    """The second alternative after a rejection says nothing about the second candidate after the last token."""
    planner, ahead = Joint(), flight(4, K=1, gap=0.3)
    before = planner.chance(ahead)[0, 1]
    teach(planner, ahead, k=0, bonus=12)
    reached = planner.chance(ahead)[0, 1]
    assert torch.allclose(reached / reached.sum(), before / before.sum())


def test_joint_tells_a_sure_token_from_a_doubtful_one() -> None:
    """The same alternatives after the rejection of a token that led by little, and of one that led by far."""
    planner, little, far = Joint(), flight(4, K=1), flight(4, K=1)
    little.scores[:, 0, 0] -= 0.8
    far.scores[:, 0, 0] += 3
    teach(planner, little, k=0, bonus=11)
    teach(planner, far, k=0, bonus=13)
    assert [int(planner.chance(ahead)[0, 0].argmax()) + 10 for ahead in (little, far)] == [11, 13]


def test_a_bonus_that_is_no_candidate_lowers_them_all() -> None:
    planner, ahead = Joint(), flight(4, K=0)
    before = planner.chance(ahead)
    teach(planner, ahead, k=0, bonus=99)
    assert bool((planner.chance(ahead) < before).all())


def test_a_cut_speculation_was_accepted_as_far_as_it_went() -> None:
    """Cut to nothing: the token in flight was not tested, and it may be the bonus itself."""
    planner, ahead = Joint(), flight(4)
    ahead.scores[:, 0] *= 0.5  # so that its leads are its own
    before = planner.chance(ahead)
    teach(planner, ahead, k=0, bonus=10, length=0)
    assert planner.chance(ahead).equal(before)  # nothing in flight was tested, and no candidate after it
    assert float(planner.chance(replace(ahead, length=ahead.length * 0))[0, 0, 0]) > 0.9

    cut = Joint()
    teach(cut, ahead, k=1, bonus=10, length=1)
    assert float(cut.chance(ahead)[0, 0].sum()) < 0.1  # the first was accepted


@pytest.mark.parametrize("name", ["geometric", "general", "joint"])
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
    if isinstance(planner, Joint) and isinstance(same, Joint):
        assert torch.allclose(planner.chance(ahead), same.chance(ahead), rtol=1e-2)
    if isinstance(planner, FanOut) and isinstance(same, FanOut):
        assert planner.lists().equal(same.lists())


def test_an_outcome_longer_than_what_was_in_flight_is_of_something_else() -> None:
    planner, ahead = Joint(), flight()
    before = planner.chance(ahead)
    teach(planner, ahead, k=2, bonus=11, length=5)
    assert planner.chance(ahead).equal(before)


def test_nothing_is_learnt_beyond_the_length() -> None:
    planner, doubtful = Joint(), flight(gap=0.1)
    before = planner.chance(doubtful)
    teach(planner, shorter(flight(gap=4.0), 1), k=1, bonus=10)
    assert planner.chance(doubtful)[0, :3].equal(before[0, :3])


def test_joint_forgets() -> None:
    planner, ahead = Joint(), flight(16, K=1)
    teach(planner, ahead, k=0, bonus=11, times=400)
    assert float(planner.chance(ahead)[0, 0, 1]) > 0.9
    teach(planner, ahead, k=1, bonus=10, times=200)  # 3,200 rounds: a twenty-fifth of the old is left
    assert float(planner.chance(ahead)[0, 1, 0]) > 0.9


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
    scores, candidates = draft.topk(C)
    tokens, own = candidates[:, :K, 0], target.argmax(-1)
    k = (tokens == own[:, :K]).long().cumprod(1).sum(1)
    ahead = Ahead(torch.arange(n), tokens, torch.full((n,), K), candidates, scores, torch.ones(n, dtype=torch.bool))
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
def test_joint_hits_more_often_than_any_list(M: int) -> None:
    rate = {name: hit_rate(named(name), 80, M) for name in ("uniform", "geometric", "general", "joint")}
    assert rate["geometric"] >= rate["uniform"]
    assert rate["joint"] > max(rate["uniform"], rate["geometric"], rate["general"]) + 0.03


def test_joint_works_from_the_first_round() -> None:
    assert hit_rate(named("joint"), 8, 8) > hit_rate(named("uniform"), 8, 8) + 0.03
