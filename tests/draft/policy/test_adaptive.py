"""As many tokens as pay: what a step costs and what stands at each position decide. The clock is a number."""

from collections.abc import Sequence

import pytest

from saguaro.draft.policy import adaptive
from saguaro.draft.policy.adaptive import TRIES, AdaptiveFallback
from saguaro.draft.policy.fallback import EVERY
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal
from saguaro.types import CACHE, DRAFT, EMPTY, NGRAM
from tests.draft.policy.test_fallback import Clock, Counting, K, World


class Stepping:
    """Proposes 1, 2, 3 ... after every text, and takes a step for each. Knows how likely it is that they stand."""

    source = DRAFT

    def __init__(self, clock: Clock, seconds: float, stands: Sequence[int] = (K,)) -> None:
        self.clock, self.seconds = clock, seconds
        self.chances = [sum(k > n for k in stands) / len(stands) for n in range(K)]  # that the first n + 1 stand
        self.made: list[int] = []  # tokens of each time
        self.n_steps = 0

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        for n in range(1, lookahead + 1):
            self.clock.now += self.seconds
            self.n_steps = n
            if n < lookahead and budget is not None and not budget.goes_on(rows, [self.chances[n]] * len(rows)):
                break
        least = 0.0 if budget is None else budget.least
        n_worth = sum(chance >= least for chance in self.chances[: self.n_steps])
        self.made.append(max(1, n_worth))
        return Proposal([list(range(1, self.made[-1] + 1)) for _ in rows])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(adaptive, "now", clock)
    return clock


def settled(clock: Clock, step_s: float, stands: Sequence[int], n_rows: int = 1, backup: int = 0) -> list[int]:
    """Lengths of what a primary drafts, of whose speculations so many tokens stand in turn: the last EVERY - 1."""
    primary, other = Stepping(clock, step_s, stands), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other), n_rows)
    made = []
    for at in range(6 * EVERY):
        before = len(primary.made)
        world.play(accepted={DRAFT: stands[at % len(stands)], NGRAM: backup})
        made.append(primary.made[-1] if len(primary.made) > before else 0)
    return made[-EVERY + 1 :]


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
    found = settled(clock, step_s, stands)
    assert sum(rates[n] for n in found) >= 0.97 * rates[length] * len(found)
    assert found.count(length) >= 0.8 * len(found)


def test_the_backup_where_it_is_as_good(clock: Clock) -> None:
    assert settled(clock, 0.3, [1], backup=1).count(0) >= EVERY - 2 - TRIES


def test_more_rows_wait_with_those_that_missed(clock: Clock) -> None:
    """One of eight misses: seven others wait for it."""
    primary, other = Stepping(clock, 0.2), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other), n_rows=8)
    stands = {DRAFT: 2, NGRAM: 0, CACHE: 2}
    found = [world.play(list(range(1, 8)), stands)[0] for _ in range(40)]
    assert found[0] == DRAFT
    assert found[-20:].count(NGRAM) >= 20 - TRIES
    assert world.play([], stands)[0] == DRAFT, "all of them together do not"


def test_a_few_unlucky_ones_do_not_end_it(clock: Clock) -> None:
    primary, other = Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other))
    assert [world.play(accepted={DRAFT: 0})[0] for _ in range(4)] == [DRAFT] * 4
    assert NGRAM in [world.play(accepted={DRAFT: 0})[0] for _ in range(40)]


def test_nobody_is_asked_where_nothing_was_missed(clock: Clock) -> None:
    primary, other = Stepping(clock, 0.1), Counting(clock, NGRAM)
    world = World(clock, AdaptiveFallback(primary, other), n_rows=2)
    assert [world.play(hits=[0, 1]) for _ in range(3)] == [[CACHE, CACHE]] * 3
    assert (primary.made, other.asked) == ([], [])
    assert world.play(room=0) == [EMPTY, EMPTY]


def test_a_draft_ends_before_a_token_that_will_hardly_stand(clock: Clock) -> None:
    """One token of each draft stands once in eight times, the others always: a step for that one does not pay."""
    primary, other = Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other))
    weak, lengths = [3, 0, 1, 2], []
    for at in range(400):
        first = weak[at % 4]  # its place in this draft
        primary.chances = [1.0 if place < first else 0.125 for place in range(K)]
        world.play(accepted={DRAFT: first if at % 32 >= 4 else K})
        lengths.append((first, primary.made[-1]))
    late = lengths[-EVERY + 1 :]
    assert sum(made == max(1, first) for first, made in late) >= 0.8 * len(late)


@pytest.mark.parametrize(("token_s", "length"), [(0.0, 2), (0.4, 1)])
def test_verifying_more_takes_longer(clock: Clock, token_s: float, length: int) -> None:
    """The first token always stands and the second once in four times: for nothing, that is worth a token more."""
    primary, other = Stepping(clock, 0.001, [1, 1, 2, 1]), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other))
    world.token_s = token_s
    for at in range(6 * EVERY):
        world.play(accepted={DRAFT: [1, 1, 2, 1][at % 4]})
    assert primary.made[-EVERY + 1 :].count(length) >= 0.8 * (EVERY - 1)


def test_a_primary_that_pays_again_is_found_soon(clock: Clock) -> None:
    """After a long time in which it never did."""
    primary, other = Stepping(clock, 0.1), Counting(clock, NGRAM, n_most=1)
    world = World(clock, AdaptiveFallback(primary, other))
    for _ in range(400):
        world.play(accepted={DRAFT: 0})
    found = [world.play(accepted={DRAFT: 3})[0] for _ in range(300)]
    assert found[-100:].count(DRAFT) >= 98
