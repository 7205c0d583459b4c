"""What a drafter of trees computes on its device: draft, deepen, respond, settle, graft, prepare.

Each function is a fixed sequence of operations over tensors, so on a GPU it is captured as a whole: all steps of the
model, and the bookkeeping between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saguaro.algo import sampling
from saguaro.algo.planning import Ahead
from saguaro.algo.tree import nodes_at
from saguaro.attention.paged import kv_indices_at
from saguaro.attention.step import Nodes, Step
from saguaro.device.graphs import Mirror, as_float, bucket
from saguaro.draft.chance import KEPT, LEAST, MOST, STRENGTH, Chances
from saguaro.draft.inputs import Inputs
from saguaro.draft.last_places import LastPlaces
from saguaro.draft.planner import Planner
from saguaro.draft.planner import Shape as PlanShape
from saguaro.draft.ranking import Draws, Ranked, likeliest
from saguaro.draft.rows import DraftRow, GrowthBudget
from saguaro.draft.texts import DraftTexts
from saguaro.draft.tree import (
    AT_PLACE,
    LINEAGES,
    NEVER,
    NO_TREE,
    SURE,
    Landing,
    Picked,
    Trees,
    best,
    expand,
    follow,
    force,
    fork,
    keep_best,
    keep_chain,
    land,
    pick,
    reroot,
    start,
    walk,
)
from saguaro.kernels import native_grow
from saguaro.kernels.bundle import Kernels, tree_kernels_for
from saguaro.kv.tables import PageTables
from saguaro.target.sampler import Context, Sampler, is_plain, rules

# Columns of a row's line. TEXT: places of the text; SHIFT: its tokens without a place; NEW: the first place that is
# written. From FLIGHT on: K tokens in flight that no tree proposed, then the last tokens of the text.
SLOT, TEXT, SHIFT, NEW, SEED, TEMPERATURE, NODE, BONUS, IS_PRIMARY, LENGTH, FLIGHT = range(11)
MOST_EXPANDED = 64  # nodes that a step expands in all rows: with more, products are not bound by reading weights

Befores = list[list[list[int]]]  # [B][R]: the tokens below the root before each of R nodes of each row


@dataclass(frozen=True)
class Shape:
    """How trees grow."""

    lookahead: int  # K: depth of what is verified
    nodes: int  # N: nodes verified, at most
    width: int  # R: nodes of a row expanded per step; 1: a chain, if nodes is not above lookahead
    budget: int = 0  # M: nodes of a row expanded per step while the target verifies; 0: none
    n_children: int = 8  # W: candidates kept after a node
    n_text: int = 2  # last tokens of the text that are computed first: those that may be new
    steps: int | None = None  # of a draft, at most; None: as many as the lookahead

    @property
    def most_text(self) -> int:
        """Most tokens of a text that may be new, of a row that is drafted for."""
        return 2 * (self.lookahead + 1)

    @property
    def depth(self) -> int:
        """D: deepest node that is ever expanded: a whole speculation below the deepest outcome."""
        return 2 * self.lookahead + 1

    @property
    def most_steps(self) -> int:
        """Most steps of a draft."""
        return self.lookahead if self.steps is None else min(self.steps, self.lookahead)

    @property
    def places(self) -> int:
        """P: most expanded nodes of a row: the root, those of a draft, those prepared, and those that are grown further
        below a prepared outcome."""
        drafted = self.width * self.lookahead * (2 if self.budget else 1)
        return 1 + drafted + self.budget * (self.lookahead + 1)

    @property
    def kept(self) -> int:
        """Most expanded nodes that leave room for those prepared next."""
        return self.places - self.budget * (self.lookahead + 1)

    @property
    def is_chain(self) -> bool:
        """Whether only the best child of a node is speculated."""
        return self.width == 1 and self.nodes <= self.lookahead

    def at(self, n_rows: int, room: int) -> "Shape":
        """The shape for so many rows, of which none has room for more nodes: less per row in a large batch, so that a
        step stays bound by reading weights; a chain where there is no room for more."""
        nodes, most = nodes_at(n_rows, self.nodes, self.lookahead), max(1, MOST_EXPANDED // max(1, n_rows))
        budget = min(self.budget, most)
        if min(nodes, room) <= self.lookahead:
            return replace(self, nodes=self.lookahead, width=1, budget=budget)
        return replace(self, nodes=nodes, width=min(self.width, most), budget=budget)


@dataclass(frozen=True)
class _Rows:
    """The rows of a call."""

    lines: Tensor  # [B, columns]
    trees: Trees  # copies of these rows' trees, or all trees
    which: Tensor  # [B] int64: the tree of each row
    pages: Tensor  # [B, P]
    scratch: Tensor  # [B] int64: KV index of place 0
    temperature: Tensor  # [B] float32


@dataclass(frozen=True)
class _Computed:
    """Nodes to compute, with what a step needs to know of them."""

    picked: Picked
    kv_index: Tensor  # [B, R] int64
    seen: Tensor  # [B, R] int32: keys that a node sees
    paths: Tensor  # [B, R, D] int32: KV indices of its path


class Growth:
    """The trees of all slots, and the functions that change them."""

    def __init__(
        self,
        texts: DraftTexts,
        inputs: Inputs,
        sampler: Sampler,
        shape: Shape,
        *,
        max_rows: int,
        n_known: int,
        planner: Planner | None,
        draws: Draws | None,
        kernels: Kernels | None,
    ) -> None:
        """texts must have P + 1 places of scratch memory for each row and one more. planner: chooses what is prepared;
        None: the likeliest nodes. draws: children are drawn (see draft/tree.py for what that asks for); None: they are
        the best."""
        self._runner, self._cache, self._longest = texts.runner, texts.cache, texts.longest
        self._inputs = inputs
        self._scratch, self._kernels, self._sampler, self._n_known = texts.scratch, kernels, sampler, n_known
        device, size = self._cache.device, bucket(max_rows)
        self._by = tree_kernels_for(device, kernels)
        self._planner, self._draws, self._laws = planner, draws, torch.empty(0)
        self._draws_trees, self._kept = draws is not None and not shape.is_chain, shape.kept
        self._width = min(shape.n_children, n_known)
        n_slots = max_rows + 1  # the last is for padding
        self.trees = Trees.empty(n_slots, shape.places, self._width, shape.depth, device)
        self.chances = Chances(self._width, device)
        self.tables = PageTables(max_rows, texts.longest, self._cache.page_size, device)
        self.lines = Mirror((size, FLIGHT + shape.lookahead + shape.most_text), torch.int64, device)
        self.found = Mirror((size, 1 + 4 * shape.nodes), torch.int64, device)  # is_hit; of nodes: see _return
        self.requests: Sequence[DraftRow] = ()  # rows of the current call
        self.n_steps = 0  # of the last draft

    def draft(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Apply the outcome, start a tree after each text, grow it, and return its best nodes."""
        rows = self._rows(size, is_copied=self._by is None)
        self._land(rows, is_moved=self._inputs.nodes_are_text)
        picked, fan_out = start(rows.trees, rows.which, rows.lines[:, TEXT]), self._fan_out(shape)[0]
        ranked = self._compute_text(rows, shape.n_text, picked, fan_out[:1])
        self.n_steps = 1
        self._grow_below(rows, (picked, ranked), shape, budget, fan_out)
        self._return(rows, shape, None)
        self._store(rows)

    def deepen(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Go on growing trees of which a part was prepared, and return their best nodes."""
        rows = self._rows(size, is_copied=self._by is None)
        self.n_steps = 0
        self._grow_below(rows, None, shape, budget, self._fan_out(shape)[0])
        self._return(rows, shape, None)
        self._store(rows)

    def respond(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Return the best nodes below the outcome. The target waits for these, so the trees are changed by `settle`."""
        if self._by is not None and not self._draws_trees:
            rows = self._rows(size, is_copied=False)
            self._return(rows, shape, self._find(rows))
            return
        rows = self._rows(size)
        landing = self._find(rows)
        self._keep_below(rows, landing)
        self._return(rows, shape, replace(landing, root=rows.trees.root))

    def settle(self, size: int) -> None:
        """Apply the outcome: what is below it stays."""
        rows = self._rows(size)
        self._keep_below(rows, self._land(rows))
        self._store(rows)

    def _keep_below(self, rows: _Rows, landing: Landing) -> None:
        reroot(rows.trees, landing)
        if self._planner is not None:  # what it did not plan is not prepared
            keep_chain(rows.trees)
        elif self._draws_trees:  # or nodes could lack a place, depending on the tokens of nodes after them
            keep_best(rows.trees, self._kept)

    def graft(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Start a tree after each text that holds the tokens in flight, which another proposer drafted: at the places
        1, 2, 3 ..."""
        rows = self._rows(size)
        self._land(rows, is_moved=self._inputs.nodes_are_text)
        picked = start(rows.trees, rows.which, rows.lines[:, TEXT])
        self._put(rows, picked, self._compute_text(rows, shape.n_text, picked, None))
        above = rows.trees.root
        for k in range(shape.lookahead):
            is_wanted = rows.lines[:, LENGTH] > k
            picked = force(rows.trees, above, rows.lines[:, FLIGHT + k], is_wanted)
            self._put_computed(rows, picked, None)
            above = torch.where(is_wanted, picked.place[:, 0], above)
        self._store(rows)

    def prepare(self, size: int, shape: Shape, is_late: Callable[[], bool]) -> None:
        """Grow while the target verifies: the likeliest nodes first, or chains after the outcomes that are planned."""
        rows = self._rows(size)
        if self._planner is None:
            self._grow(rows, shape, is_late)
        else:
            self._branch(rows, shape, self._planner, is_late)
        self._store(rows)

    def laws(self, slot: int, nodes: Sequence[int]) -> Tensor | None:  # [F, V]
        """The distributions that the families of these nodes were drawn from (algo/tree.py); None: shared noise."""
        if self._draws is None:
            return None
        return self._laws[slot, list(dict.fromkeys(node // self._width for node in nodes))].cpu()

    def _grow_below(
        self,
        rows: _Rows,
        before: tuple[Picked, Ranked] | None,
        shape: Shape,
        budget: GrowthBudget | None,
        fan_out: Tensor,  # [K+1]
    ) -> None:
        """Put the nodes just computed into the trees, and grow what is verified next, as far as the budget allows."""
        while self.n_steps < shape.most_steps:
            computed = self._next(rows, before, shape, shape.lookahead, budget, shape.is_chain)
            if computed is None:
                return
            at = self.n_steps
            before = computed.picked, self._compute(rows, computed, fan_out[at : at + 1])
            self.n_steps += 1
        if before is not None:
            self._put(rows, *before)

    def _grow(self, rows: _Rows, shape: Shape, is_late: Callable[[], bool]) -> None:
        before: tuple[Picked, Ranked] | None = None
        wide = replace(shape, width=shape.budget)
        for fan_out in self._fan_out(shape)[1].split(1):
            computed = self._next(rows, before, wide, shape.depth, None, is_chain=False)
            if computed is None:
                return
            before = computed.picked, self._compute(rows, computed, fan_out)
            if is_late():
                break
        if before is not None:
            self._put(rows, *before)

    def _branch(self, rows: _Rows, shape: Shape, planner: Planner, is_late: Callable[[], bool]) -> None:
        trees, tokens = rows.trees, rows.lines[:, FLIGHT : FLIGHT + shape.lookahead]
        flight = self._walk(rows, tokens)
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        known = row, flight.clamp(min=0)
        is_known = (trees.score[known] > NEVER) & (flight >= 0)[..., None]
        slots, length, is_primary = rows.lines[:, SLOT], rows.lines[:, LENGTH], rows.lines[:, IS_PRIMARY] > 0
        plan = planner.plan(Ahead(slots, tokens, length, trees.token[known], is_known, is_primary), shape.budget)
        above = torch.where(plan.k >= 0, flight.gather(1, plan.k.clamp(min=0)), -1)
        picked = fork(trees, above, plan.token)
        for fan_out in self._fan_out(shape)[1, : shape.lookahead].split(1):
            if self._put_computed(rows, picked, fan_out) or is_late():
                break
            picked = follow(trees, picked)

    def _put_computed(self, rows: _Rows, picked: Picked, fan_out: Tensor | None) -> bool:
        """Compute nodes and put them into the trees. True if there are none, which captured code never sees."""
        computed = self._computed(rows, picked)
        if computed is not None:
            self._put(rows, computed.picked, self._compute(rows, computed, fan_out))
        return computed is None

    def _walk(self, rows: _Rows, tokens: Tensor) -> Tensor:  # [B, K] -> [B, K+1]
        """The places of the root and of the tokens in flight. The last token in flight is computed here if no step has
        computed it: its children are candidates for the bonus only."""
        trees, length = rows.trees, rows.lines[:, LENGTH]
        flight, before = walk(trees, tokens, length), (length - 1).clamp(min=0)[:, None]
        above = flight.gather(1, before)[:, 0]
        is_behind = (length > 0) & (above >= 0) & (flight.gather(1, length[:, None])[:, 0] < 0)
        picked = force(trees, above.clamp(min=0), tokens.gather(1, before)[:, 0], is_behind)
        self._put_computed(rows, picked, None)
        return walk(trees, tokens, length)

    def _fan_out(self, shape: Shape) -> Tensor:  # [2, K+1] int64
        """How many bonus tokens are prepared at each position: after a draft, and after a hit."""
        device = self._cache.device
        if self._planner is None:
            each = max(1, round(shape.budget / (shape.lookahead + 1)))
            return torch.full((2, shape.lookahead + 1), each, device=device)
        return self._planner.fan_out(PlanShape(shape.lookahead, self._width, shape.budget, device))

    def _rows(self, size: int, is_copied: bool = True) -> _Rows:
        lines = self.lines.device[:size]
        slots, temperature = lines[:, SLOT].contiguous(), as_float(lines[:, TEMPERATURE]).contiguous()
        scratch = self._scratch + slots * (self.trees.unused + 1)
        trees, which = self.trees, slots
        if is_copied:
            trees, which = self.trees.rows(slots), torch.arange(size, device=slots.device)
        return _Rows(lines, trees, which, self.tables.device[slots], scratch, temperature)

    def _store(self, rows: _Rows) -> None:
        """Keep the trees of these rows, if they are copies."""
        if rows.trees is not self.trees:
            self.trees.put(rows.lines[:, SLOT], rows.trees)

    def _find(self, rows: _Rows) -> Landing:
        """Where the outcomes lead."""
        node, bonus, trees = rows.lines[:, NODE], rows.lines[:, BONUS], rows.trees
        if self._by is None:
            return land(trees, node, bonus)
        return Landing(*self._by.land(trees.without_root, trees.root, rows.which, node, bonus, (NO_TREE, AT_PLACE)))

    def _land(self, rows: _Rows, is_moved: bool = True) -> Landing:
        """Learn from the outcome, and copy the keys and values that are text now behind the text if is_moved; else the
        text is computed anew."""
        trees, row, landing = rows.trees, rows.which, self._find(rows)
        if self._kernels is None and self._by is not None:
            landed = (landing.is_tree, landing.is_hit, landing.root, landing.last, landing.chosen)
            sources, goes_to = native_grow.settle(
                trees.without_root, trees.root, row, landed, self.chances.counts, self.chances.rates,
                (KEPT, STRENGTH), rows.scratch, rows.pages, self._cache.page_size,
            )  # fmt: skip
            if is_moved and len(sources):
                self._cache.move(sources, goes_to)
            return landing
        last = torch.where(landing.is_hit, landing.root, landing.last)
        path = trees.path[row, last]  # [B, D]
        root = trees.root[row]
        above = torch.cat((root[:, None], trees.path[row, landing.last]), 1)  # [B, D+1]
        known = row[:, None], above.clamp(min=0)
        is_trial = (landing.is_tree[:, None] & (above >= 0))[..., None] & (trees.score[known] > NEVER)
        self.chances.learn(trees.bin[known], landing.chosen, is_trial)
        if not is_moved:
            return landing
        is_text = landing.is_tree[:, None] & (path >= 0)
        sources = rows.scratch[:, None] + path.clamp(min=0)
        old_text = trees.position[row, root] + 1
        places = old_text[:, None] + torch.arange(path.shape[1], device=path.device)
        goes_to = kv_indices_at(rows.pages, places, is_text, self._cache.page_size)
        self._cache.move(sources.flatten(), torch.where(is_text, goes_to, sources).flatten())
        return landing

    def _next(
        self,
        rows: _Rows,
        before: tuple[Picked, Ranked] | None,
        shape: Shape,
        depth: int,
        budget: GrowthBudget | None,
        is_chain: bool,
    ) -> _Computed | None:
        """Put the nodes just computed into the trees, and pick the next ones; None if the budget is spent, or if there
        are none, which captured code never sees."""
        if self._kernels is not None and self._by is not None:
            return self._advance(rows, before, shape.width, depth, is_chain)
        if before is not None:
            self._put(rows, *before)
        if budget is not None and not budget.goes_on(self.requests, self._worth(rows.trees, rows.which)):
            return None
        if self._by is None:
            return self._computed(rows, pick(rows.trees, shape.width, depth, is_chain))
        computed = self._advance(rows, None, shape.width, depth, is_chain)
        return computed if computed is not None and computed.kv_index.numel() else None

    def _computed(self, rows: _Rows, picked: Picked) -> _Computed | None:
        """What a step needs to know of these nodes; None if there are none, which captured code never sees."""
        if self._kernels is None:
            picked = picked.without_padding()
            if not picked.place.numel():
                return None
        return _Computed(
            picked,
            kv_index=rows.scratch[:, None] + picked.place,
            seen=(picked.position + 1).int(),
            paths=(rows.scratch[:, None, None] + picked.path.clamp(min=0)).int(),
        )

    def _put(self, rows: _Rows, picked: Picked, ranked: Ranked) -> None:
        """Put computed nodes into the trees."""
        if self._by is not None:
            self._advance(rows, (picked, ranked), 0, 0, is_chain=False)
            return
        tokens, scores = (each.view(*picked.place.shape, -1) for each in ranked)
        chance, bins = self.chances(scores.float(), (rows.temperature == 0)[:, None])
        if self._draws_trees:
            chance = chance.cummin(-1).values
        expand(rows.trees, picked, (tokens, chance, bins))

    def _advance(
        self, rows: _Rows, before: tuple[Picked, Ranked] | None, n: int, depth: int, is_chain: bool
    ) -> _Computed | None:
        """`_put` and `pick` in one kernel."""
        assert self._by is not None
        trees, nodes = rows.trees, None
        if before is not None:
            old = before[0]
            nodes = (old.index, old.is_real, old.place, old.position, old.depth, old.path, old.score)
        ranked = before[1] if before is not None else None
        found = self._by.advance(
            trees.without_root, nodes, ranked, self.chances.table, trees.root, rows.which, rows.temperature,
            rows.scratch, (LEAST, MOST, SURE), LINEAGES, n, depth, is_chain, self._draws_trees,
        )  # fmt: skip
        return None if found is None else _Computed(Picked(*found[:8]), *found[8:])

    def _compute_text(self, rows: _Rows, n: int, picked: Picked, fan_out: Tensor | None) -> Ranked:
        """Compute the last n tokens of each text. Returns the children of the last, which is picked."""
        lines, unused = rows.lines, rows.scratch + self.trees.unused
        facts = (lines[:, SLOT], lines[:, TEXT], lines[:, SHIFT], lines[:, NEW])
        step = LastPlaces(lines[:, -n:], *facts, rows.pages, unused).step(
            self._inputs, self._cache.page_size, self._longest
        )
        hidden = self._runner.hidden(step)[n - 1 :: n]
        self._inputs.keep(lines[:, SLOT], picked.place, hidden)
        return self._rank(rows, hidden, picked, fan_out, lambda: [[[]] for _ in self.requests])

    def _compute(self, rows: _Rows, nodes: _Computed, fan_out: Tensor | None) -> Ranked:
        """Compute nodes. Returns their children; fan_out: see _rank."""
        picked, trees = nodes.picked, rows.trees
        n, width = picked.place.shape
        text = trees.position[rows.which, trees.root[rows.which]] + 1
        starts = torch.arange(n + 1, dtype=torch.int32, device=text.device) * width
        slots, rotary = rows.lines[:, SLOT], self._inputs.rotary(picked.position, rows.lines[:, SHIFT])
        step = Step(
            picked.token.flatten(), rotary.flatten(), nodes.kv_index.flatten(), starts[:0].long(), rows.pages,
            starts, (text + width).int(), width, self._longest,
            Nodes(text.int(), nodes.seen.flatten(), nodes.paths.flatten(0, 1)),
            features=self._inputs.of_nodes(slots, picked.index // self._width),
        )  # fmt: skip
        hidden = self._runner.hidden(step)
        self._inputs.keep(slots, picked.place, hidden)
        return self._rank(rows, hidden, picked, fan_out, lambda: _texts_of(trees, rows.which, picked))

    def _rank(
        self, rows: _Rows, hidden: Tensor, picked: Picked, fan_out: Tensor | None, befores: Callable[[], Befores]
    ) -> Ranked:
        """The children of the picked nodes, which have these hidden states [B * R, D]. fan_out [1]: how many tokens of
        their position are prepared as a bonus; None: their children are bonus tokens, and no sample is needed."""
        logits = self._runner.logits(hidden)
        positions = self._inputs.positions(picked.position + 1, rows.lines[:, SHIFT])
        if self._kernels is None:
            contexts = self._contexts(positions, befores)
            if self._draws is None:
                return self._sampler.rank(logits, contexts, self._width)
            logits, each = self._sampler.shape(logits, contexts), rules(contexts, logits.device)
            q, noise = sampling.probabilities(logits, each), (each.seeds, each.positions)
        else:
            temperature, seeds, at = rows.temperature, rows.lines[:, SEED], positions.flatten()
            if self._draws is None:
                return self._kernels.rank(logits, temperature, seeds, at, self._n_known, self._width)
            temperature, seeds = (each[:, None].expand_as(positions).flatten() for each in (temperature, seeds))
            q, noise = sampling.at_temperature(logits[:, : self._n_known], temperature), (seeds, at)
        return self._draw(rows, picked, fan_out, logits[:, : self._n_known], q[:, : self._n_known], noise)

    def _draw(
        self,
        rows: _Rows,
        picked: Picked,
        fan_out: Tensor | None,
        logits: Tensor,  # [B * R, V]
        q: Tensor,  # [B * R, V]
        noise: tuple[Tensor, Tensor],
    ) -> Ranked:
        """Children drawn from q. Their distribution is kept: zero if they were not drawn."""
        assert self._draws is not None
        if fan_out is None:
            ranked, law = likeliest(logits, self._width), torch.zeros_like(q)
        else:
            ranked, law = self._draws(logits, q, noise, self._width, fan_out)
        if not self._laws.numel():
            self._laws = q.new_empty(*self.trees.is_used.shape, q.shape[1])
        self._laws[rows.lines[:, SLOT, None], picked.place] = law.view(*picked.place.shape, -1)
        return ranked

    def _contexts(self, positions: Tensor, befores: Callable[[], Befores]) -> list[Context]:
        """The tokens before each position: only their number matters to plain requests."""
        if all(is_plain(row.request.params) for row in self.requests):
            each = zip(self.requests, positions.tolist(), strict=True)
            return [(row.request, range(at - len(row.text))) for row, ats in each for at in ats]
        each_row = zip(self.requests, befores(), strict=True)
        return [(row.request, before) for row, own in each_row for before in own]

    def _return(self, rows: _Rows, shape: Shape, landing: Landing | None) -> None:
        """Put the best nodes where the host reads them: node, token, parent, bits of the score; node -1: no more.
        landing: nodes below its roots, of rows that hit; trees that are copies are re-rooted already."""
        out, trees = self.found.device[: len(rows.lines)], rows.trees
        out[:, 0] = 0 if landing is None else landing.is_hit
        out[:, 1 + 4 * shape.nodes :] = -1
        if self._by is not None:
            root, is_shown = trees.root[rows.which], torch.ones_like(rows.which, dtype=torch.bool)
            if landing is not None:
                root, is_shown = landing.root, landing.is_hit
            self._by.show(
                trees.without_root, root, rows.which, is_shown, shape.nodes, shape.lookahead, shape.is_chain, out[:, 1:]
            )
            return
        node, token, parent, score = best(rows.trees, shape.nodes, shape.lookahead, shape.is_chain)
        bits = score.view(torch.int32).long()
        found = torch.stack((torch.where(score > NEVER, node, -1), token, parent, bits), 2).flatten(1)
        out[:, 1 : 1 + found.shape[1]] = found

    def _worth(self, trees: Trees, which: Tensor) -> list[float]:  # [B]
        """The probability that expanding each row's likeliest open node adds an accepted token, as estimated."""
        if self._kernels is None and self._by is not None:
            return native_grow.worth(trees.without_root, trees.root, which, self._draws_trees, LEAST)
        is_open = trees.score.masked_fill(trees.place >= 0, NEVER).flatten(1)
        if self._draws_trees:  # may depend on the first open node only (draft/tree.py): the usual chance on its path
            score, node = is_open.max(1)
            depth = trees.depth.gather(1, node[:, None] // self._width)[:, 0] + 1
            return (score + score / depth).exp().tolist()
        first = is_open.amax(1).exp()
        best_child = trees.score[..., 0].exp()
        own = torch.where(trees.node < 0, 0, trees.score.flatten(1).gather(1, trees.node.clamp(min=0))).exp()
        is_known = best_child > 0
        usual = (best_child / own.clamp(min=LEAST) * is_known).sum(1) / is_known.sum(1).clamp(min=1)
        return (first * usual).tolist()


def _texts_of(trees: Trees, which: Tensor, picked: Picked) -> Befores:
    """The tokens below the root on the way to each picked node, itself included."""
    found = []
    nodes_of, tokens_of = trees.node[which].tolist(), trees.token[which]
    every = zip(picked.path.tolist(), picked.token.tolist(), nodes_of, tokens_of, strict=True)
    for paths, tokens, nodes, children in every:
        flat = children.flatten()
        row = []
        for path, token in zip(paths, tokens, strict=True):
            above = [place for place in path if place >= 0][:-1]
            row.append([*(int(flat[nodes[place]]) for place in above), token])
        found.append(row)
    return found
