"""How many steps are worth drafting where they are captured, and whether a speculation that hit is grown further.

Captured steps cannot be decided on one by one. So it is learnt how many accepted tokens are to be expected of a tree
after 1, 2, ... steps, from the path probabilities of the trees themselves, and the number is chosen that gives the most
tokens per second:

    (rows + tokens of the others + expected(steps))  /  (verification + draft(steps))

A speculation that hit was grown while the target verified, often towards other outcomes too, so it may be shallower
than one drafted just in time. It is worth as much as a draft of some number of steps; growing further gains what a
draft gains from there on.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from saguaro.draft.policy.budget import budget_at
from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.rows import DraftRow, GrowthBudget, Wanted

SURE = 4  # drafts measured before fewer steps are taken
BETTER = 1.03  # another number of steps is taken if it is so many times as fast: it must be captured first


class Growing(Protocol):
    """What grows trees further: a TreeDrafter."""

    @property
    def n_steps(self) -> int:
        """Steps of the last call."""

    @property
    def step_choices(self) -> tuple[int, ...]:
        """Numbers of steps that can be chosen; empty: steps are decided on one by one."""

    @property
    def levels(self) -> Mapping[int, Sequence[float]]:
        """Of the last call, by slot: accepted tokens expected of the first 1, 2, ... K levels of what it proposed."""

    def deepen(self, wanted: Sequence[Wanted], budget: GrowthBudget) -> None:
        """Grow the trees of rows that hit, and put their best nodes in flight."""


class Deepens(Protocol):
    """Decides whether speculations that hit are grown further."""

    def deepen(self, hits: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """Grow the speculations of these rows, a part of the rows asked about, as far as it pays."""


class NeverDeepen:
    """What was prepared is verified as it is."""

    def deepen(self, hits: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """Does nothing."""


class MeasuredDepth:
    """Grows prepared speculations as far as it pays."""

    def __init__(self, model: Growing, learnt: Learnt) -> None:
        self._model, self._learnt = model, learnt

    def deepen(self, hits: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        """See Deepens."""
        learnt, n_hits = self._learnt, len(hits)
        if not (hits and learnt.verification.n and learnt.drafting(n_hits).n):
            return
        n_tokens = len(asked) + sum(len(row.speculation) for row in asked)
        seconds = learnt.verification.at(n_tokens)
        tokens = len(asked) + learnt.model_accepts(asked, max(n for _, n in hits))
        steps = None
        if self._model.step_choices:
            steps = self._steps(hits, tokens, seconds)
            if not steps:
                return
        began = learnt.now()
        self._model.deepen(hits, budget_at(tokens / seconds, learnt, n_hits, steps))
        if self._model.n_steps:
            learnt.drafted(n_hits, self._model.n_steps, learnt.now() - began)

    def _steps(self, hits: Sequence[Wanted], tokens: float, seconds: float) -> int:
        """The number of captured steps that gives the most tokens per second; 0: none."""
        curve, drafting = self._learnt.by_steps, self._learnt.drafting(len(hits))
        values = [self._model.levels[row.slot][-1] for row, _ in hits]

        def rate(n: int) -> float:
            gain = sum(curve.after(value, n) - value for value in values)
            return (tokens + gain) / (seconds + drafting.at(n)) if n else tokens / seconds / BETTER

        return max((0, *self._model.step_choices), key=rate)


def captured_steps(model: Growing, learnt: Learnt, missed: Sequence[Wanted], asked: Sequence[DraftRow]) -> int | None:
    """The number of steps of a captured draft that gives the most tokens per second; None: as many as there may be."""
    drafting = learnt.drafting(len(missed))
    if not model.step_choices or not learnt.verification.n or drafting.n < SURE:
        return None
    slots, room, most = {row.slot for row, _ in missed}, max(n for _, n in missed), model.step_choices[-1]
    tokens = len(asked) + learnt.model_accepts([row for row in asked if row.slot not in slots], room)
    seconds = learnt.verification.at(len(asked) * (1 + learnt.by_model.length.mean(room)))

    def rate(n: int) -> float:
        return (tokens + len(missed) * learnt.by_steps.at(n)) / (seconds + drafting.at(n))

    best = max(model.step_choices, key=rate)
    return best if rate(best) > BETTER * rate(most) else None
