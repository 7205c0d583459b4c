"""The paper's choice of what drafts a miss: by the batch size from which waiting for the model does not pay.

Theorem 17 gives that batch size, b*, from hit rates, accepted tokens and the time of a draft, all measured online.
"""

import math
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from saguaro.algo.theory import critical_batch_size
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.kept import State
from saguaro.draft.policy.misses import put_in_flight
from saguaro.draft.rows import DraftRow, DraftRows, Proposer, Wanted
from saguaro.types import Outcome

EVERY = 64  # one of so many decisions is reversed, to keep measuring both proposers


class BatchSizeMisses:
    """Uses the primary below b* rows, else the backup."""

    reads = True

    def __init__(self, primary: Proposer, backup: Proposer, now: Callable[[], float]) -> None:
        self._primary, self._backup, self._now = primary, backup, now
        self._by_primary, self._by_backup = Average(), Average()  # accepted tokens per speculation after a miss
        self._after_hit, self._after_miss = Average(), Average()  # hits
        self._draft_s = Average(kept=0.9)  # of the primary, per miss; the first are slow
        self._verify_s = Average()  # from a reply to the next outcome
        self._was_hit: WeakKeyDictionary[DraftRow, bool] = WeakKeyDictionary()
        self._is_primary: dict[DraftRow, bool] = {}  # the last misses: drafted by the primary?
        self._answered = math.nan
        self._n_decisions = 0

    @property
    def critical(self) -> float:
        """The current b*; infinite until a miss has been drafted."""
        hit_p, hit_b = self._after_hit.mean(0.8), self._after_miss.mean(0.8)
        tokens_p, tokens_b = 1 + self._by_primary.mean(1.0), 1 + self._by_backup.mean(0.0)
        draft = self._draft_s.mean(0.0) / self._verify_s.mean(1.0)
        return critical_batch_size(hit_p, hit_b, tokens_p, tokens_b, draft)

    def draft(self, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Misses; sometimes the other way, to measure."""
        self._n_decisions += bool(missed)
        is_reversed = bool(missed) and self._n_decisions % EVERY == 0
        is_primary = (len(asked) < self.critical) != is_reversed
        began = self._now()
        put_in_flight(self._primary if is_primary else self._backup, missed)
        self._answered = self._now()
        self._is_primary = {row: is_primary for row, _ in missed}
        if is_primary and missed:
            self._draft_s.add(self._answered - began)

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """See Misses."""
        if len(outcome.slots) and not math.isnan(self._answered):
            self._verify_s.add(self._now() - self._answered)
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            row = rows.get(slot)
            if row is None:
                continue
            is_primary, was_hit = self._is_primary.get(row), self._was_hit.get(row)
            if is_primary is not None:
                (self._by_primary if is_primary else self._by_backup).add(k)
            if was_hit is not None:
                (self._after_hit if was_hit else self._after_miss).add(row.is_hit)
            self._was_hit[row] = row.is_hit

    def read(self, seconds: float) -> None:
        """Nothing to learn."""

    def state(self) -> State:
        """Nothing to keep: the paper's rule learns anew."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing was kept."""
