"""Whether a draft elsewhere is asked: what rounds with and without the wait take decides. The clock is a number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from saguaro.config import SamplingParams
from saguaro.draft.policy.ask import FIRST, MOST_WARM, STAYS, AlwaysAsk, MeasuredAsk
from saguaro.draft.policy.modes import MOST_GAP, SPENT, VISIT, WARM_UP
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch, BatchRow, Commit

K = 4
SEEDS = range(4)


@dataclass(frozen=True)
class Place:
    """A target and a draft some way off. A plain round takes a second."""

    wait_s: float  # for the draft and the link
    chance: float = 0.7  # that the next token of a speculation is accepted
    verify_s: float = 1.1  # with a speculation
    n_read: int = 0  # rounds in which the draft reads texts after it got them, and speculates nothing
    noise: float = 0.05

    def rate(self) -> float:
        """Tokens per second of a row, if the draft is always asked."""
        return (1 + sum(self.chance**n for n in range(1, K + 1))) / (self.wait_s + self.verify_s)


class Link:
    """A link that is told to rest."""

    def __init__(self) -> None:
        self.n_ready, self.was_asked, self.is_resting, self.n_rounds, self.n_wakes = 1, True, False, 0, 0

    def rest(self) -> None:
        assert not self.is_resting
        self.is_resting = True

    def wake(self) -> None:
        assert self.is_resting
        self.is_resting, self.n_rounds = False, 0
        self.n_wakes += 1


class Play:
    """Rounds of some rows."""

    def __init__(self, n_rows: int = 1, seed: int = 0) -> None:
        self.link, self.chance = Link(), Random(seed)
        self.asks = MeasuredAsk(self.link)
        self.requests = [self.new_request() for _ in range(n_rows)]
        self.seconds, self.n_tokens = 0.0, 0

    def new_request(self, **params: Any) -> Request:
        return Request(id="a", prompt=[1], params=SamplingParams(**params), seed=0, eos_ids=frozenset())

    def rounds(self, n: int, place: Place) -> list[bool]:
        """In which of n rounds the draft is asked."""
        return [self.round(place) for _ in range(n)]

    def rate(self, n: int, place: Place) -> float:
        """Tokens per second and row of n rounds."""
        seconds, n_tokens = self.seconds, self.n_tokens
        self.rounds(n, place)
        return (self.n_tokens - n_tokens) / (self.seconds - seconds) / len(self.requests)

    def round(self, place: Place, n_prompt: int = 0) -> bool:
        """One round; with so many tokens of a prompt in it, it takes so many seconds more."""
        self.asks.choose()
        asks = self.asks.is_asking
        assert asks != self.link.is_resting
        self.link.n_rounds += 1
        length = K if asks and self.link.was_asked and self.link.n_rounds > place.n_read else 0
        slow = max(0.5, self.chance.gauss(1.0, place.noise))
        wait = slow * place.wait_s if asks and self.link.was_asked else 0.0
        seconds = wait + slow * (place.verify_s if length else 1.0) + n_prompt
        commits = [self._commit(request, length, place) for request in self.requests]
        rows = [BatchRow(request, 0, 1, K, True) for request in self.requests]
        rows += [BatchRow(self.new_request(), 0, n_prompt, 0, False)] if n_prompt else []
        self.asks.learn(Batch(rows, [], []), commits, wait, seconds)
        self.seconds, self.n_tokens = self.seconds + seconds, self.n_tokens + sum(len(one.tokens) for one in commits)
        return asks

    def _commit(self, request: Request, length: int, place: Place) -> Commit:
        k = next((n for n in range(length) if self.chance.random() > place.chance), length)
        return Commit(request, [1] * (k + 1), K, length, k, "draft" if length else "empty")


FAR = Place(wait_s=2.8, verify_s=1.3)  # as measured with 10 ms each way: 41 tok/s, and 84 without
NEAR = Place(wait_s=0.3)
SLIGHT = Place(wait_s=1.3)  # pays by 15%
BARELY_NOT = Place(wait_s=2.1)  # costs 13%


@pytest.mark.parametrize("n_rows", [1, 4])
@pytest.mark.parametrize(("place", "pays"), [(FAR, False), (NEAR, True), (SLIGHT, True), (BARELY_NOT, False)])
def test_it_is_as_fast_as_the_better_of_both(place: Place, pays: bool, n_rows: int) -> None:
    best = max(1.0, place.rate())
    assert (place.rate() > 1) == pays
    for seed in SEEDS:
        play = Play(n_rows, seed)
        play.rounds(150, place)
        assert play.rate(1000, place) >= 0.95 * best


def test_a_draft_far_away_is_left_alone_after_the_first_rounds() -> None:
    for seed in SEEDS:
        play = Play(1, seed)
        asked = play.rounds(100, FAR)
        assert asked[: WARM_UP + FIRST] == [True] * (WARM_UP + FIRST)
        assert not any(asked[80:]), "most of them at once; luck with the first tokens may take longer"
        assert play.rate(2000, FAR) >= 0.97
        assert play.link.n_wakes <= 2
        why = play.asks.why_not
        assert why is not None
        assert why.startswith("The draft is not asked: with the wait for it")


def test_a_draft_that_pays_is_asked_always_but_for_rare_visits() -> None:
    play = Play()
    assert all(play.rounds(200, NEAR)), "what a plain round takes is estimated, not tried"
    assert play.asks.why_not is None
    asked = play.rounds(3 * MOST_GAP, NEAR)
    assert 0 < asked.count(False) < SPENT * len(asked)


def test_visits_become_rarer_and_are_bounded() -> None:
    play = Play()
    asked = play.rounds(6 * MOST_GAP, FAR)
    begun = [at for at in range(100, len(asked)) if asked[at] and not asked[at - 1]]
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= MOST_GAP + 2 * (WARM_UP + VISIT)
    assert len(begun) >= 4


@pytest.mark.parametrize(("before", "after"), [(FAR, NEAR), (NEAR, FAR)])
def test_a_link_that_changes_is_noticed(before: Place, after: Place) -> None:
    for seed in SEEDS[:2]:
        play = Play(1, seed)
        play.rounds(600, before)
        play.rounds(MOST_GAP, after)
        assert play.rounds(100, after).count(after is NEAR) >= 90


def test_after_a_reconnect_it_is_asked_at_once() -> None:
    play = Play()
    assert not any(play.rounds(200, FAR)[100:])
    play.link.n_ready += 1
    assert play.round(NEAR)
    assert all(play.rounds(200, NEAR))


def test_rounds_in_which_the_draft_reads_texts_are_no_evidence_against_it() -> None:
    """They are a part of what a visit costs."""
    place = replace(SLIGHT, n_read=10)
    play = Play()
    play.rounds(200, FAR)
    asked = play.rounds(2 * MOST_GAP, place)
    assert asked[-400:].count(True) >= 390


def test_a_draft_that_never_speculates_is_left_alone() -> None:
    play, silent = Play(), Place(wait_s=0.5, n_read=10**6)
    assert not any(play.rounds(100, silent)[MOST_WARM + FIRST + 1 :])


def test_a_draft_that_was_not_asked_is_not_judged() -> None:
    """It is dead, or late: the link asks nothing, and rounds are plain."""
    play = Play()
    play.link.was_asked = False
    assert all(play.rounds(300, FAR))


def test_rounds_with_prompts_or_new_rows_say_nothing() -> None:
    play = Play(2)
    for at in range(300):
        if at % 4 == 3:
            play.round(NEAR, n_prompt=50)
        elif at % 4 == 1:
            play.requests[at % 2] = play.new_request()
        assert play.round(NEAR)
    assert all(way.seconds.mean(1.0) < 2.0 for way in play.asks._books[2].ways)


def test_requests_without_speculation_say_nothing() -> None:
    play, silent = Play(), Place(wait_s=0.5, n_read=10**6)
    play.requests = [play.new_request(speculation=False)]
    assert all(play.rounds(100, silent))
    play.requests = [play.new_request()]
    assert all(play.rounds(100, NEAR))


def test_each_batch_size_has_a_choice_of_its_own() -> None:
    """It changes only after some rounds of a size, because all rows are introduced anew."""
    play = Play()
    play.rounds(100, FAR)
    play.requests += [play.new_request() for _ in range(3)]
    assert not any(play.rounds(STAYS, NEAR))
    assert all(play.rounds(100, NEAR))
    del play.requests[1:]
    assert not any(play.rounds(100, FAR)[STAYS:])


def test_it_can_be_told_to_ask_for_a_while() -> None:
    play = Play()
    assert not any(play.rounds(200, FAR)[100:])
    play.asks.is_forced = True
    assert all(play.rounds(50, FAR))
    assert play.asks.why_not is None
    play.asks.is_forced = False
    assert not any(play.rounds(20, FAR))


def test_the_lavish_always_ask() -> None:
    always: Sequence[object] = (AlwaysAsk().is_asking, AlwaysAsk().why_not)
    assert always == (True, None)
