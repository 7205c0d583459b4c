"""A world for policies: rows, proposers that take their time, and a clock that is a number."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.policy.misses import Misses
from saguaro.draft.policy.policy import Policy
from saguaro.draft.policy.prepare import NeverPrepare
from saguaro.draft.rows import DraftRow, DraftRows, GrowthBudget, Proposal, Wanted
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
    """Proposes 1, 2, 3 ... after every text, and takes a step for each. Knows how likely it is that they stand.

    With choices its steps are captured: it takes as many as it is told, and tells what they are worth.
    """

    source = DRAFT

    def __init__(
        self, clock: Clock, seconds: float, stands: Sequence[int] = (K,), choices: tuple[int, ...] = ()
    ) -> None:
        self.clock, self.seconds, self.step_choices = clock, seconds, choices
        self.chances = [sum(k > n for k in stands) / len(stands) for n in range(K)]  # that the first n + 1 stand
        self.made: list[int] = []  # tokens of each time
        self.deepened: list[int] = []  # steps of each time
        self.n_steps = 0
        self.levels: dict[int, list[float]] = {}

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        self._grow(rows, 1, lookahead, budget)
        self.levels = {row.slot: self._worth(self.n_steps) for row in rows if self.step_choices}
        least = 0.0 if budget is None else budget.least
        n_worth = sum(chance >= least for chance in self.chances[: self.n_steps])
        self.made.append(max(1, n_worth))
        return Proposal([list(range(1, self.made[-1] + 1)) for _ in rows])

    def deepen(self, wanted: Sequence[Wanted], budget: GrowthBudget) -> None:
        """From as many tokens as the first row has in flight."""
        rows, n = [row for row, _ in wanted], len(wanted[0][0].speculation)
        self._grow(rows, 0, K - n, budget, n)
        self.deepened.append(self.n_steps)
        for row in rows:
            row.propose([1] * (n + self.n_steps), CACHE)

    def prepared(self, row: DraftRow, n: int) -> None:
        """n tokens were prepared."""
        row.propose([1] * n, CACHE)
        self.levels = {row.slot: self._worth(n)}

    def _grow(
        self, rows: Sequence[DraftRow], least: int, most: int, budget: GrowthBudget | None, before: int = 0
    ) -> None:
        if self.step_choices:
            steps = None if budget is None else budget.steps
            self.n_steps = min(most, self.step_choices[-1] if steps is None else steps)
            self.clock.now += self.seconds * self.n_steps
            return
        self.n_steps = 0
        while self.n_steps < most:
            if self.n_steps >= least and budget is not None:
                worth = self.chances[before + self.n_steps]
                if not budget.goes_on(rows, [worth] * len(rows)):
                    break
            self.clock.now += self.seconds
            self.n_steps += 1

    def _worth(self, n: int) -> list[float]:
        return list(accumulate(chance if at < n else 0.0 for at, chance in enumerate(self.chances)))


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
