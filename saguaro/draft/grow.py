"""A drafter that grows one tree per row (draft/tree.py). A chain is a tree of first children.

    propose   after an outcome that was not prepared: start a new tree at the text's end and grow it
    deepen    after one that was: go on growing before what is below it is verified
    prepare   while the target verifies: go on growing, the likeliest nodes first, or where a planner says
    serve     an outcome arrives: the node that it leads to becomes the root; what is below it is ready

Every function over tensors is a fixed sequence of operations, so on a GPU each is captured as a whole, all steps and
the bookkeeping. For each reply the host sends one line of numbers per row, and waits once. On a CPU the same functions
run operation by operation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from saguaro.device.graphs import Moment, as_float, bucket, float_bits
from saguaro.draft.chance import LEAST
from saguaro.draft.drafter import Prepared, never
from saguaro.draft.growth import Growth, Shape
from saguaro.draft.inputs import Inputs, inputs_of
from saguaro.draft.planner import Planner
from saguaro.draft.policy.kept import State
from saguaro.draft.ranking import Draws
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal, Wanted
from saguaro.draft.texts import DraftTexts
from saguaro.draft.tree import AT_PLACE, NEVER, NO_TREE, ROOT, Trees
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVPlan
from saguaro.model.transformer import Transformer
from saguaro.target.sampler import Sampler
from saguaro.types import CACHE, DRAFT, Outcome


class TreeDrafter(DraftTexts):
    """Grows trees with a model. Also a Proposer."""

    source = DRAFT
    inputs: Inputs

    def __init__(
        self,
        model: Transformer,
        kv: KVPlan,
        sampler: Sampler,
        shape: Shape,
        *,
        max_rows: int,
        n_known: int,
        planner: Planner | None = None,  # which outcomes are prepared; None: the likeliest nodes
        draws: Draws | None = None,  # of first children, under rejection
        cut: float = 0.0,  # a chain ends before the first token less likely than this; 0: never
        kernels: Kernels | None = None,
    ) -> None:
        n_scratch = (max_rows + 1) * (shape.places + 1)  # the last row is for padding
        sizes = {"n_slots": max_rows + 1, "n_places": shape.places + 1, "n_recent": shape.most_text + 1}
        inputs = inputs_of(model, **sizes)
        of_texts = {"max_rows": max_rows, "n_after": shape.most_text, "n_scratch": n_scratch}
        super().__init__(model, kv, inputs=inputs, kernels=kernels, **of_texts)
        sizes = {"max_rows": max_rows, "n_known": n_known}
        self._growth = Growth(self, inputs, sampler, shape, planner=planner, draws=draws, kernels=kernels, **sizes)
        self._shape, self.planner, self.prepares = shape, planner, shape.budget > 0
        self._doubt, self._draws_tokens = math.log(cut) if cut > 0 else NEVER, draws is not None
        device, self._padding = model.device, max_rows
        self._is_captured = kernels is not None
        self._lines = self._growth.lines.host.numpy()
        self._began, self._done, self._grown = Moment(device), Moment(device), Moment(device)
        self._sent = Moment(device)  # the lines; the host may write the next ones
        self._in_flight: dict[int, list[int]] = {}  # by slot: the nodes that are being verified
        self._scores: dict[int, list[float]] = {}  # by slot: of these nodes, and of more
        self._landing: dict[int, tuple[int, int]] = {}  # by slot: node and bonus of an outcome not yet applied
        self._is_prepared = False  # whether trees were grown since the last outcome
        self._n_steps = 0
        self.levels: dict[int, list[float]] = {}  # by slot, of the last call: see Growing

    @property
    def trees(self) -> Trees:
        """The trees of all slots."""
        return self._growth.trees

    @property
    def is_prepared_alike(self) -> bool:
        """See ModelDrafter: not if nodes are read with the draft's own states."""
        return self.inputs.nodes_are_text

    @property
    def n_steps(self) -> int:
        """Steps of the last proposal."""
        return self._n_steps

    @property
    def step_choices(self) -> tuple[int, ...]:
        """Steps of which a captured draft may take as many as a budget says; empty: any number, decided one by one."""
        most = self._shape.lookahead
        return tuple(sorted({-(-most * part // 4) for part in (1, 2, 3, 4)})) if self._is_captured else ()

    def chances(self, slot: int) -> list[float]:
        """The probability that the text of this row runs through each node in flight, as estimated."""
        flight = self._in_flight.get(slot, ())
        return [math.exp(score) for score in self._scores.get(slot, ())[: len(flight)]]

    def verifies(self, slot: int, which: Sequence[int]) -> None:
        """Of the nodes in flight these are verified, in this order; negative ones are nodes of no tree."""
        flight = self._in_flight.get(slot)
        if flight is not None:
            self._in_flight[slot] = [flight[node] if node >= 0 else NO_TREE for node in which]

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        super().retire(slots)
        for slot in slots:
            self._in_flight.pop(slot, None)
            self._scores.pop(slot, None)
            self._landing.pop(slot, None)

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Compute more of texts that are far behind."""
        with self.working():
            return super().read(rows, is_late, seconds)

    @torch.inference_mode()
    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """See Drafter."""
        self.receive(outcome.features)
        self._landing = {}
        facts = zip(outcome.slots.tolist(), outcome.accepted(), outcome.bonus.tolist(), strict=True)
        for slot, nodes, bonus in facts:
            flight = self._in_flight.get(slot)
            if flight is not None and len(nodes) <= len(flight):
                node = flight[nodes[-1]] if nodes else ROOT
                if node != NO_TREE:
                    self._landing[slot] = (node, bonus)
        is_prepared, self._is_prepared, self._in_flight = self._is_prepared, False, {}
        if not is_prepared:
            return list(wanted)
        asked = [(row, n) for row, n in wanted if row.request.params.prepare]
        ready = [(row, n) for row, n in asked if row.slot in self._landing and self.reserve(row)]
        if not ready:
            return list(wanted)
        shape = self._shape.at(len(ready), max(n for _, n in ready))
        found = self._run("respond", [row for row, _ in ready], self._growth.respond, shape)
        size = bucket(len(ready)) if self._is_captured else len(ready)
        with self.working():
            self._graphs.run(("settle", size), partial(self._growth.settle, size))
        missed = {row.slot for row, _ in wanted}
        for (row, n), (is_hit, *nodes) in zip(ready, found, strict=True):
            if self.inputs.nodes_are_text:
                self.trunks[row.slot].n_computed = self.length(row) - (0 if is_hit else 2)
            if is_hit and nodes:
                self._serve(row, nodes[: 3 * n], shape)
                missed.discard(row.slot)
            del self._landing[row.slot]
        return [(row, n) for row, n in wanted if row.slot in missed]

    @torch.inference_mode()
    def deepen(self, wanted: Sequence[Wanted], budget: GrowthBudget) -> None:
        """Go on growing the trees of rows that hit, as far as the budget allows, and put their best nodes in flight.

        Not under rejection: how far a tree is grown must not depend on tokens that were drawn.
        """
        self._n_steps = 0
        if not wanted or self._draws_tokens:
            return
        shape = self._shape.at(len(wanted), max(n for _, n in wanted))
        found = self._run("deepen", [row for row, _ in wanted], self._growth.deepen, shape, budget)
        if self._n_steps:
            for (row, n), (_, *nodes) in zip(wanted, found, strict=True):
                self._serve(row, nodes[: 3 * n], shape)

    def _serve(self, row: DraftRow, nodes: list[int], shape: Shape) -> None:
        """Put prepared nodes in flight."""
        tokens, parents = self._launch(row, nodes)
        row.propose(tokens, CACHE, self._growth.laws(row.slot, nodes[::3]), None if shape.is_chain else parents)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """Grow a tree after each text, as far as the budget allows. Empty if the text is far behind or there is no
        room."""
        ready = self.ready(rows)
        tokens: dict[int, list[int]] = {}
        parents: dict[int, list[int]] = {}
        q: dict[int, Tensor | None] = {}
        shape = self._shape.at(len(ready), lookahead)
        if ready:
            drafted = self._run("draft", ready, self._growth.draft, shape, budget)
            for row, (_, *found) in zip(ready, drafted, strict=True):
                self.trunks[row.slot].n_computed = self.length(row)
                self._landing.pop(row.slot, None)
                tokens[row.slot], parents[row.slot] = self._launch(row, found[: 3 * lookahead])
                q[row.slot] = self._growth.laws(row.slot, found[: 3 * lookahead : 3])
        return Proposal(
            [tokens.get(row.slot, []) for row in rows],
            q=[q.get(row.slot) for row in rows],
            parents=() if shape.is_chain else [parents.get(row.slot) for row in rows],
        )

    @torch.inference_mode()
    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """See Drafter. On a GPU this only launches the work."""
        self._is_prepared = True
        if self.planner is not None:
            self.planner.learn(outcome)
        self._graft([row for row in rows if row.slot not in self._in_flight and row.parents is None])
        rows = [row for row in rows if row.slot in self._in_flight]
        if not rows or is_late():
            return None
        with self.working():
            self._began.mark()
            if not self.inputs.nodes_are_text:  # accepted tokens with true features, in place of the draft's own states
                self.catch_up(rows)
            size = self._write(rows)
            shape = self._shape.at(size, self._shape.nodes)
            if self._is_captured:
                self._graphs.run(("prepare", size), partial(self._growth.prepare, size, shape, never))
            else:
                self._growth.prepare(size, shape, is_late)
            self._grown.mark()
        return Grown(self._began, self._grown)

    def _graft(self, rows: Sequence[DraftRow]) -> None:
        """Start trees for rows whose speculation, if any, is not of a tree."""
        ready = self.ready(rows)
        if not ready:
            return
        self._run("graft", ready, self._growth.graft, self._shape)
        for row in ready:
            self.trunks[row.slot].n_computed = self.length(row)
            self._landing.pop(row.slot, None)
            n = min(len(row.speculation), self._shape.lookahead)  # as many as were put into the tree
            self._in_flight[row.slot] = [AT_PLACE - 1 - k for k in range(n)]

    def state(self) -> State:
        """See Drafter."""
        with self.working():
            return {"chances": self._growth.chances.state()}

    def restore(self, state: State) -> None:
        """See Drafter."""
        with self.working():
            self._growth.chances.restore(state["chances"])

    def warm(self, size: int) -> None:
        """Capture the functions for batches of this size, with padding rows."""
        with self.working(), torch.inference_mode():
            self._lines[:size] = self._padding_line()
            self._growth.lines.send(size)
            self._sent.mark()
            growth, each = self._growth, (2, self._shape.most_text)
            shapes = {self._shape.at(size, room) for room in (self._shape.lookahead, self._shape.nodes)}
            calls = [("draft", growth.draft, replace(shape, n_text=n)) for shape in shapes for n in each]
            if self.prepares:
                if self._catches_up is not None:
                    self._catches_up.warm(size)
                self._graphs.run(("settle", size), partial(growth.settle, size))
                calls += [("respond", growth.respond, shape) for shape in shapes]
                calls += [("graft", growth.graft, replace(self._shape, n_text=n)) for n in each]
            for name, function, shape in calls:
                self._graphs.run((name, size, shape), partial(function, size, shape, None))
            if self.prepares:
                shape = self._shape.at(size, self._shape.nodes)
                self._graphs.run(("prepare", size), partial(growth.prepare, size, shape, never))

    def _run(
        self,
        name: str,
        rows: Sequence[DraftRow],
        function: Callable[[int, Shape, GrowthBudget | None], None],
        shape: Shape,
        budget: GrowthBudget | None = None,
    ) -> list[list[int]]:
        """Run a function for these rows. Returns whether each was a hit, then node, token and parent by turns."""
        with self.working():
            if name in ("draft", "graft"):
                shape = replace(shape, n_text=self._catch_up(rows))
            if budget is not None and self._is_captured:
                shape = replace(shape, steps=budget.steps)
            size = self._write(rows)
            if self._is_captured:
                self._graphs.run((name, size, shape), partial(function, size, shape, None))
            else:
                function(size, shape, budget)
            if name == "graft":  # returns nothing
                return []
            self._growth.found.fetch(len(rows))
            self._done.mark()
        self._done.wait()
        self._n_steps = shape.most_steps if self._is_captured else self._growth.n_steps
        found = self._growth.found.host[: len(rows)]
        least = math.log(max(budget.least, LEAST)) if budget is not None else NEVER
        scores = as_float(found[:, 4::4]).tolist()
        self._scores.update((row.slot, own) for row, own in zip(rows, scores, strict=True))
        lines = list(zip(found.tolist(), scores, strict=True))
        self.levels = {
            row.slot: _levels_of(line[1:], own, shape.lookahead)
            for row, (line, own) in zip(rows, lines, strict=True)
            if self._is_captured
        }
        return [[line[0], *_nodes_of(line[1:], own, least, self._doubt)] for line, own in lines]

    def _launch(self, row: DraftRow, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Remember which nodes are verified. Returns their tokens and parents."""
        self._in_flight[row.slot] = nodes[::3]
        return nodes[1::3], nodes[2::3]

    def _catch_up(self, rows: Sequence[DraftRow]) -> int:
        """Compute each text up to its last tokens. Returns how many are left: those that a draft computes itself."""
        n_left = 2
        if not self.inputs.nodes_are_text:
            n_new = max(self.length(row) - self._first_new(row) for row in rows)
            if self._is_captured:
                return n_left if n_new <= n_left else self._shape.most_text
            n_left = min(n_new, *(self.length(row) for row in rows))
        behind: list[tuple[DraftRow, int]] = []
        for row in rows:
            trunk, end = self.trunks[row.slot], self.length(row) - n_left
            if row.slot in self._landing and self.inputs.nodes_are_text:  # the tree has what is missing
                trunk.n_computed = max(trunk.n_computed, end)
            elif trunk.n_computed < end and self._is_captured:  # nothing is computed here
                return self._shape.most_text
            elif trunk.n_computed < end:
                behind.append((row, end - trunk.n_computed))
        if behind:
            self.compute(behind)
        return n_left

    def _first_new(self, row: DraftRow) -> int:
        """The first place of a text that a draft may write; earlier features are not held."""
        if self.inputs.nodes_are_text:
            return 0
        return min(self.trunks[row.slot].n_computed, self.length(row) - 1)

    def _write(self, rows: Sequence[DraftRow]) -> int:
        """Send the lines of these rows. Returns the number of lines, padding included."""
        self._growth.requests = rows
        self._growth.tables.write((row.slot, self.trunks[row.slot].table.pages) for row in rows)
        size = bucket(len(rows)) if self._is_captured else len(rows)
        self._sent.wait()
        lines = [self._line(row) for row in rows]
        self._lines[:size] = lines + [self._padding_line()] * (size - len(lines))
        self._growth.lines.send(size)
        self._sent.mark()
        return size

    def _line(self, row: DraftRow) -> list[int]:
        request = row.request
        node, bonus = self._landing.get(row.slot, (NO_TREE, 0))
        places = [self.length(row), self.trunks[row.slot].shift, self._first_new(row)]
        noise = [request.seed, float_bits(request.params.temperature)]
        n = min(len(row.speculation), self._shape.lookahead)
        flight = [*row.speculation[:n], *[0] * (self._shape.lookahead - n)]
        text = row.text[-self._shape.most_text :]
        facts = [row.slot, *places, *noise, node, bonus, row.is_hit, n]
        return [*facts, *flight, *[0] * (self._shape.most_text - len(text)), *text]

    def _padding_line(self) -> list[int]:
        return [self._padding, 0, 0, 0, 0, 0, NO_TREE, 0, 0, 0, *[0] * (self._shape.lookahead + self._shape.most_text)]


@dataclass(frozen=True)
class Grown:
    """A growth that was launched. Its outcomes are found in the trees."""

    began: Moment
    done: Moment

    def seconds(self) -> float | None:
        """Device time; None on a CPU."""
        self.done.wait()
        return self.done.since(self.began)


def _levels_of(line: Sequence[int], scores: Sequence[float], most: int) -> list[float]:  # [K]
    """The sum of the probabilities of the nodes of at most 1, 2, ... `most` levels: the accepted tokens to be expected.

    >>> _levels_of([4, 7, -1, 0, 9, 8, 0, 0, 5, 6, -1, 0, -1, 0, 0, 0], [0.0, 0.0, NEVER, NEVER], 2)
    [1.0, 2.0]
    """
    levels, depths = [0.0] * most, list[int]()
    for node, parent, score in zip(line[::4], line[2::4], scores, strict=True):
        if node < 0:
            break
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        levels[depths[-1]] += math.exp(score)
    return list(accumulate(levels))


def _nodes_of(line: Sequence[int], scores: Sequence[float], least: float, doubt: float) -> list[int]:
    """Node, token and parent by turns, of the nodes that are there and have at least this score, up to the first whose
    score falls by more than the doubt below its parent's; at least one."""
    found: list[int] = []
    for node, token, parent, score in zip(line[::4], line[1::4], line[2::4], scores, strict=True):
        above = scores[parent] if parent >= 0 else 0.0
        if node < 0 or (found and (score < least or score - above < doubt)):
            break
        found += (node, token, parent)
    return found
