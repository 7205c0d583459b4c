"""A drafter with a block draft: candidates for all positions after a text come from one pass.

    propose   after an outcome that was not prepared: the features of new text go to the pages, then one pass per batch
    prepare   while the target verifies: one pass for the blocks after the likeliest outcomes, likeliest first
    serve     an outcome arrives: the block after it, if there is one, is the speculation

The speculation cache maps the tokens that an outcome adds to the block after them. A prepared block begins with the
last of these tokens, and is drafted without the features of those before it, which come with the outcome. So it is a
guess from less (docs/dflash.md has figures). The features are read before the next block.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from saguaro.algo.planning import Ahead
from saguaro.device.graphs import Moment
from saguaro.draft.best_first import Nodes
from saguaro.draft.block import Block, Expected, likeliest_outcomes
from saguaro.draft.block_graph import CapturedPass
from saguaro.draft.block_pass import MOST_TOKENS, Asked, BlockPass
from saguaro.draft.drafter import Prepared
from saguaro.draft.grow import Grown
from saguaro.draft.growth import MOST_EXPANDED, Shape
from saguaro.draft.inputs import FeatureTexts
from saguaro.draft.planner import Planner
from saguaro.draft.planner import Shape as PlanShape
from saguaro.draft.policy.kept import State
from saguaro.draft.ranking import Draws
from saguaro.draft.rows import DraftRow, GrowthBudget, Proposal, Wanted
from saguaro.draft.texts import DraftTexts
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVPlan
from saguaro.model.dflash import DFlash
from saguaro.target.sampler import Sampler
from saguaro.types import CACHE, DRAFT, Outcome

PART = 64  # tokens of prepared blocks between two checks for the outcome


class BlockDrafter(DraftTexts):
    """Drafts blocks. Also a Proposer of trees; steps are passes, of which a draft takes one."""

    source = DRAFT
    step_choices: tuple[int, ...] = ()  # nothing to choose
    is_prepared_alike = False  # see ModelDrafter

    def __init__(
        self,
        model: DFlash,
        kv: KVPlan,
        sampler: Sampler,
        shape: Shape,
        *,
        max_rows: int,
        planner: Planner | None = None,  # which outcomes are prepared; None: the likeliest
        draws: Draws | None = None,  # of candidates, under rejection
        cut: float = 0.0,  # a chain ends before the first token less likely than this; 0: never
        kernels: Kernels | None = None,
    ) -> None:
        inputs = FeatureTexts(model, first=0, n_slots=max_rows + 1, n_recent=shape.most_text + 1)
        of_texts = {"max_rows": max_rows, "n_after": shape.most_text, "n_scratch": BlockPass.scratch(model)}
        super().__init__(model, kv, inputs=inputs, kernels=kernels, **of_texts)
        self._pass, self._captured = BlockPass(self, model, sampler, shape.n_children, draws), None
        self._n = self._pass.n_positions(shape.lookahead + (shape.budget > 0))  # positions of every block
        if kernels is not None:
            sizes = {"n": self._n, "width": self._pass.width, "n_known": sampler.n_known, "max_rows": max_rows}
            most = max(max_rows, MOST_EXPANDED)
            self._captured = CapturedPass(self, model, self._graphs, kernels, draws, most=most, **sizes)
        self._shape, self.planner, self._cut, self.prepares = shape, planner, cut, shape.budget > 0
        self._blocks: dict[int, Block] = {}  # by slot: after the text
        self._ahead: dict[int, dict[tuple[int, ...], Said]] = {}  # by slot and by the tokens that an outcome adds
        self._likely: dict[int, list[float]] = {}  # by slot: of the nodes in flight
        self.levels: Mapping[int, Sequence[float]] = {}
        self.n_steps = 0
        self._began, self._done = Moment(model.device), Moment(model.device)

    def chances(self, slot: int) -> list[float]:
        """The probability that the text of this row runs through each node in flight, as estimated."""
        return self._likely.get(slot, [])

    def verifies(self, slot: int, which: Sequence[int]) -> None:
        """Of the nodes in flight these are verified. Blocks are prepared for what the rows say, so nothing is kept."""

    def deepen(self, wanted: Sequence[Wanted], budget: GrowthBudget) -> None:
        """Verify what is worth it of blocks that hit. There is nothing to grow: a block has all its positions."""
        self.n_steps = 0
        self._put_in_flight(wanted, budget.least)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        super().retire(slots)
        for slot in slots:
            for kept in (self._blocks, self._ahead, self._likely):
                kept.pop(slot, None)

    @torch.inference_mode()
    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """See Drafter."""
        with self.working():
            return super().read(rows, is_late, seconds)

    @torch.inference_mode()
    def serve(self, outcome: Outcome, wanted: Sequence[Wanted]) -> list[Wanted]:
        """See Drafter."""
        self.receive(outcome.features)
        blocks, ahead = self._blocks, self._ahead
        self._blocks, self._ahead, self._likely = {}, {}, {}
        for slot, k in zip(outcome.slots.tolist(), outcome.n_accepted.tolist(), strict=True):
            trunk, block = self.trunks.get(slot), blocks.get(slot)
            added = tuple(trunk.text[-k - 1 :]) if trunk is not None else ()
            if trunk is not None and block is not None and block.n_text + len(added) == len(trunk.text):
                self._pass.learn(block, added)
            found = ahead.get(slot, {}).get(added)
            if trunk is not None and found is not None and found.n_text == len(trunk.text):
                self._blocks[slot] = self._block(found)
        hits = [(row, n) for row, n in wanted if row.slot in self._blocks and row.request.params.prepare]
        self._put_in_flight(hits)
        served = {row.slot for row, _ in hits if row.speculation}
        return [(row, n) for row, n in wanted if row.slot not in served]

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], lookahead: int, budget: GrowthBudget | None = None) -> Proposal:
        """The likeliest nodes after each text, as many as the budget finds worth verifying. Empty if the text is far
        behind or there is no room."""
        self.n_steps = 0
        shape, least = self._shape.at(len(rows), lookahead), budget.least if budget is not None else 0.0
        ready = self.ready(rows) if lookahead else []
        self._draft(ready)
        slots = {row.slot for row in ready}
        found = [self._nodes(row, shape, lookahead, least) if row.slot in slots else (Nodes(), None) for row in rows]
        return Proposal(
            [nodes.tokens for nodes, _ in found],
            q=[q for _, q in found],
            parents=() if shape.is_chain else [nodes.parents for nodes, _ in found],
            chances=[nodes.chances for nodes, _ in found],
        )

    @torch.inference_mode()
    def prepare(self, rows: Sequence[DraftRow], outcome: Outcome, is_late: Callable[[], bool]) -> Prepared | None:
        """See Drafter. Stops between two parts of the blocks if the outcome is there."""
        if self.planner is not None:
            self.planner.learn(outcome)
        rows = self.ready(rows)
        self._draft([row for row in rows if row.slot not in self._blocks])
        with self.working():
            self._began.mark()
            self.catch_up(rows)
            asked, said = self._planned(rows), list[Said]()
            for part in self._parts(asked, PART):
                if is_late():
                    break
                said += self._say(part, after_hit=True)
            self._done.mark()
        self._ahead = {}
        for each in said:
            self._ahead.setdefault(each.asked.row.slot, {})[each.asked.after] = each
        return Grown(self._began, self._done) if said else None

    def warm(self, size: int) -> None:
        """Capture the functions for batches of this size."""
        if self._captured is None or self._catches_up is None:
            return
        with self.working(), torch.inference_mode():
            self._catches_up.warm(size)
            for after_hit in (False, True) if self.prepares else (False,):
                self._captured.warm(partial(self._fan_out_of, after_hit), str(after_hit))

    def state(self) -> State:
        """See Drafter."""
        return {"blocks": self._pass.state()}

    def restore(self, state: State) -> None:
        """See Drafter."""
        self._pass.restore(state["blocks"])

    def _draft(self, rows: Sequence[DraftRow]) -> None:
        """Blocks after these texts; they reach to the bonus after a whole speculation if outcomes are prepared."""
        if not rows:
            return
        with self.working():
            self.catch_up(rows)
            said = [
                each
                for part in self._parts([Asked(row, (), self._n) for row in rows], MOST_TOKENS)
                for each in self._say(part, after_hit=False)
            ]
        self._blocks.update((each.asked.row.slot, self._block(each)) for each in said)
        self.n_steps = 1

    def _parts(self, asked: Sequence[Asked], most: int) -> Iterable[Sequence[Asked]]:
        """Blocks that are drafted by one call: of so many tokens, or if passes are captured, all, because nothing waits
        between them."""
        if self._captured is None:
            return self._pass.parts(asked, most)
        return [asked] if asked else []

    def _say(self, asked: Sequence[Asked], *, after_hit: bool) -> list["Said"]:
        """Draft these blocks. Captured passes are only launched."""
        if self._captured is None:
            blocks = self._pass(asked, self._fan_out_of(after_hit))
            return [Said(each, each.n_text, 0, block) for each, block in zip(asked, blocks, strict=True)]
        self._captured(asked, partial(self._fan_out_of, after_hit), str(after_hit))
        return [Said(each, each.n_text, at, None) for at, each in enumerate(asked)]

    def _block(self, said: "Said") -> Block:
        """What was found for a block."""
        if said.block is not None:
            return said.block
        assert self._captured is not None
        with self.working():
            return self._pass.block(said.asked, said.n_text, *self._captured.ranked(said.at))

    def _put_in_flight(self, hits: Sequence[Wanted], least: float = 0.0) -> None:
        """The likeliest nodes of prepared blocks."""
        shape = self._shape.at(len(hits), max((n for _, n in hits), default=0))
        for row, n in hits:
            nodes, q = self._nodes(row, shape, n, least)
            row.propose(nodes.tokens, CACHE, q, None if shape.is_chain else nodes.parents)

    def _nodes(self, row: DraftRow, shape: Shape, room: int, least: float) -> tuple[Nodes, Tensor | None]:
        """The likeliest nodes of a row's block, and what they were drawn from."""
        block = self._blocks[row.slot]
        nodes = block.nodes(shape, room, least, self._cut)
        self._likely[row.slot] = nodes.chances
        return nodes, block.families(nodes)

    def _planned(self, rows: Sequence[DraftRow]) -> list[Asked]:
        """The blocks after outcomes that are expected, likeliest first, or in the planner's order."""
        if not rows:
            return []
        budget = self._shape.at(len(rows), self._shape.nodes).budget
        if self.planner is None:
            each = [(row, one) for row in rows for one in likeliest_outcomes(row, self._blocks[row.slot], budget)]
            each.sort(key=lambda pair: -pair[1].chance)
        else:
            each = self._by_planner(rows, self.planner, budget)
        return [Asked(row, one.tokens, self._n) for row, one in each]

    def _by_planner(self, rows: Sequence[DraftRow], planner: Planner, budget: int) -> list[tuple[DraftRow, Expected]]:
        """Outcomes of chains."""
        ahead = _ahead_of(rows, [self._blocks[row.slot] for row in rows], self._shape)
        plan = planner.plan(ahead, budget)
        facts = zip(rows, plan.k.tolist(), plan.token.tolist(), strict=True)
        every = [
            (index, (row, Expected((*row.speculation[:k], token), 0.0)))
            for row, ks, tokens in facts
            for index, (k, token) in enumerate(zip(ks, tokens, strict=True))
            if k >= 0
        ]
        every.sort(key=lambda one: one[0])  # of every row the first, then the second
        return [pair for _, pair in every]

    def _fan_out_of(self, after_hit: bool) -> Tensor:  # [K+1] int64
        """How many bonus tokens are prepared at each position, after a draft or after a hit."""
        n, device = self._shape.lookahead + 1, self._model.device
        if self.planner is None:
            return torch.full((n,), max(1, round(self._shape.budget / n)), device=device)
        shape = PlanShape(n - 1, self._shape.n_children, self._shape.budget, device)
        return self.planner.fan_out(shape)[int(after_hit)]


class Said(NamedTuple):
    """A block that is drafted."""

    asked: Asked
    n_text: int  # tokens before its first position; the row's text grows
    at: int  # its number in the captured call that drafts it, which keeps it until the next call
    block: Block | None  # None: a captured call has it


def _ahead_of(rows: Sequence[DraftRow], blocks: Sequence[Block], shape: Shape) -> Ahead:
    """The chains in flight, with the candidates of each position."""
    n, width = shape.lookahead, shape.n_children
    tokens, length = torch.zeros(len(rows), n, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
    candidates = torch.zeros(len(rows), n + 1, width, dtype=torch.int64)
    is_known = torch.zeros(len(rows), n + 1, width, dtype=torch.bool)
    for b, (row, block) in enumerate(zip(rows, blocks, strict=True)):
        flight = row.speculation[:n]
        tokens[b, : len(flight)], length[b] = torch.tensor(flight, dtype=torch.int64), len(flight)
        for at, known in enumerate(block.positions[: n + 1]):
            candidates[b, at, : len(known)] = torch.tensor([each.token for each in known], dtype=torch.int64)
            is_known[b, at, : len(known)] = True
    slots = torch.tensor([row.slot for row in rows], dtype=torch.int64)
    return Ahead(slots, tokens, length, candidates, is_known, torch.tensor([row.is_hit for row in rows]))
