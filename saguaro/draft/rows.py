"""The draft side's rows. They are updated only by admissions and outcomes, because the target may be elsewhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from saguaro.target.grammar import Guide, Start
from saguaro.target.request import Request
from saguaro.types import CACHE, EMPTY, Joined, Outcome, Speculation


@dataclass(eq=False)
class DraftRow:
    """A text, and the speculation in flight after it: proposed and not decided yet."""

    slot: int
    request: Request  # its tokens and parameters
    speculation: list[int] = field(default_factory=list)
    source: int = EMPTY
    q: Tensor | None = None  # [F, V] the distributions the families of tokens were drawn from, if they were
    parents: Sequence[int] | None = None  # of the speculated tokens, if they are a tree (algo/tree.py)

    @property
    def text(self) -> list[int]:
        """The verified tokens."""
        return self.request.tokens

    @property
    def is_hit(self) -> bool:
        """Whether the speculation in flight came from the cache."""
        return self.source == CACHE

    def propose(
        self, tokens: Sequence[int], source: int, q: Tensor | None = None, parents: Sequence[int] | None = None
    ) -> None:
        """Put a speculation in flight."""
        self.speculation, self.source, self.q = list(tokens), source if tokens else EMPTY, q
        self.parents = parents


Wanted = tuple[DraftRow, int]  # a row, and its room for tokens


class GrowthBudget(Protocol):
    """How far a tree is grown."""

    @property
    def least(self) -> float:
        """Smallest probability of a node that is worth verifying."""

    @property
    def steps(self) -> int | None:
        """Steps to take where they are captured and so not decided on one by one; None: as many as there may be."""

    def goes_on(self, rows: Sequence[DraftRow], worth: Sequence[float]) -> bool:
        """Whether to take another step, which adds an accepted token of each row with these probabilities."""


@dataclass(frozen=True)
class Proposal:
    """Proposed tokens after some texts."""

    tokens: list[list[int]]  # [R][<= K]
    q: Sequence[Tensor | None] = ()  # [R] of [F, V]: see DraftRow; None, or empty: they were not drawn
    parents: Sequence[Sequence[int] | None] = ()  # [R] of trees (algo/tree.py); empty: all are chains
    chances: Sequence[Sequence[float]] = ()  # [R] that the text runs through each node, as estimated; empty: unknown


class Proposer(Protocol):
    """Proposes tokens after texts."""

    source: int  # one of SOURCES

    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """Up to `lookahead` tokens after each row's text."""


class DraftRows:
    """The rows by slot."""

    def __init__(self, start: Start | None = None) -> None:
        self._start = start  # starts grammars; None: rows are drafted without their grammar
        self._rows: dict[int, DraftRow] = {}

    def __iter__(self) -> Iterator[DraftRow]:
        return iter(self._rows.values())

    def get(self, slot: int) -> DraftRow | None:
        """The row of a slot; None if it was never introduced."""
        return self._rows.get(slot)

    def admit(self, joined: Sequence[Joined]) -> list[DraftRow]:
        """Add these rows."""
        for one in joined:
            assert one.slot not in self._rows, f"slot {one.slot} was admitted twice"
            request = Request(str(one.slot), one.tokens[: one.n_prompt], one.params, one.seed)
            request.tokens = list(one.tokens)
            if one.params.structured is not None and self._start is not None:
                grammar = self._start(one.params.structured)
                request.grammar = None if grammar is None else Guide(grammar)
            self._rows[one.slot] = DraftRow(one.slot, request)
        return [self._rows[one.slot] for one in joined]

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        for slot in slots:
            self._rows.pop(slot, None)

    def commit(self, outcome: Outcome) -> None:
        """Append the accepted tokens and the bonus to each text, and clear all speculations."""
        for slot, nodes, bonus in zip(outcome.slots.tolist(), outcome.accepted(), outcome.bonus.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None:
                row.text.extend([*(row.speculation[node] for node in nodes), bonus])
        for row in self:
            row.propose([], EMPTY)

    def in_flight(self, slots: Sequence[int], lookahead: int, n_vocab: int) -> Speculation:
        """The speculations in flight for these rows, in this order."""
        rows = [self._rows.get(slot) for slot in slots]
        if not any(row.speculation for row in rows if row is not None):
            return Speculation.empty(len(slots))
        spec = Speculation.of(
            [row.speculation if row else [] for row in rows],
            lookahead,
            [row.source if row else EMPTY for row in rows],
            [row.parents if row else None for row in rows],
        )
        if all(row is None or row.q is None for row in rows):
            return spec
        return replace(spec, q=stack_q(spec, [row.q if row else None for row in rows], n_vocab))


def stack_q(spec: Speculation, each: Sequence[Tensor | None], n_vocab: int) -> Tensor:  # [B, F, V]
    """The rows' q as one tensor: zero for tokens that were not drawn.

    >>> import torch
    >>> spec = Speculation.of([[1], [0]], 1, [2, 3])
    >>> stack_q(spec, [torch.tensor([[0.5, 0.5]]), None], 2)
    tensor([[[0.5000, 0.5000]],
    <BLANKLINE>
            [[0.0000, 0.0000]]])
    """
    some = next(q for q in each if q is not None)
    lengths = zip(each, spec.length.tolist(), strict=True)
    out = some.new_zeros(len(each), max(n if q is None else len(q) for q, n in lengths), n_vocab)
    for b, q in enumerate(each):
        if q is not None:
            out[b, : len(q)] = q
    return out
