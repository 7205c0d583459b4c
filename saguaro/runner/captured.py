"""Steps in which every row decodes, captured once per batch size together with what follows them on the device.

Rows are left-padded: the text's last token and the speculation fill the last of a row's N + 1 positions
(attention.paged). The host writes one line of numbers per row and waits once for what was found.

If a draft reads features, they are gathered here too: of the text's last token and of the accepted ones of every row.

If a step has as many nodes per row as its depth, all rows are chains. If it has more, all rows are trees; a chain is
written as the tree that it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saguaro.algo.tree import nodes_at
from saguaro.attention.paged import StepTrees, left_padded, left_padded_trees
from saguaro.attention.step import Segment, Step
from saguaro.device.graphs import Graphs, Mirror, Moment, bucket, to_device
from saguaro.kv.memory import KVCache
from saguaro.kv.tables import PageTables

SLOT, TEXT, LENGTH, FACTS = range(4)  # columns of a row's line; then the facts, the tokens and, of trees, the parents


@dataclass(frozen=True)
class Computed:
    """What a captured step has computed: R rows of N + 1 positions."""

    step: Step
    trees: StepTrees | None  # None: chains
    n: Tensor  # [R] int64: speculated tokens; -1: padding row
    facts: Tensor  # [R, facts] int64: of the segments
    columns: Tensor  # [N + 1] int64: 0..N
    logits: Tensor  # [R * (N + 1), V]


class Decided(NamedTuple):
    """What follows a step."""

    found: Tensor  # [R, up to n_found] int64: for the host
    taken: Tensor  # [R, D + 1] int64: columns of the text's last token and of the accepted tokens, then any others


@dataclass(frozen=True)
class Room:
    """How much what follows a step can hold of its rows' rules."""

    seats: int  # requests with entries in tables
    changes: int  # entries of a request that change in a step
    masks: int  # masks of tokens in a step


class Follow(Protocol):
    """What follows the logits."""

    @property
    def room(self) -> Room:
        """What there is room for."""

    def write(self, rows: Sequence[Segment], width: int) -> None:
        """Before the step: write what these rows tell to the tables; a row has so many positions."""

    def __call__(self, at: Computed) -> "Decided":
        """A function of tensors, which is captured."""


@dataclass(frozen=True)
class Followed:
    """A captured step that runs, and what follows it."""

    n_rows: int
    features: Tensor | None  # [R, D + 1, F] of the tokens taken; valid until the next step; None: there are no taps
    _found: Mirror  # [rows, n_found] int64
    _began: Moment
    _done: Moment

    def wait(self) -> Tensor:  # [R, n_found] int64
        """Wait for what was found."""
        self._done.wait()
        return self._found.host[: self.n_rows].clone()

    def seconds(self) -> float | None:
        """Device time, available after the wait; None on a CPU."""
        return self._done.since(self._began)


class CapturedSteps:
    """The captured steps of a model, and their fixed input and output buffers."""

    def __init__(
        self,
        follow: Follow,
        cache: KVCache,
        *,
        longest: int,
        max_rows: int,
        depth: int,  # D: most tokens of a chain, most depth of a tree
        nodes: int,  # N: most nodes of a tree; not above the depth: only chains are captured
        n_facts: int,
        n_found: int,
    ) -> None:
        self._follow, self.room, self._page_size, self._longest = follow, follow.room, cache.page_size, longest
        self._depth, self._nodes, self._first = depth, max(depth, nodes), FACTS + n_facts  # first column of tokens
        device, size, n_parents = cache.device, bucket(max_rows), nodes if nodes > depth else 0
        self._graphs, self._began, self._done = Graphs(device), Moment(device), Moment(device)
        self._tables = PageTables(max_rows, longest, cache.page_size, device)
        self._padding = Segment((), -1, (), 0, slot=self._tables.padding_slot)  # no text, no token
        self._lines = Mirror((size, self._first + self._nodes + 1 + n_parents), torch.int64, device)
        self._found = Mirror((size, n_found), torch.int64, device)
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._columns = torch.arange(self._nodes + 1, device=device)
        # By batch size, valid until the next step: of all tokens [rows * (N + 1), V] and [rows * (N + 1), F], and
        # features of the tokens taken [rows, D + 1, F].
        self._logits: dict[int, Tensor] = {}
        self._features: dict[int, Tensor] = {}
        self._taken: dict[int, Tensor] = {}
        self._host = self._lines.host.numpy()

    def takes(self, rows: Sequence[Segment], is_followed: bool) -> bool:
        """Whether there is a step for these rows: one token of text each, and not too many nodes.

        Nodes deeper than the depth are not computed, so their logits must not be used.
        """
        n = self._nodes_at(len(rows))
        if not all(row.n_wanted == len(row.tokens) <= n + 1 for row in rows):
            return False
        if n <= self._depth:
            return all(row.parents is None for row in rows)
        return is_followed or all(row.depth <= self._depth for row in rows)

    def replay(self, compute: "Compute", rows: Sequence[Segment], size: int) -> None:
        """Launch the step of this batch size for these rows, padded."""
        self._tables.write((row.slot, row.pages) for row in rows)
        n = self._nodes_at(size)
        self._follow.write(rows, n + 1)
        lines = [self._line(n, row) for row in rows] + [self._line(n, self._padding)] * (size - len(rows))
        self._host[:size, : len(lines[0])] = lines
        self._began.mark()
        self._lines.send(size)
        self._graphs.run(size, partial(self._step, compute, size))

    def followed(self, n_rows: int) -> Followed:
        """What follows the last step, of so many rows."""
        self._found.fetch(n_rows)
        self._done.mark()
        taken = self._taken.get(bucket(n_rows))
        return Followed(n_rows, None if taken is None else taken[:n_rows], self._found, self._began, self._done)

    def computed(self, rows: Sequence[Segment]) -> tuple[Tensor, Tensor | None]:  # [T, V], [T, F]
        """The logits after each token of the last step's rows, and the features of the tokens."""
        at, features = self._places(rows), self._features.get(bucket(len(rows)))
        logits = self._logits[bucket(len(rows))].index_select(0, at)
        return logits, None if features is None else features.index_select(0, at)

    def logits(self, rows: Sequence[Segment]) -> Tensor:  # [T, V]
        """The logits after each token of the last step's rows."""
        return self._logits[bucket(len(rows))].index_select(0, self._places(rows))

    def _places(self, rows: Sequence[Segment]) -> Tensor:  # [T]
        """Where the tokens of these rows are in the step."""
        width = self._nodes_at(len(rows)) + 1
        wanted = [at for row, one in enumerate(rows) for at in range((row + 1) * width)[-len(one.tokens) :]]
        return to_device(wanted, self._columns.device)

    def _nodes_at(self, n_rows: int) -> int:
        """Nodes per row of the step for this batch size; chains only, if not more than the depth."""
        return nodes_at(n_rows, self._nodes, self._depth)

    def _line(self, n: int, row: Segment) -> list[int]:
        length, facts = len(row.tokens) - 1, [*row.facts, *[0] * (self._first - FACTS - len(row.facts))]
        line = [row.slot, row.start + 1, length, *facts, *[0] * (n - length), *row.tokens]
        if n > self._depth:
            parents = range(-1, length - 1) if row.parents is None else row.parents
            line += [*parents, *[-1] * (n - len(parents))]
        return line

    def _step(self, compute: "Compute", size: int) -> None:
        """Lay out the lines, compute the logits, and do what follows."""
        most, first = self._nodes_at(size), self._first
        lines, starts = self._lines.device[:size], self._starts[: size + 1] * (most + 1)
        text, n, pages = lines[:, TEXT], lines[:, LENGTH], self._tables.device[lines[:, SLOT]]
        tokens, parent = lines[:, first : first + most + 1], lines[:, first + most + 1 : first + 2 * most + 1]
        where = (text, n, pages, starts, self._page_size, self._longest)
        trees = None
        if most <= self._depth:
            step = left_padded(tokens, *where)
        else:
            step, trees = left_padded_trees(tokens, parent, *where, self._depth)
        logits, features = compute(step)
        self._logits[size] = logits
        found, taken = self._follow(Computed(step, trees, n, lines[:, FACTS:first], self._columns[: most + 1], logits))
        self._found.device[:size, : found.shape[1]] = found
        if features is not None:
            self._features[size] = features
            at = taken + starts[:-1, None]
            self._taken[size] = features.index_select(0, at.flatten()).view(*at.shape, -1)


Compute = Callable[[Step], tuple[Tensor, Tensor | None]]  # -> logits [T, V] and features [T, F] of all tokens
