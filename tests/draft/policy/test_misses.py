"""What drafts a miss, and how far: what a step costs and what stands at each position decide. The clock is a number."""

from collections.abc import Sequence

import pytest
import torch

from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import (
    AHEAD,
    EVERY,
    MOST_SAVED,
    SPENT,
    TRIES,
    FixedMisses,
    MeasuredMisses,
    NoProposer,
    put_in_flight,
)
from saguaro.draft.rows import DraftRow, Proposal
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM
from tests.draft.policy.world import Clock, Counting, K, Stepping, World


class Drawing:
    """Proposes tokens with the q they were drawn from, which names the row."""

    source = DRAFT

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        q = [torch.full((lookahead, 3), float(row.slot)) for row in rows]
        return Proposal([[2] * lookahead for _ in rows], q)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def measured(clock: Clock, primary: Stepping, backup: Counting, n_rows: int = 1) -> World:
    learnt = Learnt(clock)
    return World(clock, MeasuredMisses(primary, backup, learnt), learnt, n_rows)


def settled(clock: Clock, step_s: float, stands: Sequence[int], backup: int = 0) -> tuple[list[int], float]:
    """Lengths of what a model drafts, of whose speculations so many tokens stand in turn, and the time per token: after
    a while."""
    primary, other = Stepping(clock, step_s, stands), Counting(clock, NGRAM, n_most=1)
    world = measured(clock, primary, other)
    made, n_tokens, began = [], 0, 0.0
    for at in range(1200):
        before = len(primary.made)
        if at == 400:
            n_tokens, began = 0, clock.now
        k = {DRAFT: stands[at % len(stands)], NGRAM: backup}
        source = world.play(accepted=k)[0]
        made.append(primary.made[-1] if len(primary.made) > before else 0)
        n_tokens += 1 + (min(k[DRAFT], made[-1]) if source == DRAFT else backup * (source == NGRAM))
    return made[400:], (clock.now - began) / n_tokens


@pytest.mark.parametrize(
    ("step_s", "stands", "length"),
    [
        (0.01, [4], 4),  # all of them stand, for nearly nothing
        (0.1, [2], 2),  # the third never does
        (0.2, [0, 1], 1),  # 1.5 / 1.2 a second, and (1 + 0.5) / 1.4 for two
        (0.05, [0, 4], 4),  # if the first stands, all do
        (0.3, [0, 4], 4),  # 3 / 2.2, and 1.5 / 1.3 for one: those after a wrong first one say nothing
        (0.7, [0, 1], 0),  # 1.5 / 1.7 is less than 1
        (2.0, [4], 0),  # 5 / 9
    ],
)
def test_as_many_as_pay(clock: Clock, step_s: float, stands: list[int], length: int) -> None:
    """A verification takes a second."""
    rates = {n: (1 + sum(min(n, k) for k in stands) / len(stands)) / (1 + n * step_s) for n in range(K + 1)}
    assert rates[length] == max(rates.values())
    found, seconds = settled(clock, step_s, stands)
    assert 1 / seconds >= 0.985 * rates[length]
    assert found.count(length) >= 0.9 * len(found)


def test_the_backup_where_it_is_as_good(clock: Clock) -> None:
    found, seconds = settled(clock, 0.3, [1], backup=1)
    assert found.count(0) >= 0.95 * len(found)
    assert seconds <= 0.51


@pytest.mark.parametrize(("step_s", "stands", "is_tried"), [(0.7, [0, 1], True), (0.05, [0], True), (2.0, [4], False)])
def test_a_draft_that_never_pays_costs_next_to_nothing(
    clock: Clock, step_s: float, stands: list[int], is_tried: bool
) -> None:
    """It is tried as soon as the savings suffice: three drafts of 8 s ask for half an hour."""
    found, seconds = settled(clock, step_s, stands)
    assert (found.count(0) < len(found)) == is_tried
    assert seconds <= 1 + 2 * SPENT


def test_more_rows_wait_with_those_that_missed(clock: Clock) -> None:
    """One of eight misses: seven others wait for it."""
    world = measured(clock, Stepping(clock, 0.2), Counting(clock, NGRAM, n_most=1), n_rows=8)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    found = [world.play(list(range(1, 8)), stands)[0] for _ in range(60)]
    assert found[0] == DRAFT
    assert found[-30:].count(DRAFT) <= TRIES
    assert world.play([], stands)[0] == DRAFT, "all of them together do not"


def test_a_few_unlucky_ones_do_not_end_it(clock: Clock) -> None:
    world = measured(clock, Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1))
    found = [world.play(accepted={DRAFT: 0})[0] for _ in range(6)]
    assert found.count(DRAFT) == 5, "one shows what a verification takes without"
    assert [world.play(accepted={DRAFT: 0})[0] for _ in range(40)].count(DRAFT) < 30


def test_texts_are_judged_apart(clock: Clock) -> None:
    """A model that is right about one text and wrong about another drafts the one alone."""
    primary, other = Stepping(clock, 0.25), Counting(clock, NGRAM, n_most=0)
    learnt = Learnt(clock)
    good, bad = (World(clock, MeasuredMisses(primary, other, learnt), learnt) for _ in range(2))
    last: tuple[list[int], list[int]] = [], []
    for _ in range(40):
        last = (
            [good.play(accepted={DRAFT: 3})[0] for _ in range(4)],
            [bad.play(accepted={DRAFT: 0})[0] for _ in range(4)],
        )
    assert last == ([DRAFT] * 4, [EMPTY] * 4)


def test_nobody_is_asked_where_nothing_was_missed(clock: Clock) -> None:
    primary, other = Stepping(clock, 0.1), Counting(clock, NGRAM)
    world = measured(clock, primary, other, n_rows=2)
    assert [world.play(hits=[0, 1]) for _ in range(3)] == [[CACHE, CACHE]] * 3
    assert (primary.made, other.asked) == ([], [])
    assert world.play(room=0) == [EMPTY, EMPTY]


def test_a_draft_ends_before_a_token_that_will_hardly_stand(clock: Clock) -> None:
    """One token of each draft stands once in eight times, the others always: a step for that one does not pay."""
    primary = Stepping(clock, 0.1)
    world = measured(clock, primary, Counting(clock, NGRAM, n_most=1))
    weak, lengths = [3, 0, 1, 2], []
    for at in range(400):
        first = weak[at % 4]  # its place in this draft
        primary.chances = [1.0 if place < first else 0.125 for place in range(K)]
        world.play(accepted={DRAFT: first if at % 32 >= 4 else K})
        lengths.append((first, primary.made[-1]))
    late = lengths[-EVERY:]
    assert sum(made == max(1, first) for first, made in late) >= 0.8 * len(late)


@pytest.mark.parametrize(("token_s", "length"), [(0.0, 2), (0.4, 1)])
def test_verifying_more_takes_longer(clock: Clock, token_s: float, length: int) -> None:
    """The first token always stands and the second once in four times: for nothing, that is worth a token more."""
    primary = Stepping(clock, 0.001, [1, 1, 2, 1])
    world = measured(clock, primary, Counting(clock, NGRAM, n_most=1))
    world.token_s = token_s
    for at in range(300):
        world.play(accepted={DRAFT: [1, 1, 2, 1][at % 4]})
    assert primary.made[-60:].count(length) >= 48


@pytest.mark.parametrize(("stands", "most"), [(0, 2), (2, 40)])
def test_a_chain_of_the_backup_is_as_long_as_pays(clock: Clock, stands: int, most: int) -> None:
    """Verifying a token takes 0.3 s of a round of 1: a chain of which nothing stands is not verified but for a
    sample."""
    backup = Counting(clock, NGRAM)
    world = measured(clock, Stepping(clock, 9.0), backup)
    world.token_s = 0.3
    for at in range(200):
        if at == 160:
            backup.asked.clear()
        world.play(accepted={DRAFT: 4, NGRAM: stands})
    assert most - 2 <= len(backup.asked) <= most
    assert {lookahead for _, lookahead in backup.asked} <= {stands or 1}


@pytest.mark.parametrize("n_before", [50, 400])
def test_a_model_that_pays_again_is_found_soon(clock: Clock, n_before: int) -> None:
    """After a time in which it never did: within the savings of that time."""
    world = measured(clock, Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1))
    for _ in range(n_before):
        world.play(accepted={DRAFT: 0})
    found = [world.play(accepted={DRAFT: 3})[0] for _ in range(400)]
    assert found[-100:].count(DRAFT) >= 100 - TRIES


def test_one_costly_trial_does_not_rule_out_the_model(clock: Clock) -> None:
    """Reading a long text for a trial took longer than can be saved: later texts may be short."""
    learnt = Learnt(clock)
    misses = MeasuredMisses(Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1), learnt)
    world = World(clock, misses, learnt)
    while misses.reads:
        world.play(accepted={DRAFT: 0})
    misses.read(2 * MOST_SAVED)
    drafted = []
    for _ in range(40):  # requests now and then, in the time in which four such trials may take place
        clock.now += 8 * MOST_SAVED / SPENT / 40
        drafted.append(world.play(accepted={DRAFT: 3})[0] == DRAFT)
    assert not any(drafted[:10]), "what it cost is saved first"
    assert any(drafted)


def test_texts_are_read_only_where_the_model_may_draft(clock: Clock) -> None:
    """While it does not pay, they are read before a trial, which what that took makes rarer."""
    learnt = Learnt(clock)
    misses = MeasuredMisses(Stepping(clock, 2.0), Counting(clock, NGRAM, n_most=0), learnt)
    world = World(clock, misses, learnt)
    n_read, reads, drafted = 0, [], []
    for _ in range(6000):
        drafted.append(world.play(accepted={DRAFT: 1})[0] == DRAFT)
        reads.append(misses.reads)
        if reads[-1] and not misses._is_model:
            clock.now += 0.5
            misses.read(0.5)
            n_read += 1
    late = range(1000, 6000)
    assert 0 < sum(drafted[at] for at in late) < sum(reads[at] for at in late) < 0.05 * len(late)
    assert all(reads[at - AHEAD] or reads[at - 1] for at in late if drafted[at])
    assert 0.5 * sum(reads[at] for at in late) < 2 * SPENT * clock.now


# What every choice rests on


def test_rows_get_what_they_have_room_for(clock: Clock) -> None:
    world = World(clock, FixedMisses(NoProposer()), n_rows=3)
    some = Counting(clock, NGRAM)
    put_in_flight(some, [(world.row(2), 1), (world.row(0), 3)])
    assert some.asked == [([2, 0], 3)]
    assert [world.row(slot).speculation for slot in range(3)] == [[1, 2, 3], [], [1]]
    assert [world.row(slot).source for slot in range(3)] == [NGRAM, EMPTY, NGRAM]
    put_in_flight(some, [(world.row(0), 3)], limit=2)
    assert world.row(0).speculation == [1, 2]
    put_in_flight(Drawing(), [(world.row(1), 2), (world.row(2), 1)])
    assert (world.row(1).speculation, world.row(2).speculation) == ([2, 2], [2])
    for slot in (1, 2):
        q = world.row(slot).q
        assert q is not None
        assert q.unique().tolist() == [slot]


def test_always_asks_the_same(clock: Clock) -> None:
    primary = Counting(clock, DRAFT)
    world = World(clock, FixedMisses(primary), n_rows=3)
    assert world.play(hits=[1]) == [DRAFT, CACHE, DRAFT]
    assert world.play(hits=[0, 1, 2]) == [CACHE] * 3
    assert primary.asked == [([0, 2], K)]
    assert World(clock, FixedMisses(NoProposer())).play() == [EMPTY]
