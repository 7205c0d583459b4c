"""A fallback that grows a speculation as far as it pays, if each growth step takes time of its own.

Before every step it decides whether to take it, and after the last one which nodes are verified:

    a step    P(it adds an accepted token)  >  current tokens per second x (a step + verifying one more token)
    a node    P(the text runs through it)   >  current tokens per second x verifying one more token

which maximizes tokens per second in the long run. The probabilities are those of the tree, learnt online. If even the
first token does not pay, misses are left to the backup.

These decisions depend on the tokens before the end, not on later ones. So verified tokens are still distributed as q,
and rejection stays exact.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from saguaro.draft.policy.average import Average
from saguaro.draft.policy.fallback import ASSUMED, EVERY, put_in_flight, send
from saguaro.draft.rows import DraftRow, DraftRows, GrowthBudget, Proposal, Proposer, Wanted
from saguaro.types import CACHE, Outcome

HICCUP = 3  # limit of a verification's time, relative to the mean
SLOW = 2  # first drafts that are not timed, because they are slow
TRIES, LEAST_GAP, MOST_GAP = 3, 8, 512  # drafts per trial of the primary, and misses before a trial
AHEAD = 4  # misses before a trial in which texts are read again
BETTER = 1.05  # the primary is used again if it is so many times as fast: estimates vary by some percent

now = time.perf_counter


class TreeProposer(Protocol):
    """A Proposer of trees that grow step by step."""

    source: int

    @property
    def n_steps(self) -> int:
        """Steps of the last proposal."""

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """See Proposer; stops when the budget says so."""


@dataclass(frozen=True)
class _Growth:
    """What a step and a node must bring at this rate, tokens per second."""

    least: float
    step: float  # tokens that pay for another step

    def goes_on(self, rows: Sequence[DraftRow], worth: Sequence[float]) -> bool:
        """See GrowthBudget."""
        return sum(worth) > self.step


class AdaptiveFallback:
    """Uses the primary as far as it pays, or the backup."""

    def __init__(self, primary: TreeProposer, backup: Proposer) -> None:
        self._primary, self._backup = primary, backup
        self._by_primary, self._by_backup = Average(kept=0.99), Average(kept=0.99)  # accepted tokens per speculation
        self._lately = Average(kept=0.8)  # by the primary: to see in a trial that it pays again
        self._of_primary, self._of_backup = Average(), Average()  # tokens in flight per row, if it drafted
        self._draft_s, self._step_s = Average(kept=0.9), Average(kept=0.9)  # of the primary; the first are slow
        self._verify_s = _Line()  # from a reply to the next outcome, by tokens verified
        self._answered: float | None = None
        self._n_decisions = self._n_drafts = 0
        self._is_worth = self._is_primary = True  # the last judgement; whether the primary drafted last
        self._seems_worth = False  # by the last few of its speculations
        self._gap = self._n_left = LEAST_GAP  # misses of the backup until the primary is tried again

    @property
    def reads(self) -> bool:
        """See Fallback: not while the backup drafts and no trial is near."""
        return self._is_worth or self._n_left <= AHEAD

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback; sometimes takes the other choice, to keep measuring."""
        if missed:
            rate, self._is_worth = self._judge(len(missed), n_rows, max(n for _, n in missed))
            self._n_decisions += 1
            is_whole = self._n_decisions % (2 * EVERY) == 0 and self._is_worth
            self._is_primary = is_whole or self._chooses(self._is_worth)
            if self._is_primary:
                self._draft(missed, None if is_whole else rate)
            else:
                put_in_flight(self._backup, missed)
        self._answered = now()

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Fallback."""
        if len(outcome.slots) and self._answered is not None:
            n_rows, n_tokens = len(outcome.slots), float(outcome.length.sum())
            self._verify_s.add(n_rows + n_tokens, now() - self._answered)
            (self._of_primary if self._is_primary else self._of_backup).add(n_tokens / n_rows)
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            row = rows.get(slot)
            if row is None:
                continue
            if row.source in (CACHE, self._primary.source):
                self._by_primary.add(k)
                self._lately.add(k)
            elif row.source == self._backup.source or not row.speculation:
                self._by_backup.add(k)

    def _draft(self, missed: Sequence[Wanted], rate: float | None) -> None:
        """Grow as far as pays at this rate, tokens per second; None: as far as there is room for."""
        began = now()
        rows, room = [row for row, _ in missed], max(n for _, n in missed)
        budget = None
        if rate is not None:
            a_node = rate * self._verify_s.slope()
            budget = _Growth(a_node, rate * self._step_s.mean(0.0) + len(missed) * a_node)
        proposal = self._primary.propose(rows, room, budget)
        send(proposal, missed, self._primary.source)
        is_any, seconds = any(proposal.tokens), now() - began
        self._n_drafts += is_any
        if is_any and self._n_drafts > SLOW:
            self._draft_s.add(seconds)
            self._step_s.add(seconds / self._primary.n_steps)

    def _chooses(self, is_worth: bool) -> bool:
        """Whether the primary drafts: if it pays, always except for rare trials of the backup; otherwise in short
        trials at growing intervals."""
        if is_worth:
            self._gap = self._n_left = LEAST_GAP
            return self._n_decisions % EVERY != 0
        self._n_left -= 1
        if self._n_left <= -TRIES and not self._seems_worth:
            self._gap = self._n_left = min(2 * self._gap, MOST_GAP)
        return self._n_left <= 0

    def _judge(self, n_missed: int, n_rows: int, room: int) -> tuple[float, bool]:
        """Tokens per second, and whether the primary reaches it. Without measurements, assume full acceptance."""
        if not (self._step_s.n and self._verify_s.n):
            return 0.0, True
        with_s = self._verify_s.at(n_rows * (1 + self._of_primary.mean(0.0))) + self._draft_s.mean(0.0)
        without_s = self._verify_s.at(n_rows * (1 + self._of_backup.mean(0.0)))
        rates = []
        for stood in (self._lately.mean(0.0), _hoped(self._by_primary, room)):
            others = n_rows + (n_rows - n_missed) * stood  # hits were drafted by the primary
            with_it = (others + n_missed * stood) / with_s
            without = (others + n_missed * self._by_backup.mean(0.0)) / without_s
            rates.append((with_it, without))
        self._seems_worth = rates[0][0] > BETTER * rates[0][1]
        with_it, without = rates[1]
        return max(with_it, without), with_it >= without * (1.0 if self._is_worth else BETTER)


def _hoped(known: Average, most: float) -> float:
    """Mean with an optimistic prior."""
    return known.mean(most, weight=max(0.0, ASSUMED - known.n))


@dataclass
class _Line:
    """Seconds as a linear function of the number of tokens, fitted with exponential decay.

    >>> line = _Line()
    >>> [line.add(x, 10 + 2 * x) for x in (0, 1, 4)]
    [None, None, None]
    >>> round(line.slope(), 3), round(line.at(0), 3), _Line().slope()
    (2.0, 10.0, 0.0)
    """

    kept: float = 0.998
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a measurement. Outliers are clipped."""
        if self.n > ASSUMED:
            y = min(y, HICCUP * self.mean())
        sums = (self.n, self.x, self.y, self.xx, self.xy)
        more = (1.0, x, y, x * x, x * y)
        self.n, self.x, self.y, self.xx, self.xy = (self.kept * s + m for s, m in zip(sums, more, strict=True))

    def mean(self) -> float:
        """Mean seconds."""
        return self.y / self.n

    def slope(self) -> float:
        """Seconds per additional token, at least 0."""
        spread = self.xx * self.n - self.x * self.x
        return max(0.0, (self.xy * self.n - self.x * self.y) / spread) if spread > 1e-6 * self.n * self.n else 0.0

    def at(self, x: float) -> float:
        """Seconds with x tokens."""
        return max(self.mean() + self.slope() * (x - self.x / self.n), 1e-9)
