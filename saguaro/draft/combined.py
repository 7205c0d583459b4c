"""A model's trees together with what followed earlier in the text: the likelier children of either.

After the model has drafted a tree, or has one ready, the likeliest nodes of both sources are verified
(draft/best_first.py). The model's tree keeps growing as it was: nodes that are not its own are verified beside it, and
an outcome that ends at one of them is a miss. All of this is host code after the model's reply, so it is the same for
captured drafts.

Two kinds of speculations stay as the model drafted them, so a row is then drafted by one of the two: draws (under
rejection they would have to be told as certain, and would be accepted less often), and the chains of methods that plan
outcomes, which are continuations of what is in flight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from saguaro.draft.best_first import NOT_DRAFTED, Nodes
from saguaro.draft.drafter import Drafter, Prepared
from saguaro.draft.growth import Shape
from saguaro.draft.policy.kept import State
from saguaro.draft.policy.misses import TreeProposer
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal, Wanted
from saguaro.draft.suffix import Suffix
from saguaro.types import CACHE, SUFFIX, Outcome


class ModelDrafter(Drafter, TreeProposer, Protocol):
    """A Drafter with a model, that is also a proposer of trees."""

    @property
    def is_prepared_alike(self) -> bool:
        """Whether what is prepared equals what is drafted just in time."""

    def chances(self, slot: int) -> list[float]:
        """The probability that the text of this row runs through each node in flight, as estimated."""

    def verifies(self, slot: int, which: Sequence[int]) -> None:
        """Of the nodes in flight these are verified, in this order; negative ones are not the model's."""


class Combined:
    """A model and a suffix drafter that follow the same texts. A Drafter, and a proposer of trees."""

    def __init__(self, model: ModelDrafter, suffix: Suffix, shape: Shape, *, completes: bool) -> None:
        """completes: what the model drafts is completed; else it stays as it is."""
        self.model, self.suffix = model, suffix
        self._shape, self._completes = shape, completes
        self.source, self.prepares = model.source, model.prepares

    @property
    def is_prepared_alike(self) -> bool:
        """The model's."""
        return self.model.is_prepared_alike

    @property
    def n_steps(self) -> int:
        """Steps of the model's last proposal."""
        return self.model.n_steps

    @property
    def step_choices(self) -> tuple[int, ...]:
        """The model's."""
        return self.model.step_choices

    @property
    def levels(self) -> Mapping[int, Sequence[float]]:
        """The model's."""
        return self.model.levels

    def deepen(self, wanted: Sequence[Wanted], budget: GrowthBudget) -> None:
        """Does nothing: what followed earlier is beside the model's tree."""

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows."""
        self.model.admit(rows)
        self.suffix.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        self.model.retire(slots)
        self.suffix.retire(slots)

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """See Drafter."""
        self.model.settle(rows)

    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """See Drafter."""
        missed = self.model.serve(outcome, wanted)
        if self._completes:
            lost = {row.slot for row, _ in missed}
            hits = [(row, n) for row, n in wanted if row.slot not in lost]
            shape = self._shape.at(len(hits), max((n for _, n in hits), default=0))
            for row, n in hits:
                drafted = Nodes(row.speculation, _parents(row.parents, row.speculation), self.model.chances(row.slot))
                nodes = self._complete(row, drafted, shape, n)
                source = SUFFIX if all(node == NOT_DRAFTED for node in nodes.drafted) else CACHE
                row.propose(nodes.tokens, source, None, None if shape.is_chain else nodes.parents)
        return missed

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """See Drafter."""
        is_read = self.suffix.read(rows, is_late, seconds)
        return self.model.read(rows, is_late, seconds) or is_read

    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """See Drafter: the model grows its trees."""
        return self.model.prepare(rows, outcome, is_late)

    def warm(self, size: int) -> None:
        """Warm up for batches of this size."""
        self.model.warm(size)

    def state(self) -> State:
        """See Drafter."""
        return {**self.model.state(), **self.suffix.state()}

    def restore(self, state: State) -> None:
        """See Drafter."""
        self.model.restore(state)
        self.suffix.restore(state)

    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """The model's trees, as far as the budget allows, with what followed earlier. Empty for a row that the model
        does not draft for."""
        proposal = self.model.propose(rows, lookahead, budget)
        if not self._completes:
            return proposal
        shape, least = self._shape.at(len(rows), lookahead), budget.least if budget is not None else 0.0
        found = []
        for index, row in enumerate(rows):
            tokens = proposal.tokens[index]
            parents = _parents(proposal.parents[index] if proposal.parents else None, tokens)
            drafted = Nodes(tokens, parents, self.model.chances(row.slot))
            found.append(self._complete(row, drafted, shape, lookahead, least) if tokens else drafted)
        return Proposal(
            [nodes.tokens for nodes in found],
            parents=() if shape.is_chain else [nodes.parents for nodes in found],
            chances=[nodes.chances for nodes in found],
        )

    def _complete(self, row: DraftRow, drafted: Nodes, shape: Shape, room: int, least: float = 0.0) -> Nodes:
        """The likeliest nodes of both; those that the model did not draft are worth verifying."""
        nodes = self.suffix.nodes(row, shape, room, drafted)
        n = len(nodes.tokens)
        while n > 0 and nodes.drafted[n - 1] == NOT_DRAFTED and nodes.chances[n - 1] < least:
            n -= 1
        nodes = nodes.first(n)
        self.model.verifies(row.slot, nodes.drafted)
        return nodes


def _parents(parents: Sequence[int] | None, tokens: Sequence[int]) -> list[int]:
    """The parents of a tree's nodes; None: of a chain."""
    return list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
