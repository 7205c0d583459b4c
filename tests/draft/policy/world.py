"""A world for policies: rows, proposers that take their time, and a clock that is a number."""

from collections.abc import Sequence

import torch

from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import Misses
from saguaro.draft.policy.policy import Policy
from saguaro.draft.policy.prepare import NeverPrepare
from saguaro.draft.rows import DraftRow, DraftRows, GrowthBudget, Proposal
from saguaro.types import CACHE, DRAFT, Joined, Outcome

K = 4


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Counting:
    """Proposes 1, 2, 3 ... after every text, and takes its time."""

    def __init__(self, clock: Clock, source: int, seconds: float = 0.0, n_most: int = K) -> None:
        self.clock, self.source, self.seconds, self.n_most = clock, source, seconds, n_most
        self.asked: list[tuple[list[int], int]] = []  # slots and lookahead of each time

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        self.asked.append(([row.slot for row in rows], lookahead))
        self.clock.now += self.seconds
        return Proposal([list(range(1, min(lookahead, self.n_most) + 1)) for _ in rows])


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


class World:
    """Plays rounds of a policy as the draft's side does."""

    def __init__(
        self, clock: Clock, misses: Misses, learnt: Learnt | None = None, n_rows: int = 1, verify_s: float = 1.0
    ) -> None:
        self.clock, self.verify_s, self.token_s = clock, verify_s, 0.0
        self.policy = Policy(learnt if learnt is not None else Learnt(clock), misses, NeverPrepare())
        self.lengths: list[int] = []  # of speculations, one after another
        self.accepted: list[int] = []
        self.rows = DraftRows()
        self.rows.admit([Joined(slot, [1]) for slot in range(n_rows)])

    def row(self, slot: int) -> DraftRow:
        row = self.rows.get(slot)
        assert row is not None
        return row

    def play(self, hits: Sequence[int] = (), accepted: dict[int, int] | None = None, room: int = K) -> list[int]:
        """One round: these slots hit, the others miss; of each source so many tokens stand. The sources."""
        rows = list(self.rows)
        for slot in hits:
            self.row(slot).propose([1] * K, CACHE)
        self.policy.draft([(row, room) for row in rows if row.slot not in hits and room], rows)
        self.policy.answered(self.rows, rows)
        sources, lengths = [row.source for row in rows], [len(row.speculation) for row in rows]
        self.clock.now += self.verify_s + self.token_s * sum(lengths)
        k = [min((accepted or {}).get(source, 0), n) for source, n in zip(sources, lengths, strict=True)]
        self.lengths += lengths
        self.accepted += k
        slots = torch.tensor([row.slot for row in rows])
        outcome = Outcome(slots, torch.tensor(lengths), torch.tensor(k), torch.tensor([9] * len(rows)))
        self.policy.outcome(outcome, self.rows)
        self.rows.commit(outcome)
        return sources
