"""What drafts a row after a miss: always one proposer, or the one that pays at this batch size.

A draft model drafts well, but all rows wait for it; an n-gram look-up is free. Theorem 17 gives the batch size b* from
which waiting does not pay; `MeasuredFallback` decides by measurements, for the current misses.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

from saguaro.algo.theory import critical_batch_size
from saguaro.draft.policy.average import Average
from saguaro.draft.rows import DraftRow, DraftRows, Proposal, Proposer, Wanted
from saguaro.types import CACHE, EMPTY, Outcome

ASSUMED = 8  # weight of the prior, in misses
EVERY = 64  # one of so many decisions is reversed, to keep measuring both proposers


class Fallback(Protocol):
    """Drafts the rows that missed."""

    @property
    def reads(self) -> bool:
        """Whether the model should read texts now, because it may draft soon."""

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """Put a speculation in flight for each of these rows, in a batch of n_rows."""

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """Learn the outcome of the speculations in flight. Called before the commit."""


class NoProposer:
    """Proposes no tokens."""

    source = EMPTY

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """Always empty."""
        return Proposal([[] for _ in rows])


class FixedFallback:
    """Uses one proposer for every miss."""

    reads = True

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback."""
        put_in_flight(self._proposer, missed)

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to learn."""


class BatchSizeFallback:
    """Uses the primary below b* rows, else the backup; b* by Theorem 17 from running measurements."""

    reads = True

    def __init__(self, primary: Proposer, backup: Proposer) -> None:
        self._seen = FallbackStats(primary, backup)

    @property
    def critical(self) -> float:
        """The current b*; infinite until a miss has been drafted."""
        seen = self._seen
        hit_p, hit_b = seen.hit_after_hit.mean(0.8), seen.hit_after_miss.mean(0.8)
        tokens_p, tokens_b = 1 + seen.accepted_slow.mean(1.0), 1 + seen.accepted_fast.mean(0.0)
        return critical_batch_size(hit_p, hit_b, tokens_p, tokens_b, seen.draft_s.mean(0.0) / seen.verify_s.mean(1.0))

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback."""
        self._seen.draft(missed, n_rows < self.critical)

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Fallback."""
        self._seen.outcome(outcome, rows)


class MeasuredFallback:
    """Uses the primary if the tokens it adds are worth the time that all rows wait."""

    reads = True

    def __init__(self, primary: Proposer, backup: Proposer) -> None:
        self._seen = FallbackStats(primary, backup)

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback."""
        self._seen.draft(missed, bool(missed) and self._is_worth(missed, n_rows))

    def _is_worth(self, missed: Sequence[Wanted], n_rows: int) -> bool:
        """Whether (tokens gained) / (time waited) exceeds the current tokens per second of the batch."""
        seen = self._seen
        if not (seen.draft_s.n and seen.verify_s.n):
            return True
        # A few bad misses must not rule it out. The prior is the acceptance of all the primary's speculations, and
        # the prior of that is full acceptance.
        usual = seen.accepted_primary.mean(max(n for _, n in missed), weight=ASSUMED)
        slow = seen.accepted_slow.mean(usual, weight=ASSUMED)
        gained = len(missed) * (slow - seen.accepted_fast.mean(0.0))
        rate = n_rows * (1 + seen.accepted.mean(0.0)) / seen.verify_s.mean(1.0)
        return gained > rate * seen.draft_s.mean(0.0)

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Fallback."""
        self._seen.outcome(outcome, rows)


@dataclass
class FallbackStats:
    """Drafts misses with either proposer, and measures gain and cost."""

    primary: Proposer  # slow and good
    backup: Proposer  # fast
    accepted: Average = field(default_factory=Average)  # accepted tokens per speculation
    accepted_primary: Average = field(default_factory=Average)  # drafted by the primary, on hits and misses
    accepted_slow: Average = field(default_factory=Average)  # drafted by the primary on a miss
    accepted_fast: Average = field(default_factory=Average)  # by the backup
    hit_after_hit: Average = field(default_factory=Average)
    hit_after_miss: Average = field(default_factory=Average)
    draft_s: Average = field(default_factory=partial(Average, kept=0.9))  # primary, per miss; the first are slow
    verify_s: Average = field(default_factory=Average)  # from a reply to the next outcome
    _was_hit: WeakKeyDictionary[DraftRow, bool] = field(default_factory=WeakKeyDictionary)
    _was_slow: dict[DraftRow, bool] = field(default_factory=dict)  # the last misses: drafted by the primary?
    _answered: float = math.nan
    _n_decisions: int = 0

    def draft(self, missed: Sequence[Wanted], is_worth: bool) -> None:
        """Draft misses with the primary if it pays, else with the backup; sometimes the other way, to measure."""
        self._n_decisions += bool(missed)
        is_slow = is_worth != (bool(missed) and self._n_decisions % EVERY == 0)
        began = time.perf_counter()
        put_in_flight(self.primary if is_slow else self.backup, missed)
        self._answered = time.perf_counter()
        self._was_slow = {row: is_slow for row, _ in missed}
        if is_slow and missed:
            self.draft_s.add(self._answered - began)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Measure the outcome of the speculations in flight."""
        if len(outcome.slots) and not math.isnan(self._answered):
            self.verify_s.add(time.perf_counter() - self._answered)
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            row = rows.get(slot)
            if row is None:
                continue
            self.accepted.add(k)
            if row.source in (CACHE, self.primary.source):
                self.accepted_primary.add(k)
            was_slow, was_hit = self._was_slow.get(row), self._was_hit.get(row)
            if was_slow is not None:
                (self.accepted_slow if was_slow else self.accepted_fast).add(k)
            if was_hit is not None:
                (self.hit_after_hit if was_hit else self.hit_after_miss).add(row.is_hit)
            self._was_hit[row] = row.is_hit


def put_in_flight(proposer: Proposer, missed: Sequence[Wanted]) -> None:
    """Draft as many tokens as each row has room for."""
    if not missed:
        return
    send(proposer.propose([row for row, _ in missed], max(n for _, n in missed)), missed, proposer.source)


def send(proposal: Proposal, missed: Sequence[Wanted], source: int) -> None:
    """Put a proposal in flight, limited by each row's room."""
    for index, (row, n) in enumerate(missed):
        q = proposal.q[index] if proposal.q else None
        parents = proposal.parents[index] if proposal.parents else None
        row.propose(proposal.tokens[index][:n], source, q, None if parents is None else parents[:n])
