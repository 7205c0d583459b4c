"""What a drafter of trees computes on its device. Each function is a fixed sequence of operations over tensors, so on a
GPU it is captured as a whole: all steps of the model, and the bookkeeping between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saguaro.algo.tree import nodes_at
from saguaro.attention.paged import kv_indices_at
from saguaro.attention.step import Nodes, Step
from saguaro.device.graphs import Mirror, as_float, bucket
from saguaro.draft.chance import LEAST, MOST, Chances
from saguaro.draft.rows import DraftRow, GrowthBudget
from saguaro.draft.texts import DraftTexts
from saguaro.draft.tree import (
    NEVER,
    PLACES,
    SURE,
    Landing,
    Picked,
    Trees,
    best,
    expand,
    force,
    land,
    pick,
    reroot,
    start,
)
from saguaro.kernels.bundle import Kernels
from saguaro.kv.tables import PageTables
from saguaro.target.graphed import noise_of
from saguaro.target.sampler import Context, Sampler, is_plain

# Columns of a row's line. From FLIGHT on: K tokens in flight that no tree proposed, then the last tokens of the text.
SLOT, TEXT, SEED, TEMPERATURE, NODE, BONUS, LENGTH, FLIGHT = range(8)
MOST_EXPANDED = 64  # nodes that a step expands in all rows: with more, products are not bound by reading weights

Ranked = tuple[Tensor, Tensor]  # [B * R, W] each: tokens and scores of children, best first


@dataclass(frozen=True)
class Shape:
    """How trees grow."""

    lookahead: int  # K: depth of what is verified
    nodes: int  # N: nodes verified, at most
    width: int  # R: nodes of a row expanded per step; 1: a chain, if nodes is not above lookahead
    n_children: int = 8  # W: candidates kept after a node
    n_text: int = 2  # last tokens of the text that are computed first: those that may be new

    @property
    def most_text(self) -> int:
        """Most tokens of a text that may be new, of a row that is drafted for."""
        return 2 * (self.lookahead + 1)

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


@dataclass(frozen=True)
class _Rows:
    """The rows of a call."""

    lines: Tensor  # [B, columns]
    trees: Trees
    pages: Tensor  # [B, P]
    scratch: Tensor  # [B] int64: KV index of place 0
    heat: Tensor  # [B] float32: temperature


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
        sampler: Sampler,
        shape: Shape,
        *,
        max_rows: int,
        n_known: int,
        kernels: Kernels | None,
    ) -> None:
        """texts must have PLACES + 1 places of scratch memory for each row and one more."""
        self._runner, self._cache, self._longest = texts.runner, texts.cache, texts.longest
        self._scratch, self._kernels, self._sampler, self._n_known = texts.scratch, kernels, sampler, n_known
        device, size = self._cache.device, bucket(max_rows)
        self._width = min(shape.n_children, n_known)
        self.trees = Trees.empty(max_rows + 1, self._width, shape.depth, device)  # the last slot is for padding
        self._chances = Chances(self._width, device)
        self.tables = PageTables(max_rows, texts.longest, self._cache.page_size, device)
        self.lines = Mirror((size, FLIGHT + shape.lookahead + shape.most_text), torch.int64, device)
        self.found = Mirror((size, 1 + 4 * shape.nodes), torch.int64, device)  # is_hit; of nodes: see _return
        self.requests: Sequence[DraftRow] = ()  # rows of the current call
        self.n_steps = 0  # of the last draft

    def draft(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Apply the outcome, start a tree after each text, grow it, and return its best nodes."""
        rows = self._rows(size)
        self._land(rows)
        picked = start(rows.trees, rows.lines[:, TEXT])
        ranked = self._compute_text(rows, shape.n_text)
        self.n_steps = 1
        while self.n_steps < shape.lookahead:
            computed = self._next(rows, (picked, ranked), shape, shape.lookahead, budget, shape.is_chain)
            if computed is None:
                break
            picked, ranked = computed.picked, self._compute(rows, computed)
            self.n_steps += 1
        else:
            self._put(rows, picked, ranked)
        self._return(rows, shape, torch.zeros_like(rows.lines[:, SLOT]))

    def respond(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Apply the outcome: the tree below it stays. Return its best nodes."""
        rows = self._rows(size)
        landing = self._land(rows)
        reroot(rows.trees, landing)
        self._return(rows, shape, landing.is_hit.long())

    def graft(self, size: int, shape: Shape, budget: GrowthBudget | None) -> None:
        """Start a tree after each text, along the tokens in flight: they are put at the places 1, 2, 3 ..."""
        rows = self._rows(size)
        self._land(rows)
        self._put(rows, start(rows.trees, rows.lines[:, TEXT]), self._compute_text(rows, shape.n_text))
        above = rows.trees.root
        for k in range(shape.lookahead):
            is_wanted = rows.lines[:, LENGTH] > k
            picked = force(rows.trees, above, rows.lines[:, FLIGHT + k], is_wanted)
            self._put(rows, picked, self._compute(rows, self._computed(rows, picked)))
            above = torch.where(is_wanted, picked.place[:, 0], above)
        self.trees.put(rows.lines[:, SLOT], rows.trees)

    def prepare(self, size: int, shape: Shape, n_steps: int, is_late: Callable[[], bool]) -> None:
        """Grow, the likeliest nodes first."""
        rows = self._rows(size)
        before: tuple[Picked, Ranked] | None = None
        for _ in range(n_steps):
            computed = self._next(rows, before, shape, shape.depth, None, is_chain=False)
            assert computed is not None
            before = computed.picked, self._compute(rows, computed)
            if is_late():
                break
        if before is not None:
            self._put(rows, *before)
        self.trees.put(rows.lines[:, SLOT], rows.trees)

    def _rows(self, size: int) -> _Rows:
        lines = self.lines.device[:size]
        slots, heat = lines[:, SLOT], as_float(lines[:, TEMPERATURE])
        scratch = self._scratch + slots * (PLACES + 1)
        return _Rows(lines, self.trees.rows(slots), self.tables.device[slots], scratch, heat)

    def _land(self, rows: _Rows) -> Landing:
        """Learn from the outcome, and copy the keys and values that are text now behind the text."""
        lines, trees = rows.lines, rows.trees
        landing = land(trees, lines[:, NODE], lines[:, BONUS])
        row = torch.arange(len(lines), device=lines.device)
        last = torch.where(landing.is_hit, landing.root, landing.last)
        path = trees.path[row, last]  # [B, D]
        above = torch.cat((trees.root[:, None], trees.path[row, landing.last]), 1)  # [B, D+1]
        known = row[:, None], above.clamp(min=0)
        is_trial = (landing.is_tree[:, None] & (above >= 0))[..., None] & (trees.score[known] > NEVER)
        self._chances.learn(trees.bin[known], landing.chosen, is_trial)
        is_moved = landing.is_tree[:, None] & (path >= 0)
        sources = rows.scratch[:, None] + path.clamp(min=0)
        old_text = trees.position[row, trees.root] + 1
        places = old_text[:, None] + torch.arange(path.shape[1], device=lines.device)
        goes_to = kv_indices_at(rows.pages, places, is_moved, self._cache.page_size)
        self._cache.move(sources.flatten(), torch.where(is_moved, goes_to, sources).flatten())
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
        """Put the nodes just computed into the trees, and pick the next ones; None if the budget is spent."""
        if self._kernels is not None and self._kernels.advance is not None:
            return self._advance(rows, before, shape.width, depth, is_chain)
        if before is not None:
            self._put(rows, *before)
        if budget is not None and not budget.goes_on(self.requests, self._worth(rows.trees).tolist()):
            return None
        return self._computed(rows, pick(rows.trees, shape.width, depth, is_chain))

    def _computed(self, rows: _Rows, picked: Picked) -> _Computed:
        return _Computed(
            picked,
            kv_index=rows.scratch[:, None] + picked.place,
            seen=(picked.position + 1).int(),
            paths=(rows.scratch[:, None, None] + picked.path.clamp(min=0)).int(),
        )

    def _put(self, rows: _Rows, picked: Picked, ranked: Ranked) -> None:
        """Put computed nodes into the trees."""
        if self._kernels is not None and self._kernels.advance is not None:
            self._advance(rows, (picked, ranked), 0, 0, is_chain=False)
            return
        tokens, scores = (each.view(*picked.place.shape, -1) for each in ranked)
        chance, bins = self._chances(scores.float(), (rows.heat == 0)[:, None])
        expand(rows.trees, picked, (tokens, chance, bins))

    def _advance(
        self, rows: _Rows, before: tuple[Picked, Ranked] | None, n: int, depth: int, is_chain: bool
    ) -> _Computed | None:
        """`_put` and `pick` in one kernel."""
        assert self._kernels is not None
        assert self._kernels.advance is not None
        trees, nodes = rows.trees, None
        if before is not None:
            old = before[0]
            nodes = (old.index, old.is_real, old.place, old.position, old.depth, old.path, old.score)
        tensors = (trees.token, trees.score, trees.bin, trees.place, trees.node, trees.position, trees.depth)
        ranked = before[1] if before is not None else None
        found = self._kernels.advance(
            (*tensors, trees.path, trees.is_used), nodes, ranked, self._chances.table, trees.root, rows.heat,
            rows.scratch, (LEAST, MOST, SURE), n, depth, is_chain,
        )  # fmt: skip
        return None if found is None else _Computed(Picked(*found[:8]), *found[8:])

    def _compute_text(self, rows: _Rows, n: int) -> Ranked:
        """Compute the last n tokens of each text. Returns the children of the last."""
        text = rows.lines[:, TEXT]
        device = text.device
        positions = text[:, None] - n + torch.arange(n, device=device)
        is_real = (positions >= 0) & (text > 0)[:, None]
        kv_index = kv_indices_at(rows.pages, positions, is_real, self._cache.page_size)
        kv_index = torch.where(is_real, kv_index, rows.scratch[:, None] + PLACES)  # the unused place
        starts = torch.arange(len(text) + 1, dtype=torch.int32, device=device) * n
        step = Step(
            rows.lines[:, -n:].flatten(), positions.clamp(min=0).flatten(), kv_index.flatten(),
            starts[:0].long(), rows.pages, starts, text.int(), n, self._longest,
        )  # fmt: skip
        hidden = self._runner.hidden(step)[n - 1 :: n]
        return self._rank(rows, hidden, text[:, None], lambda: [[[]] for _ in self.requests])

    def _compute(self, rows: _Rows, nodes: _Computed) -> Ranked:
        """Compute nodes. Returns their children."""
        picked, trees = nodes.picked, rows.trees
        n, width = picked.place.shape
        text = trees.position.gather(1, trees.root[:, None])[:, 0] + 1
        starts = torch.arange(n + 1, dtype=torch.int32, device=text.device) * width
        step = Step(
            picked.token.flatten(), picked.position.flatten(), nodes.kv_index.flatten(), starts[:0].long(), rows.pages,
            starts, (text + width).int(), width, self._longest,
            Nodes(text.int(), nodes.seen.flatten(), nodes.paths.flatten(0, 1)),
        )  # fmt: skip
        return self._rank(rows, self._runner.hidden(step), picked.position + 1, lambda: _texts_of(trees, picked))

    def _rank(
        self, rows: _Rows, hidden: Tensor, positions: Tensor, texts: Callable[[], list[list[list[int]]]]
    ) -> Ranked:
        """The best children after these hidden states [B * R, D], for tokens at these positions [B, R]."""
        logits = self._runner.logits(hidden)
        if self._kernels is None:
            return self._sampler.rank(logits, self._contexts(positions, texts), self._width)
        noise = noise_of(rows.lines[:, TEMPERATURE], rows.lines[:, SEED], positions.shape[1])
        return self._kernels.rank(logits, *noise, positions.flatten(), self._n_known, self._width)

    def _contexts(self, positions: Tensor, texts: Callable[[], list[list[list[int]]]]) -> list[Context]:
        """The tokens before each position: only their number matters to plain requests."""
        if all(is_plain(row.request.params) for row in self.requests):
            each = zip(self.requests, positions.tolist(), strict=True)
            return [(row.request, range(at - len(row.text))) for row, ats in each for at in ats]
        each_text = zip(self.requests, texts(), strict=True)
        return [(row.request, before) for row, befores in each_text for before in befores]

    def _return(self, rows: _Rows, shape: Shape, is_hit: Tensor) -> None:
        """Store the trees, and put their best nodes where the host reads them: node, token, parent, bits of the score;
        node -1: no more."""
        node, token, parent, score = best(rows.trees, shape.nodes, shape.lookahead, shape.is_chain)
        bits = score.view(torch.int32).long()
        found = torch.stack((torch.where(score > NEVER, node, -1), token, parent, bits), 2).flatten(1)
        out = self.found.device[: len(rows.lines)]
        out[:, 0] = is_hit
        out[:, 1 : 1 + found.shape[1]] = found
        out[:, 1 + found.shape[1] :] = -1
        self.trees.put(rows.lines[:, SLOT], rows.trees)

    def _worth(self, trees: Trees) -> Tensor:  # [B]
        """The probability that expanding each row's likeliest open node adds an accepted token, as estimated."""
        first = trees.score.masked_fill(trees.place >= 0, NEVER).flatten(1).amax(1).exp()
        best_child = trees.score[..., 0].exp()
        own = torch.where(trees.node < 0, 0, trees.score.flatten(1).gather(1, trees.node.clamp(min=0))).exp()
        is_known = best_child > 0
        usual = (best_child / own.clamp(min=LEAST) * is_known).sum(1) / is_known.sum(1).clamp(min=1)
        return first * usual


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
