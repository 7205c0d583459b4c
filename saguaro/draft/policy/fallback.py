"""Who drafts a row whose outcome was not prepared: always the same, or whoever is worth the wait at this batch size.

A draft model drafts well, but everybody waits for it; an n-gram look-up costs nothing. Theorem 17 gives the batch size
b* at which waiting stops to pay; `MeasuredFallback` asks the same of what was measured, for the misses at hand.
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

ASSUMED = 8  # misses for which it counts what the primary's other speculations are worth
EVERY = 64  # of the decisions about a miss, one is made the other way, to keep measuring both


class Fallback(Protocol):
    """Drafts misses."""

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """Put a speculation in flight for each of these, in a batch of n_rows."""

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """What came of what is in flight; told before it is committed."""


class NoProposer:
    """Proposes nothing."""

    source = EMPTY

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """Nothing."""
        return Proposal([[] for _ in rows])


class FixedFallback:
    """The same proposer for every miss."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback."""
        put_in_flight(self._proposer, missed)

    def learn(self, outcome: Outcome, rows: DraftRows) -> None:
        """Nothing to decide."""


class BatchSizeFallback:
    """The primary below b* rows, the backup from there on; b* by Theorem 17 from running measurements."""

    def __init__(self, primary: Proposer, backup: Proposer) -> None:
        self._seen = FallbackStats(primary, backup)

    @property
    def critical(self) -> float:
        """b* as it stands; infinite until a miss has been drafted."""
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
    """The primary where the tokens it adds are worth more than the time everybody waits for them."""

    def __init__(self, primary: Proposer, backup: Proposer) -> None:
        self._seen = FallbackStats(primary, backup)

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback."""
        self._seen.draft(missed, bool(missed) and self._is_worth(missed, n_rows))

    def _is_worth(self, missed: Sequence[Wanted], n_rows: int) -> bool:
        """Whether (tokens gained) / (time waited) beats the tokens per second of the batch as it goes."""
        seen = self._seen
        if not (seen.draft_s.n and seen.verify_s.n):
            return True
        # A few unlucky misses must not end it: until there are many they are taken for what the primary says elsewhere,
        # and what it says elsewhere, until that is much, for all that it is asked for.
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
    """Has misses drafted by the one or the other, and measures what that gives and costs."""

    primary: Proposer  # slow and good
    backup: Proposer  # fast
    accepted: Average = field(default_factory=Average)  # tokens of a speculation, any
    accepted_primary: Average = field(default_factory=Average)  # drafted by the primary, prepared or not
    accepted_slow: Average = field(default_factory=Average)  # drafted by the primary on a miss
    accepted_fast: Average = field(default_factory=Average)  # by the backup
    hit_after_hit: Average = field(default_factory=Average)
    hit_after_miss: Average = field(default_factory=Average)
    draft_s: Average = field(default_factory=partial(Average, kept=0.9))  # a miss drafted by the primary; at first slow
    verify_s: Average = field(default_factory=Average)  # between an answer and the next outcome
    _was_hit: WeakKeyDictionary[DraftRow, bool] = field(default_factory=WeakKeyDictionary)
    _was_slow: dict[DraftRow, bool] = field(default_factory=dict)  # the misses that were last drafted
    _answered: float = math.nan
    _n_decisions: int = 0

    def draft(self, missed: Sequence[Wanted], is_worth: bool) -> None:
        """Draft misses, by the primary if it is worth it; now and then the other way."""
        self._n_decisions += bool(missed)
        is_slow = is_worth != (bool(missed) and self._n_decisions % EVERY == 0)
        began = time.perf_counter()
        put_in_flight(self.primary if is_slow else self.backup, missed)
        self._answered = time.perf_counter()
        self._was_slow = {row: is_slow for row, _ in missed}
        if is_slow and missed:
            self.draft_s.add(self._answered - began)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Count what came of what is in flight."""
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
    """Ask a proposer for as many tokens as each row has room for."""
    if not missed:
        return
    send(proposer.propose([row for row, _ in missed], max(n for _, n in missed)), missed, proposer.source)


def send(proposal: Proposal, missed: Sequence[Wanted], source: int) -> None:
    """Put a proposal in flight, as much as each row has room for."""
    for index, (row, n) in enumerate(missed):
        q = None if proposal.q is None else proposal.q[index]
        row.propose(proposal.tokens[index][:n], source, q)
