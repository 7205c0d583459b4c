"""A drafter that grows one tree per row (draft/tree.py), for verification by shared noise.

    propose   after an outcome that was not foreseen: start a new tree at the text's end and grow it
    prepare   while the target verifies: go on growing, the likeliest nodes first
    serve     an outcome arrives: the node that it leads to becomes the root; what is below it is ready

Every function over tensors is a fixed sequence of operations, so on a GPU each is captured as a whole, all steps and
the bookkeeping; the host sends one line of numbers per row and waits once. On a CPU the same functions run one by one.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from saguaro.algo.planning import Planned
from saguaro.algo.tree import nodes_at
from saguaro.attention.paged import kv_indices_at
from saguaro.attention.step import Nodes, Segment, Step
from saguaro.device.graphs import Graphs, Mirror, Moment, SideStream, as_float, bucket
from saguaro.draft.chance import Chances
from saguaro.draft.model import Prepared
from saguaro.draft.planner import Planner
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal, Wanted
from saguaro.draft.texts import DraftTexts
from saguaro.draft.tree import (
    NEVER,
    NO_TREE,
    PLACES,
    ROOT,
    Landing,
    Picked,
    Trees,
    best,
    expand,
    land,
    pick,
    reroot,
    set_children,
    start,
)
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVPlan
from saguaro.kv.tables import PageTables
from saguaro.model.transformer import Transformer
from saguaro.target.graphed import float_bits
from saguaro.target.sampler import Context, Sampler, is_plain
from saguaro.types import CACHE, DRAFT, Outcome

SLOT, TEXT, SEED, TEMPERATURE, NODE, BONUS, LAST = range(7)  # columns of a row's line; two tokens come last
N_COLUMNS = LAST + 2
LEAST = 1e-6  # smallest probability that is told apart
MOST_EXPANDED = 64  # nodes that a step expands in all rows: with more, products are not bound by reading weights


@dataclass(frozen=True)
class Shape:
    """How trees grow."""

    lookahead: int  # K: depth of what is verified
    nodes: int  # N: nodes verified, at most
    width: int  # R: nodes of a row expanded per step; 1: a chain, if nodes is not above lookahead
    n_children: int = 8  # W: candidates kept after a node

    @property
    def depth(self) -> int:
        """D: deepest node that is ever expanded: a whole speculation below the deepest outcome."""
        return 2 * self.lookahead + 1

    @property
    def is_chain(self) -> bool:
        """Whether only the best child of a node is speculated."""
        return self.width == 1 and self.nodes <= self.lookahead

    def at(self, n_rows: int, room: int) -> "Shape":
        """The shape for so many rows, of which none has room for more nodes: less per row in a large batch, so that a
        step stays bound by reading weights; a chain where there is no room for more."""
        nodes = nodes_at(n_rows, self.nodes, self.lookahead)
        if min(nodes, room) <= self.lookahead:
            return replace(self, nodes=self.lookahead, width=1)
        return replace(self, nodes=nodes, width=max(1, min(self.width, MOST_EXPANDED // max(1, n_rows))))


class TreeDrafter(DraftTexts):
    """Grows trees with a model. Also a Proposer."""

    source = DRAFT

    def __init__(
        self,
        model: Transformer,
        kv: KVPlan,
        sampler: Sampler,
        shape: Shape,
        *,
        max_rows: int,
        n_known: int,
        n_grown: int,  # steps of growth while the target verifies; 0: none
        kernels: Kernels | None = None,
    ) -> None:
        n_slots = max_rows + 1  # the last is for padding
        after = 2 * (shape.lookahead + 1)
        super().__init__(model, kv, n_after=after, kernels=kernels, n_scratch=n_slots * (PLACES + 1))
        self._kernels, self._sampler, self._n_known, self._n_grown = kernels, sampler, n_known, n_grown
        self._shape, self.grows = shape, n_grown > 0
        device, self._padding = model.device, max_rows
        size = bucket(max_rows)
        self._is_captured = kernels is not None
        self._stream, self._graphs = SideStream(device), Graphs(device)
        self._tables = PageTables(max_rows, self.longest, kv.page_size, device)
        self._trees = Trees.empty(n_slots, min(shape.n_children, n_known), shape.depth, device)
        self._chances = Chances(min(shape.n_children, n_known), device)
        self._lines = Mirror((size, N_COLUMNS), torch.int64, device)
        self._found = Mirror((size, 1 + 4 * shape.nodes), torch.int64, device)  # is_hit; of nodes: see _return
        self._host_lines = self._lines.host.numpy()
        self._began, self._done, self._grown = Moment(device), Moment(device), Moment(device)
        self._in_flight: dict[int, list[int]] = {}  # by slot: the nodes that are being verified
        self._landing: dict[int, tuple[int, int]] = {}  # by slot: node and bonus of an outcome not yet applied
        self._requests: list[DraftRow] = []  # rows of the current call
        self.n_steps = 0  # of the last proposal

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        super().retire(slots)
        for slot in slots:
            self._in_flight.pop(slot, None)
            self._landing.pop(slot, None)

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> None:
        """Compute more of texts that are far behind."""
        with self._stream():
            super().read(rows, is_late, seconds)

    @torch.inference_mode()
    def serve(self, outcome: Outcome, wanted: Sequence[Wanted], is_prepared: bool) -> list[Wanted]:
        """Apply an outcome: what was prepared for it goes in flight. Returns the rows for which nothing was."""
        self._landing = {}
        facts = zip(outcome.slots.tolist(), outcome.accepted(), outcome.bonus.tolist(), strict=True)
        for slot, nodes, bonus in facts:
            flight = self._in_flight.get(slot)
            if flight is not None and len(nodes) <= len(flight):
                self._landing[slot] = (flight[nodes[-1]] if nodes else ROOT, bonus)
        self._in_flight = {}
        if not is_prepared:
            return list(wanted)
        asked = [(row, n) for row, n in wanted if row.request.params.prepare]
        ready = [(row, n) for row, n in asked if row.slot in self._landing and self.reserve(row)]
        if not ready:
            return list(wanted)
        shape = self._shape.at(len(ready), max(n for _, n in ready))
        found = self._run("respond", [row for row, _ in ready], self._respond, shape)
        missed = {row.slot for row, _ in wanted}
        for (row, n), (is_hit, *nodes) in zip(ready, found, strict=True):
            self.trunks[row.slot].n_computed = len(row.text) - (0 if is_hit else 2)
            if is_hit and nodes:
                self._launch(row, n, nodes, shape)
                missed.discard(row.slot)
            del self._landing[row.slot]
        return [(row, n) for row, n in wanted if row.slot in missed]

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """Grow a tree after each text, as far as the budget allows. Empty if the text is far behind or there is no
        room."""
        ready = self.ready(rows)
        tokens: dict[int, list[int]] = {}
        parents: dict[int, list[int]] = {}
        shape = self._shape.at(len(ready), lookahead)
        if ready:
            for row, (_, *found) in zip(ready, self._run("draft", ready, self._draft, shape, budget), strict=True):
                self.trunks[row.slot].n_computed = len(row.text)
                nodes = found[: 3 * lookahead]
                self._landing.pop(row.slot, None)
                self._in_flight[row.slot] = nodes[::3]
                tokens[row.slot], parents[row.slot] = nodes[1::3], nodes[2::3]
        return Proposal(
            [tokens.get(row.slot, []) for row in rows],
            parents=() if shape.is_chain else [parents.get(row.slot) for row in rows],
        )

    @torch.inference_mode()
    def prepare(
        self, rows: Sequence[DraftRow], planner: Planner | None, outcome: Outcome, is_late: Callable[[], bool]
    ) -> Prepared:
        """Grow the trees in flight until done or late. On a GPU this only launches the work."""
        rows = [row for row in rows if row.slot in self._in_flight]
        if not rows:
            return Planned.nothing()
        with self._stream():
            self._began.mark()
            size = self._write(rows)
            shape = self._shape.at(size, self._shape.nodes)
            if self._is_captured:
                self._graphs.run(("prepare", size), lambda: self._prepare(size, shape, lambda: False))
            else:
                self._prepare(size, shape, is_late)
            self._grown.mark()
        return Grown(self._began, self._grown)

    def adopt(self, hits: Sequence[tuple[DraftRow, int]]) -> list[tuple[list[int], Tensor | None]]:
        """Not used: see `serve`."""
        raise NotImplementedError("a tree is served, not adopted")

    def warm(self, size: int, planner: Planner | None) -> None:
        """Capture the functions for batches of this size, with padding rows."""
        prepares = self.grows
        with self._stream(), torch.inference_mode():
            self._host_lines[:size] = self._padding_line()
            self._lines.send(size)
            shapes = {self._shape.at(size, room) for room in (self._shape.lookahead, self._shape.nodes)}
            for shape in shapes:
                for name, function in (("draft", self._draft), ("respond", self._respond))[: 2 if prepares else 1]:
                    self._graphs.run((name, size, shape.is_chain), partial(function, size, shape, None))
            if prepares:
                shape = self._shape.at(size, self._shape.nodes)
                self._graphs.run(("prepare", size), lambda: self._prepare(size, shape, lambda: False))

    def _run(
        self,
        name: str,
        rows: Sequence[DraftRow],
        function: Callable[[int, Shape, GrowthBudget | None], None],
        shape: Shape,
        budget: GrowthBudget | None = None,
    ) -> list[list[int]]:
        """Run a function for these rows. Returns whether each was a hit, then node, token and parent by turns."""
        with self._stream():
            if name == "draft":
                self._catch_up(rows)
            size = self._write(rows)
            if self._is_captured:
                self._graphs.run((name, size, shape.is_chain), lambda: function(size, shape, None))
            else:
                function(size, shape, budget)
            self._found.fetch(len(rows))
            self._done.mark()
        self._done.wait()
        found = self._found.host[: len(rows)]
        least = math.log(max(budget.least, LEAST)) if budget is not None else NEVER
        return [[line[0], *_nodes_of(line[1:], least)] for line in found.tolist()]

    def _launch(self, row: DraftRow, n: int, nodes: list[int], shape: Shape) -> None:
        """Put a prepared tree in flight."""
        nodes = nodes[: 3 * n]
        self._in_flight[row.slot] = nodes[::3]
        row.propose(nodes[1::3], CACHE, parents=None if shape.is_chain else nodes[2::3])

    def _catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Compute each text up to its last two tokens."""
        segments = []
        for row in rows:
            trunk, end = self.trunks[row.slot], len(row.text) - 2
            if row.slot in self._landing:  # the tree has what is missing
                trunk.n_computed = max(trunk.n_computed, end)
            elif trunk.n_computed < end:
                tokens = row.text[trunk.n_computed : end]
                segments.append(Segment(tokens, trunk.n_computed, trunk.table.pages, 0))
                trunk.n_computed = end
        if segments:
            self.forward(segments)

    def _write(self, rows: Sequence[DraftRow]) -> int:
        """Send the lines of these rows. Returns the number of lines, padding included."""
        self._requests = list(rows)
        self._tables.write((row.slot, self.trunks[row.slot].table.pages) for row in rows)
        size = bucket(len(rows)) if self._is_captured else len(rows)
        lines = [self._line(row) for row in rows]
        self._host_lines[:size] = lines + [self._padding_line()] * (size - len(lines))
        self._lines.send(size)
        return size

    def _line(self, row: DraftRow) -> list[int]:
        request = row.request
        node, bonus = self._landing.get(row.slot, (NO_TREE, 0))
        facts = [row.slot, len(row.text), request.seed, float_bits(request.params.temperature), node, bonus]
        return [*facts, *([0, *row.text][-2:])]

    def _padding_line(self) -> list[int]:
        return [self._padding, 0, 0, 0, NO_TREE, 0, 0, 0]

    # What follows runs on the device, captured as a whole.

    def _draft(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Apply the outcome, start a tree after each text, grow it, and return its best nodes."""
        lines = self._lines.device[:size]
        trees = self._trees.rows(lines[:, SLOT])
        self._land(lines, trees)
        start(trees, lines[:, TEXT])
        self._first_step(lines, trees)
        self.n_steps = 1
        for step in range(1, shape.lookahead):
            if budget is not None and not budget.goes_on(self._requests, self._worth(trees).tolist()):
                break
            self.n_steps = step + 1
            self._grow(lines, trees, shape, shape.lookahead)
        self._return(lines, trees, shape, torch.zeros_like(lines[:, SLOT]))

    def _respond(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Apply the outcome: the tree below it stays. Return its best nodes."""
        lines = self._lines.device[:size]
        trees = self._trees.rows(lines[:, SLOT])
        landing = self._land(lines, trees)
        reroot(trees, landing)
        self._return(lines, trees, shape, landing.is_hit.long())

    def _prepare(self, size: int, shape: Shape, is_late: Callable[[], bool]) -> None:
        """Grow, the likeliest nodes first."""
        lines = self._lines.device[:size]
        trees = self._trees.rows(lines[:, SLOT])
        for _ in range(self._n_grown):
            self._grow(lines, trees, shape, shape.depth)
            if is_late():
                break
        self._trees.put(lines[:, SLOT], trees)

    def _land(self, lines: Tensor, trees: Trees) -> Landing:
        """Learn from the outcome, and copy the keys and values that are text now behind the text."""
        landing = land(trees, lines[:, NODE], lines[:, BONUS])
        row = torch.arange(len(lines), device=lines.device)
        last = torch.where(landing.is_hit, landing.root, landing.last)
        path = trees.path[row, last]  # [B, D]
        above = torch.cat((trees.root[:, None], trees.path[row, landing.last]), 1)  # [B, D+1]
        is_known = landing.is_tree[:, None] & (above >= 0)
        self._chances.learn(trees.bin[row[:, None], above.clamp(min=0)], landing.chosen, is_known)
        is_moved = landing.is_tree[:, None] & (path >= 0)
        sources = self._scratch_of(lines)[:, None] + path.clamp(min=0)
        old_text = trees.position[row, trees.root] + 1
        places = old_text[:, None] + torch.arange(path.shape[1], device=lines.device)
        pages = self._tables.device[lines[:, SLOT]]
        goes_to = kv_indices_at(pages, places, is_moved, self.cache.page_size)
        self.cache.move(sources.flatten(), torch.where(is_moved, goes_to, sources).flatten())
        return landing

    def _first_step(self, lines: Tensor, trees: Trees) -> None:
        """Compute the last two tokens of each text, as either may be new; the children of the root are known then."""
        n, text = len(lines), lines[:, TEXT]
        pages, steps = self._tables.device[lines[:, SLOT]], torch.arange(2, device=lines.device)
        positions = text[:, None] - 2 + steps
        kv_index = kv_indices_at(pages, positions, (positions >= 0) & (text > 0)[:, None], self.cache.page_size)
        starts = torch.arange(n + 1, dtype=torch.int32, device=lines.device) * 2
        at = torch.arange(n, device=lines.device) * 2 + 1
        flat = positions.clamp(min=0).flatten()
        step = Step(
            lines[:, LAST:].flatten(), flat, self._writable(kv_index, lines), at, pages, starts, text.int(), 2,
            self.longest,
        )  # fmt: skip
        hidden = self.runner.hidden(step)[1::2]
        ranked = self._rank(hidden, lines, text[:, None], lambda: [[[]] for _ in self._requests])
        root = torch.zeros(n, 1, dtype=torch.int64, device=lines.device)
        set_children(trees, root, root.float(), ranked)

    def _grow(self, lines: Tensor, trees: Trees, shape: Shape, depth: int) -> None:
        """Expand the likeliest nodes of each row."""
        n, width = len(lines), shape.width
        picked = pick(trees, width, depth, shape.is_chain)
        text, scratch = trees.position.gather(1, trees.root[:, None])[:, 0] + 1, self._scratch_of(lines)
        nodes = Nodes(
            texts=text.int(),
            seen=(picked.position + 1).int().flatten(),
            paths=(scratch[:, None, None] + picked.path.clamp(min=0)).int().flatten(0, 1),
        )
        starts = torch.arange(n + 1, dtype=torch.int32, device=lines.device) * width
        step = Step(
            picked.token.flatten(), picked.position.flatten(), (scratch[:, None] + picked.place).flatten(),
            starts[:0].long(), self._tables.device[lines[:, SLOT]], starts, (text + width).int(), width, self.longest,
            nodes,
        )  # fmt: skip
        hidden = self.runner.hidden(step)
        expand(trees, picked, self._rank(hidden, lines, picked.position + 1, lambda: _texts_of(trees, picked)))

    def _rank(
        self, hidden: Tensor, lines: Tensor, positions: Tensor, texts: Callable[[], list[list[list[int]]]]
    ) -> tuple[Tensor, Tensor, Tensor]:  # [B * R, D], positions [B, R] of the next tokens -> [B, R, W] each
        """The children after these hidden states: tokens, log-chances and bins."""
        n, width = positions.shape
        logits = self.runner.logits(hidden)
        heat = as_float(lines[:, TEMPERATURE])[:, None].expand(n, width)
        n_children = self._trees.token.shape[2]
        if self._kernels is not None:
            seeds = lines[:, SEED, None].expand(n, width).flatten()
            facts = (heat.flatten(), seeds, positions.flatten())
            tokens, scores = self._kernels.rank(logits, *facts, self._n_known, n_children)
        else:
            tokens, scores = self._sampler.rank(logits, self._contexts(positions, texts), n_children)
        tokens, scores = tokens.view(n, width, -1), scores.view(n, width, -1).float()
        chance, bins = self._chances(scores, heat == 0)
        return tokens, chance, bins

    def _contexts(self, positions: Tensor, texts: Callable[[], list[list[list[int]]]]) -> list[Context]:
        """The tokens before each position: only their number matters to plain requests."""
        if all(is_plain(row.request.params) for row in self._requests):
            each = zip(self._requests, positions.tolist(), strict=True)
            return [(row.request, range(at - len(row.text))) for row, ats in each for at in ats]
        each_text = zip(self._requests, texts(), strict=True)
        return [(row.request, before) for row, befores in each_text for before in befores]

    def _return(self, lines: Tensor, trees: Trees, shape: Shape, is_hit: Tensor) -> None:
        """Store the trees, and put their best nodes where the host reads them."""
        node, token, parent, score = best(trees, shape.nodes, shape.lookahead, shape.is_chain)
        bits = score.view(torch.int32).long()
        found = torch.stack((torch.where(score > NEVER, node, -1), token, parent, bits), 2).flatten(1)
        out = self._found.device[: len(lines)]
        out[:, 0] = is_hit
        out[:, 1 : 1 + found.shape[1]] = found
        out[:, 1 + found.shape[1] :] = -1
        self._trees.put(lines[:, SLOT], trees)

    def _worth(self, trees: Trees) -> Tensor:  # [B]
        """The probability that expanding each row's likeliest open node adds an accepted token, as estimated."""
        first = trees.score.masked_fill(trees.place >= 0, NEVER).flatten(1).amax(1).exp()
        best_child = trees.score[..., 0].exp()
        own = torch.where(trees.node < 0, 0, trees.score.flatten(1).gather(1, trees.node.clamp(min=0))).exp()
        is_known = best_child > 0
        usual = (best_child / own.clamp(min=LEAST) * is_known).sum(1) / is_known.sum(1).clamp(min=1)
        return first * usual

    def _scratch_of(self, lines: Tensor) -> Tensor:  # [B]
        """KV index of each row's place 0."""
        return self.scratch + lines[:, SLOT] * (PLACES + 1)

    def _writable(self, kv_index: Tensor, lines: Tensor) -> Tensor:  # [B, n] -> [B * n]
        """KV indices with those that are not written replaced by the row's unused place."""
        unused = self._scratch_of(lines)[:, None] + PLACES
        return torch.where(kv_index >= 0, kv_index, unused).flatten()


@dataclass(frozen=True)
class Grown:
    """A growth that was launched. Its outcomes are found in the trees."""

    began: Moment
    done: Moment

    def branches(self) -> dict[tuple[int, int, int], int]:
        """Always empty."""
        return {}

    def seconds(self) -> float | None:
        """Device time; None on a CPU."""
        self.done.wait()
        return self.done.since(self.began)


def _nodes_of(line: Sequence[int], least: float) -> list[int]:
    """Node, token and parent by turns, of the nodes that are there and have at least this score; at least one."""
    found: list[int] = []
    for node, token, parent, bits in zip(line[::4], line[1::4], line[2::4], line[3::4], strict=True):
        if node < 0 or (found and _as_float(bits) < least):
            break
        found += (node, token, parent)
    return found


def _as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def _texts_of(trees: Trees, picked: Picked) -> list[list[list[int]]]:  # [B][R][depth]
    """The tokens below the root on the way to each picked node, itself included."""
    found = []
    every = zip(picked.path.tolist(), picked.token.tolist(), trees.node.tolist(), trees.token, strict=True)
    for paths, tokens, nodes, children in every:
        flat = children.flatten()
        row = []
        for path, token in zip(paths, tokens, strict=True):
            above = [place for place in path if place >= 0][:-1]
            row.append([*(int(flat[nodes[place]]) for place in above), token])
        found.append(row)
    return found
