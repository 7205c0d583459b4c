"""Who drafts a miss if one proposer does so for nothing and says how likely its nodes are. The clock is a number."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from saguaro.draft.policy.free import FreeFirst, FreeMisses, paying
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import FixedMisses, MeasuredMisses, Misses
from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import DRAFT, EMPTY, SUFFIX
from tests.draft.policy.world import Clock, K, Stepping, World


@dataclass
class Hinting:
    """Proposes 1, 2, 3 ... after every text for nothing, with this probability of each after the one before."""

    chance: float = 0.5
    of_slot: dict[int, float] = field(default_factory=dict)
    source = SUFFIX

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        each = [self.of_slot.get(row.slot, self.chance) for row in rows]
        chances = [[chance ** (n + 1) for n in range(lookahead)] if chance else [] for chance in each]
        return Proposal([list(range(1, len(own) + 1)) for own in chances], chances=chances)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("chance", "token_s", "length"),
    [
        (0.9, 0.01, 4),
        (0.5, 0.2, 2),  # 1.75 / 1.4; 1.875 / 1.6 for three, 1.5 / 1.2 for one
        (0.3, 0.4, 0),  # 1.3 / 1.4
        (0.0, 0.1, 0),
    ],
)
def test_as_many_nodes_as_pay(clock: Clock, chance: float, token_s: float, length: int) -> None:
    learnt = Learnt(clock)
    world = World(clock, FreeMisses(Hinting(chance), learnt), learnt)
    world.token_s = token_s
    for at in range(100):  # of several lengths, so that it is known what a node takes
        world.play(accepted={SUFFIX: 1}, room=1 + at % K)
    del world.lengths[:]
    for _ in range(100):
        world.play(accepted={SUFFIX: 1})
    assert world.lengths.count(length) >= 95


def _rates(step_s: float, token_s: float, modes: Sequence[tuple[float, int, int]]) -> dict[str, float]:
    """Tokens per second with one of them alone: rounds of each mode in turn."""
    n, seconds = {"free": 0, "model": 0}, {"free": 0.0, "model": 0.0}
    for chance, free, model in modes:
        length = K if chance else 0
        n["free"] += 1 + min(free, length)
        seconds["free"] += 1 + token_s * length
        n["model"] += 1 + model
        seconds["model"] += 1 + token_s * K + step_s * K
    return {name: n[name] / seconds[name] for name in n}


MODES = {
    "repeats": ([(0.97, 4, 4)], "free"),
    "nothing repeats": ([(0.0, 0, 3)], "model"),
    "by turns": ([(0.97, 4, 3)] * 5 + [(0.0, 0, 3)] * 5, "both"),
    "a model that is nearly always wrong": ([(0.97, 4, 0)] * 5 + [(0.0, 0, 0)] * 5, "free"),
    "half of it repeats, and the model knows": ([(0.5, 1, 4)], "model"),
}


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize("name", MODES)
def test_never_below_either(clock: Clock, name: str, is_measured: bool) -> None:
    """Tokens per second, after a while: at least what the better one alone gives."""
    modes, best = MODES[name]
    learnt, hints, model = Learnt(clock), Hinting(), Stepping(clock, 0.08)
    others: Misses = MeasuredMisses(model, None, learnt) if is_measured else FixedMisses(model)
    world = World(clock, FreeFirst(hints, others, learnt), learnt)
    world.token_s = 0.02
    n, began, sources = 0, 0.0, Counter[int]()
    for at in range(1500):
        if at == 500:
            n, began, sources = 0, clock.now, Counter()
        hints.chance, free, drafted = modes[at % len(modes)]
        (source,) = world.play(accepted={SUFFIX: free, DRAFT: drafted})
        n += 1 + world.accepted[-1]
        sources[source] += 1
    rates = _rates(0.08, 0.02, modes)
    assert n / (clock.now - began) >= 0.98 * max(rates.values())
    if best != "both":
        assert sources[SUFFIX if best == "free" else DRAFT] > sources[DRAFT if best == "free" else SUFFIX]
    else:
        assert n / (clock.now - began) > 1.05 * max(rates.values())
        assert min(sources[SUFFIX], sources[DRAFT]) > 400


def test_rows_are_judged_apart(clock: Clock) -> None:
    """Two of four repeat themselves; the model drafts for the others, in one draft."""
    learnt, hints, model = Learnt(clock), Hinting(of_slot={0: 0.97, 1: 0.97, 2: 0.0, 3: 0.0}), Stepping(clock, 0.02)
    world = World(clock, FreeFirst(hints, FixedMisses(model), learnt), learnt, n_rows=4)
    world.token_s = 0.01
    found = [world.play(accepted={SUFFIX: 4, DRAFT: 3}) for _ in range(200)]
    assert found[-20:].count([SUFFIX, SUFFIX, DRAFT, DRAFT]) >= 18


@pytest.mark.parametrize(("exposed", "n_read"), [(0.0, 100), (0.5, 40)])
def test_texts_are_read_as_far_as_drafts_save_time(
    clock: Clock, exposed: float, n_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading beside the verification is free. If it makes a round longer, by 0.5 s, two of five rounds pay for it: a
    draft saves 0.2 s."""
    learnt, model = Learnt(clock), Stepping(clock, 0.2)
    misses = FreeFirst(Hinting(0.0), FixedMisses(model), learnt)
    world = World(clock, misses, learnt)
    for _ in range(30):
        world.play(accepted={DRAFT: 1})
    found = []
    for _ in range(300):
        reads = misses.reads
        found.append(reads)
        world.verify_s = 1.0 + exposed * reads
        if reads:
            misses.read(0.5)
        with monkeypatch.context() as patch:  # a round in which texts are read is not measured
            patch.setattr(learnt, "outcome", lambda *_: learnt.until_outcome(False, is_disturbed=True))
            world.play(accepted={DRAFT: 1})
    assert found[-100:].count(True) == pytest.approx(n_read, abs=2)


def test_what_nobody_drafts_is_empty(clock: Clock) -> None:
    learnt = Learnt(clock)
    world = World(clock, FreeFirst(Hinting(0.0), FixedMisses(Hinting(0.0)), learnt), learnt)
    assert {world.play()[0] for _ in range(20)} == {EMPTY}


def test_it_goes_on_where_it_was_kept(clock: Clock) -> None:
    learnt, hints, model = Learnt(clock), Hinting(0.97), Stepping(clock, 0.08)
    first = FreeFirst(hints, FixedMisses(model), learnt)
    world = World(clock, first, learnt)
    world.token_s = 0.02
    for _ in range(100):
        world.play(accepted={SUFFIX: 4, DRAFT: 4})
    second = FreeFirst(hints, FixedMisses(model), learnt)
    second.restore(first.state())
    assert second.state() == first.state()
    again = World(clock, second, learnt)
    again.token_s = 0.02
    assert [again.play(accepted={SUFFIX: 4, DRAFT: 4})[0] for _ in range(9)].count(SUFFIX) >= 4


def test_nodes_of_all_rows_compete(clock: Clock) -> None:
    learnt = Learnt(clock)
    for n in (1, 5, 1, 5):
        learnt.alone.add(n, 1.0 + 0.15 * n)
    rows = [World(clock, FixedMisses(Hinting()), learnt).row(0) for _ in range(2)]
    proposal = Proposal([[1, 2], [3, 4]], chances=[[0.9, 0.1], [0.5, 0.4]])
    paid, rate = paying(proposal, [(row, 4) for row in rows], rows, learnt)
    assert paid.tokens == [[1], [3, 4]]
    assert rate == pytest.approx(3.8 / learnt.alone.at(5))
