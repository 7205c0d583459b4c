"""Whether to ask a draft that is elsewhere: in a process of its own, or behind a network.

A round that asks waits for the reply, and so for the draft and for the link, both ways. The draft's side cannot know
what that takes, so the target's side compares rounds with and without asking by tokens per second (modes.py), per batch
size. While asking does not pay, rounds are those of `ar`: nothing is sent and nothing is waited for. When the draft is
asked again, it gets all rows anew, as after an interruption; it may have to read their texts first.

The first stretch asks. What a round would take without asking is estimated as its time without the wait, so that a
draft that clearly pays is hardly ever left out for a comparison.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from saguaro.device.graphs import bucket
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.learnt import Kind
from saguaro.draft.policy.modes import WARM_UP, Modes
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch, Commit
from saguaro.types import SOURCES

FIRST = 16  # rounds of a stretch before the better mode is known
MOST_WARM = 24  # rounds after which a draft that speculates nothing counts as one that has nothing to say
STAYS = 8  # rounds of a batch size before it may change the mode: all rows are introduced anew


class Rests(Protocol):
    """A link to a draft elsewhere (Apart, Several)."""

    @property
    def n_ready(self) -> int:
        """How often a draft has become ready."""

    @property
    def was_asked(self) -> bool:
        """Whether the last call of speculate asked a draft."""

    def rest(self) -> None:
        """Ask nothing until wake."""

    def wake(self) -> None:
        """Ask again. The draft has lost its rows."""


class Asks(Protocol):
    """Decides whether the draft is asked."""

    is_forced: bool  # ask in every round, whether that pays or not

    @property
    def is_asking(self) -> bool:
        """Whether it is, in this round."""

    @property
    def why_not(self) -> str | None:
        """Why it is not, in one sentence; None if it is."""

    def choose(self) -> None:
        """Decide for the next round. Called before it begins."""

    def learn(self, batch: Batch, commits: Sequence[Commit], wait_s: float, seconds: float) -> None:
        """A round took so long, of which so much was waited for the draft."""


class AlwaysAsk:
    """Asks in every round."""

    is_asking, why_not = True, None

    def __init__(self) -> None:
        self.is_forced = True

    def choose(self) -> None:
        """Nothing to decide."""

    def learn(self, batch: Batch, commits: Sequence[Commit], wait_s: float, seconds: float) -> None:
        """Nothing to learn."""


class MeasuredAsk:
    """Asks where measurements show a gain."""

    def __init__(self, link: Rests) -> None:
        self.is_asking, self.is_forced = True, False
        self._link, self._n_ready = link, link.n_ready
        self._worth: dict[Kind, Average] = defaultdict(partial(Average, kept=0.998))  # accepted tokens
        self._books: dict[int, Modes] = {}  # by batch size
        self._plain_s: dict[int, Average] = defaultdict(Average)  # of a round that asked, without the wait
        self._warm = Average(kept=0.8)  # rounds until a draft that is asked again speculates
        self._size, self._n_alike = 1, 0  # batch size, and rounds of it so far
        self._rows: set[Request] = set()  # of the last round
        self._n_rounds, self._is_warm = 0, False  # since rows or mode have changed, and whether one was speculated for

    @property
    def why_not(self) -> str | None:
        """See Asks."""
        book = self._book(self._size)
        if book.best is not False or self.is_forced:
            return None
        without, with_it = (way.rate(self._worth)[0] if way.seconds.n else 0.0 for way in book.ways)
        return (
            f"The draft is not asked: with the wait for it, a request has been measured to get {with_it:.1f} tok/s "
            f"here so far, and {without:.1f} without."
        )

    def choose(self) -> None:
        """See Asks. A draft that has come back is asked at once."""
        if self._link.n_ready != self._n_ready:
            self._n_ready, self._n_alike = self._link.n_ready, STAYS
            self._books.clear()
        wanted = self.is_forced or self._book(self._size).is_taken
        if wanted != self.is_asking and (self.is_forced or self._n_alike >= STAYS):
            self.is_asking, self._n_rounds, self._is_warm = wanted, 0, False
            if wanted:
                self._link.wake()
            else:
                self._link.rest()

    def learn(self, batch: Batch, commits: Sequence[Commit], wait_s: float, seconds: float) -> None:
        """See Asks. Counts if every row got tokens, none is new, and the draft had time to read their texts. Requests
        without speculation say nothing."""
        if not all(commit.request.speculates for commit in commits) or not commits:
            return
        rows, size = {commit.request for commit in commits}, bucket(len(commits))
        is_new = not rows <= self._rows
        self._n_alike = self._n_alike + 1 if size == self._size else 1
        self._rows, self._size = rows, size
        self._n_rounds = 1 if is_new else self._n_rounds + 1
        kinds = [(SOURCES.index(commit.source), commit.length) for commit in commits]
        self._warm_up(any(commit.length for commit in commits) and not is_new)
        for kind, commit in zip(kinds, commits, strict=True):
            self._worth[kind].add(commit.k)
        is_decoding = len(commits) == len(batch.rows) and all(row.n_tokens == 1 for row in batch.rows)
        if is_decoding and self._counts():
            self._count(kinds, wait_s, seconds)

    def _warm_up(self, speculates: bool) -> None:
        if self.is_asking and not self._is_warm and (speculates or self._n_rounds > MOST_WARM):
            self._is_warm = True
            self._warm.add(max(WARM_UP, self._n_rounds))

    def _counts(self) -> bool:
        is_steady = self._n_rounds > WARM_UP and self._book(self._size).is_taken == self.is_asking
        return is_steady and (not self.is_asking or (self._is_warm and self._link.was_asked))

    def _count(self, kinds: Sequence[Kind], wait_s: float, seconds: float) -> None:
        book, plain, expected = self._book(self._size), self._plain_s[self._size], None
        if self.is_asking:
            plain.add(max(seconds - wait_s, 1e-9))
            expected = 1 / plain.mean(0.0)
        book.warm_up = self._warm.mean(WARM_UP)
        book.count((seconds, kinds), self._worth, expected)

    def _book(self, size: int) -> Modes:
        return self._books.setdefault(size, Modes(is_alike=False, first=FIRST))
