"""A fallback that drafts as many tokens as pay, where each takes a step of its own.

A speculation of n tokens is worth the tokens that stand of it, G(n), and takes n steps that everybody waits for. The
best n is that of the most tokens per second,

    (tokens of the rows without it + G(n)) / (verification + n steps)

and n = 0 leaves the misses to the backup. G(n) is learnt by position: how often a token stood where all before it did.
"""

import time
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from saguaro.draft.average import Average
from saguaro.draft.fallback import ASSUMED, EVERY, put_in_flight
from saguaro.draft.rows import Proposer, Rows, Wanted
from saguaro.types import CACHE, Outcome

now = time.perf_counter


class Elastic:
    """The primary for as many tokens as pay, or the backup."""

    def __init__(self, primary: Proposer, backup: Proposer) -> None:
        self._primary, self._backup = primary, backup
        self._stands: list[Average] = []  # by position: how often a token stood where all before it did
        self._by_backup = Average()  # tokens that stood of a speculation of the backup's
        self._step_s = Average(kept=0.9)  # of the primary; the first are slow
        self._verify_s = Average()  # between an answer and the next outcome
        self._answered: float | None = None
        self._n_decisions = 0

    def draft(self, missed: Sequence[Wanted], n_rows: int) -> None:
        """See Fallback; now and then otherwise than it seems best, to keep measuring."""
        if missed:
            room = max(n for _, n in missed)
            n, self._n_decisions = self._best(len(missed), n_rows, room), self._n_decisions + 1
            if self._n_decisions % EVERY == 0:
                n = 0 if self._n_decisions % (2 * EVERY) else room
            if n:
                began = now()
                put_in_flight(self._primary, [(row, min(n, most)) for row, most in missed])
                self._step_s.add((now() - began) / n)
            else:
                put_in_flight(self._backup, missed)
        self._answered = now()

    def learn(self, outcome: Outcome, rows: Rows) -> None:
        """See Fallback."""
        if len(outcome.slots) and self._answered is not None:
            self._verify_s.add(now() - self._answered)
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            row = rows.get(slot)
            if row is None:
                continue
            if row.source in (CACHE, self._primary.source):
                self._learn_positions(k, len(row.speculation))
            elif row.source == self._backup.source or not row.speculation:
                self._by_backup.add(k)

    def _learn_positions(self, k: int, length: int) -> None:
        while len(self._stands) < length:
            self._stands.append(Average())
        for position in range(min(k + 1, length)):
            self._stands[position].add(position < k)

    def _best(self, n_missed: int, n_rows: int, room: int) -> int:
        """How many tokens of the primary are worth most; 0: the backup."""
        if not (self._step_s.n and self._verify_s.n):
            return room
        stands = self._standing(room)
        others = n_rows + (n_rows - n_missed) * sum(stands)  # the rest was prepared, by the primary
        verify_s, step_s = self._verify_s.mean(1.0), self._step_s.mean(0.0)
        rates = [(others + n_missed * self._by_backup.mean(0.0)) / verify_s]
        rates += [(others + n_missed * g) / (verify_s + n * step_s) for n, g in enumerate(accumulate(stands), 1)]
        return rates.index(max(rates))

    def _standing(self, room: int) -> list[float]:
        """How often each token of a speculation stands; one that was rarely verified is taken to."""
        known = [each.mean(1.0, weight=max(0.0, ASSUMED - each.n)) for each in self._stands[:room]]
        return list(accumulate([*known, *[1.0] * (room - len(known))], mul))
