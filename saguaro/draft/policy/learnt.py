"""What all decisions of the draft's side rest on, learnt from rounds as they happen: what verifying and drafting take,
and how many tokens of a speculation are accepted.

A verification is measured from the reply to the next outcome, so it includes everything that the target's side does in
a round. It counts only if the batch was steady: all known rows were asked about, none was new, and no text was read.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from saguaro.device.graphs import bucket
from saguaro.draft.policy.average import Average
from saguaro.draft.policy.cost import Pace, Scale, SecondsByCount
from saguaro.draft.policy.curve import TokensBySteps
from saguaro.draft.policy.kept import State
from saguaro.draft.rows import DraftRow, DraftRows
from saguaro.types import CACHE, DRAFT, Outcome

ASSUMED = 8.0  # weight of the prior of full acceptance, in speculations
OF_ROW = 16.0  # weight of all texts' acceptance in that of one text
WORTH_KEEPING = 50  # verifications measured
MOST_KEPT = 50.0  # speculations that what was kept of acceptance counts as
HOPED = 4.0  # weight of the prior that a depth of the backup's chains stands

clock = time.perf_counter

Kind = tuple[int, int]  # of a speculation: source and length


@dataclass
class Drafted:
    """What became of one proposer's speculations."""

    accepted: Average = field(default_factory=partial(Average, kept=0.99))  # tokens per speculation
    length: Average = field(default_factory=Average)  # tokens verified per speculation
    stands: list[Average] = field(default_factory=list)  # of chains, by depth: accepted if all before it were

    def add(self, length: int, n_accepted: int) -> None:
        """Add a speculation's outcome."""
        self.accepted.add(n_accepted)
        self.length.add(length)
        for depth in range(min(n_accepted + 1, length)):
            if depth == len(self.stands):
                self.stands.append(Average())
            self.stands[depth].add(n_accepted > depth)

    def state(self) -> State:
        """To be kept (kept.py)."""
        stands = [average.state() for average in self.stands]
        return {"accepted": self.accepted.state(), "length": self.length.state(), "stands": stands}

    def restore(self, state: Any) -> None:
        """Continue from a kept state."""
        self.accepted.restore(state["accepted"]).limit(MOST_KEPT)
        self.length.restore(state["length"])
        self.stands = [Average().restore(each) for each in state["stands"]]

    def worth(self, least: float) -> int:
        """How many tokens of a chain are worth verifying, if one must be accepted at least this often.

        >>> drafted = Drafted()
        >>> for n_accepted in (0, 1) * 100:
        ...     drafted.add(2, n_accepted)
        >>> drafted.worth(0.4), drafted.worth(0.6)
        (1, 0)
        """
        chance = 1.0
        for depth, stands in enumerate(self.stands):
            chance *= stands.mean(1.0, weight=max(0.0, HOPED - stands.n))
            if chance < least:
                return depth
        return len(self.stands) + 1


@dataclass(frozen=True)
class _Reply:
    """A reply whose outcome is awaited."""

    at: float
    n_tokens: int  # verified: of each row one, and its speculation
    n_rows: int
    is_steady: bool


class Learnt:
    """The costs and values of one engine."""

    def __init__(self, now: Callable[[], float] | None = None, *, is_prepared_alike: bool = True) -> None:
        """is_prepared_alike: what was prepared equals what is drafted just in time, so both are learnt together."""
        self.now, self._is_prepared_alike = now if now is not None else clock, is_prepared_alike
        pace = Pace()
        alone, beside = Scale(), Scale()
        alone.like, beside.like = [beside], [alone]
        self.alone = SecondsByCount(pace, alone, is_reference=True)  # verification by tokens
        self.beside = SecondsByCount(pace, beside)  # the same while the draft prepares
        self._drafting: dict[int, SecondsByCount] = {}  # by rows: a draft by its steps
        self._pace, self._draft_scale = pace, Scale([alone, beside])
        self.steps = Average()  # per draft
        self.by_steps = TokensBySteps()  # where steps are captured
        self.worth: dict[Kind, Average] = defaultdict(lambda: Average(kept=0.998))  # accepted tokens per speculation
        self.by_model, self.by_backup = Drafted(), Drafted()
        self._of_row: WeakKeyDictionary[DraftRow, Average] = WeakKeyDictionary()  # the same of one text
        self._reply: _Reply | None = None
        self._known: set[DraftRow] = set()  # rows of the last reply
        self._is_beside = False  # whether the last preparation took place

    @property
    def is_sure(self) -> bool:
        """Whether enough was learnt to be worth keeping."""
        return self.alone.n + self.beside.n >= WORTH_KEEPING

    @property
    def verification(self) -> SecondsByCount:
        """Seconds by tokens, in the present mode."""
        first, second = (self.beside, self.alone) if self._is_beside else (self.alone, self.beside)
        return first if first.n else second

    def kind_of(self, row: DraftRow, length: int) -> Kind:
        """The kind of a row's speculation."""
        return (DRAFT if row.source == CACHE and self._is_prepared_alike else row.source, length)

    def drafting(self, n_rows: int) -> SecondsByCount:
        """Seconds of a draft by its steps, for so many rows."""
        size = bucket(n_rows)
        if size not in self._drafting:
            self._drafting[size] = self.new_drafting(is_proportional=True)
        return self._drafting[size]

    def new_drafting(self, *, is_proportional: bool = False) -> SecondsByCount:
        """Seconds of the draft, by any number."""
        return SecondsByCount(self._pace, self._draft_scale, is_proportional=is_proportional)

    @property
    def drafted_by_rows(self) -> Mapping[int, SecondsByCount]:
        """Seconds of a draft by its steps, for each number of rows that was measured."""
        return self._drafting

    def model_accepts(self, rows: Sequence[DraftRow], most: int) -> float:
        """Tokens expected to be accepted of a model's speculations for these rows, in total; `most` per row is
        assumed before anything is known."""
        known = self.by_model.accepted
        usual = known.mean(most, weight=max(0.0, ASSUMED - known.n))
        of = self._of_row
        return math.fsum(of[row].mean(usual, weight=OF_ROW) if row in of else usual for row in rows)

    def state(self) -> State:
        """To be kept (kept.py)."""
        return {
            "alone": self.alone.state(),
            "beside": self.beside.state(),
            "drafting": {str(size): seconds.state() for size, seconds in self._drafting.items()},
            "steps": self.steps.state(),
            "by_steps": self.by_steps.state(),
            "worth": [[*kind, average.state()] for kind, average in self.worth.items()],
            "by_model": self.by_model.state(),
            "by_backup": self.by_backup.state(),
        }

    def restore(self, state: State) -> None:
        """Continue from a kept state."""
        self.alone.restore(state["alone"])
        self.beside.restore(state["beside"])
        for size, each in state["drafting"].items():
            self.drafting(int(size)).restore(each)
        self.steps.restore(state["steps"])
        self.by_steps.restore(state["by_steps"])
        for source, length, each in state["worth"]:
            self.worth[int(source), int(length)].restore(each).limit(MOST_KEPT)
        self.by_model.restore(state["by_model"])
        self.by_backup.restore(state["by_backup"])

    def outcome(self, outcome: Outcome, rows: DraftRows) -> None:
        """Learn an outcome. Called before the commit."""
        reply, self._reply = self._reply, None
        if reply is not None and reply.is_steady and len(outcome.slots) == reply.n_rows:
            (self.beside if self._is_beside else self.alone).add(reply.n_tokens, self.now() - reply.at)
        facts = zip(outcome.slots.tolist(), outcome.length.tolist(), outcome.n_accepted.tolist(), strict=True)
        for slot, length, k in facts:
            row = rows.get(slot)
            if row is None:
                continue
            self.worth[self.kind_of(row, length)].add(k)
            if row.source in (DRAFT, CACHE):
                self.by_model.add(length, k)
                if row not in self._of_row:
                    self._of_row[row] = Average()
                self._of_row[row].add(k)
            else:
                self.by_backup.add(length, k)

    def drafted(self, n_rows: int, n_steps: int, seconds: float) -> None:
        """The model drafted for so many rows."""
        self.drafting(n_rows).add(n_steps, seconds)
        self.steps.add(n_steps)

    def answered(self, rows: DraftRows, asked: Sequence[DraftRow]) -> None:
        """The reply is sent. The verification begins."""
        known = set(rows)
        is_steady = len(known) == len(asked) and known <= self._known
        n_tokens = len(asked) + sum(len(row.speculation) for row in asked)
        self._known = known
        self._reply = _Reply(self.now(), n_tokens, len(asked), is_steady) if asked else None

    def until_outcome(self, is_beside: bool, is_disturbed: bool) -> None:
        """What the draft does while the target verifies: prepare, or work that not every round has."""
        self._is_beside = is_beside
        if is_disturbed:
            self._reply = None
