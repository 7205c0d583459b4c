"""A drafter whose whole round is captured: learn, adopt, plan, and draft after every planned outcome.

The host sends one line of numbers per row, and waits once for the prepared tokens. Rows that are behind (a prompt being
read, text the draft has not computed) are first brought up to date by the eager drafter.

    a hit       its branch is copied behind the text by the next preparation; without one it is lost
    a miss      K steps, the first over the last two tokens of the text, as either may be new
    preparing   M branches of every row, K + 1 steps each; fewer in a large batch
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from saguaro.algo.planning import Ahead, Planned
from saguaro.attention.paged import from_left, kv_indices_at, left_padded, split_of
from saguaro.attention.step import Segment, Step
from saguaro.device.graphs import Graphs, Mirror, Moment, SideStream, bucket
from saguaro.draft.model import ModelDrafter, Prepared
from saguaro.draft.planner import Planner
from saguaro.draft.rows import DraftRow, Proposal
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.kv.tables import PageTables
from saguaro.model.transformer import KVWrite, Transformer
from saguaro.target.graphed import float_bits, noise_of
from saguaro.types import DRAFT, Outcome

# Columns of a row's line: first for every draft, then for preparation only, then tokens.
SLOT, TEXT, SEED, TEMPERATURE = range(4)
LENGTH, IS_PRIMARY, BRANCH, VERIFIED, ACCEPTED, BONUS = range(4, 10)
N_FACTS = 10
NEVER_VERIFIED = 2**30  # for rows without a known outcome

MOST_BRANCHES = 64  # per batch: with more rows, products are no longer bound by reading weights (kernels.linear)


@dataclass
class _Made:
    """The result of the last preparation."""

    slots: list[int]
    result: Mirror  # [rows, M, 2 + K]: k and token of each outcome, then the tokens drafted after it
    began: Moment
    done: Moment
    budget: int  # outcomes per row in use
    _lines: list[list[list[int]]] | None = None

    def branches(self) -> dict[tuple[int, int, int], int]:
        """See Prepared."""
        return {
            (slot, k, token): index * self.budget + place
            for index, (slot, line) in enumerate(zip(self.slots, self.lines(), strict=True))
            for place, (k, token, *_) in enumerate(line)
            if k >= 0
        }

    def tokens(self, branch: int) -> list[int]:
        """The tokens drafted on a branch."""
        index, place = divmod(branch, self.budget)
        return self.lines()[index][place][2:]

    def seconds(self) -> float | None:
        """See Prepared."""
        return self.done.since(self.began)

    def lines(self) -> list[list[list[int]]]:
        """Wait for the result."""
        if self._lines is None:
            self.done.wait()
            self._lines = self.result.host[: len(self.slots), : self.budget].tolist()
        return self._lines


class PagedBranches:
    """Attention of branches whose trunks are on pages; their own keys and values are stored separately."""

    def __init__(self, cache: KVCache, own: Tensor, kernels: Kernels, longest: int) -> None:
        self._cache, self._own, self._kernels = cache, own, kernels
        self._longest, self._split = longest, split_of(longest)
        self._first = torch.arange(own.shape[1], device=own.device) * own.shape[2]  # KV index of a branch's first token
        self._pages = self._forks = self._slots = torch.empty(0)
        self._step = 0

    def places(self, n: int, steps: Tensor) -> Tensor:  # [K+1] -> [K+1, n]
        """The KV indices of the own tokens of n branches, step by step."""
        return self._first[:n] + steps[:, None]

    def plan(self, pages: Tensor, forks: Tensor, slots: Tensor, step: int) -> None:  # [R, P], [R * M] int32, [R * M]
        """Plan the next step: every branch computes its own token `step` and writes it to its KV index."""
        self._pages, self._forks, self._slots, self._step = pages, forks, slots, step

    def place(self, layer: int) -> KVWrite:
        """Where a layer writes: behind the own tokens of each branch."""
        return KVWrite(self._own[layer].flatten(0, 1), self._slots)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [R * M, H, d] -> [R * M, H * d]."""
        return self._kernels.attend_branches(
            q, self._cache.layers[layer], self._pages, self._forks, self._own[layer, : len(q)], self._step + 1,
            self._cache.page_size, self._longest, split=self._split,
        )  # fmt: skip


@dataclass
class _Buffers:
    """Fixed input and output buffers of the captured steps."""

    lines: Mirror  # [rows, N_FACTS + K + 1] int64
    drafted: Mirror  # [rows, K] int64: drafted just in time
    result: Mirror  # [rows, M, 2 + K] int64: see _Made
    starts: Tensor  # [rows + 1] int32: 0, 1, 2 ..
    steps: Tensor  # [K + 1] int64: 0..K
    candidates: Tensor  # [rows * M, K + 1, C]: of the branches
    scores: Tensor  # [rows * M, K + 1, C]
    adopted: dict[int, int] = field(default_factory=dict)  # slot -> branch, for the next preparation


class GraphDrafter:
    """Drafts with captured steps, for verification by shared noise. Also a Proposer: drafts just in time."""

    source, grows = DRAFT, False

    def __init__(
        self,
        eager: ModelDrafter,
        model: Transformer,
        kernels: Kernels,
        *,
        n_known: int,
        max_rows: int,
        lookahead: int,
        budget: int,
        longest: int,
    ) -> None:
        self.eager, self._model, self._kernels = eager, model, kernels
        self._n_known, self._lookahead, self._budget, self._longest = n_known, lookahead, budget, longest
        device, size, width = model.device, bucket(max_rows), lookahead + 1
        self._stream, self._graphs = SideStream(device), Graphs(device)
        self._tables = PageTables(max_rows, longest, eager.cache.page_size, device)
        self._branches = PagedBranches(eager.cache, eager.attention.own, kernels, longest)
        shape = (size * budget, *eager.candidates.shape[1:])
        self._at = _Buffers(
            lines=Mirror((size, N_FACTS + width), torch.int64, device),
            drafted=Mirror((size, lookahead), torch.int64, device),
            result=Mirror((size, budget, 2 + lookahead), torch.int64, device),
            starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            steps=torch.arange(width, device=device),
            candidates=torch.zeros(shape, dtype=torch.int64, device=device),
            scores=torch.full(shape, float("-inf"), device=device),
        )
        self._lines = self._at.lines.host.numpy()
        self._done, self._made = Moment(device), _Made([], self._at.result, Moment(device), Moment(device), budget)

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows."""
        self.eager.admit(rows)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        self.eager.retire(slots)
        for slot in slots:
            self._at.adopted.pop(slot, None)

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Keep the computed part of each text."""
        self.eager.settle(rows)

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> None:
        """Compute more of texts that are far behind."""
        with self._stream():
            self.eager.read(rows, is_late, seconds)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], lookahead: int) -> Proposal:
        """Draft after each text. Empty if the text is far behind or there is no room."""
        ready = self.eager.ready(rows)
        if not ready:
            return Proposal([[] for _ in rows])
        with self._stream():
            self._catch_up(ready, n_left=2)
            self._write(ready, [self._draft_line(row) for row in ready], self._padding_line(0))
            size = bucket(len(ready))
            self._graphs.run(("draft", size), partial(self._draft, size))
            self._at.drafted.fetch(len(ready))
            self._done.mark()
        self._done.wait()
        found = dict(zip(ready, self._at.drafted.host[: len(ready)].tolist(), strict=True))
        for row in ready:
            self.eager.trunks[row.slot].n_computed = len(row.text) + self._lookahead - 1
        return Proposal([found.get(row, [])[:lookahead] for row in rows])

    @torch.inference_mode()
    def prepare(
        self, rows: Sequence[DraftRow], planner: Planner | None, outcome: Outcome, is_late: Callable[[], bool]
    ) -> Prepared:
        """See Drafter. Only launches the work; reading the result waits for it."""
        assert planner is not None
        adopted, self._at.adopted = self._at.adopted, {}
        ready = self.eager.ready(rows)
        if not ready:
            return Planned.nothing()
        facts = torch.stack((outcome.slots, outcome.length, outcome.n_accepted, outcome.bonus), 1).tolist()
        decided = {slot: rest for slot, *rest in facts}
        with self._stream():
            self._made.began.mark()
            self._catch_up(ready, n_left=1)
            trunks = [self.eager.trunks[row.slot] for row in ready]
            for row, trunk in zip(ready, trunks, strict=True):
                if row.slot in adopted:
                    trunk.n_computed = len(row.text) + self._lookahead
            ends = [len(row.text) + len(row.speculation) for row in ready]
            is_behind = any(trunk.n_computed < end for trunk, end in zip(trunks, ends, strict=True))
            lines = [self._line(row, adopted.get(row.slot, -1), decided.get(row.slot)) for row in ready]
            self._write(ready, lines, self._padding_line(-1))
            size = bucket(len(ready))
            self._graphs.run(("prepare", size, is_behind), partial(self._prepare, size, is_behind, planner))
            self._at.result.fetch(len(ready))
            slots, m = [row.slot for row in ready], self._budget_of(size)
            self._made = replace(self._made, slots=slots, budget=m, _lines=None)
            self._made.done.mark()
        for trunk, end in zip(trunks, ends, strict=True):
            trunk.n_computed = max(trunk.n_computed, end)
        return self._made

    def adopt(self, hits: Sequence[tuple[DraftRow, int]]) -> list[tuple[list[int], Tensor | None]]:
        """Record which branches become trunks at the next preparation, replacing earlier ones. Returns their tokens."""
        self._at.adopted = {row.slot: branch for row, branch in hits if self.eager.reserve(row)}
        return [(self._made.tokens(branch), None) for _, branch in hits]

    @torch.inference_mode()
    def warm(self, size: int, planner: Planner | None) -> None:
        """Capture the steps for this batch size, with padding rows."""
        with self._stream():
            self._write([], [self._padding_line(0)] * size, self._padding_line(0))
            self._graphs.run(("draft", size), partial(self._draft, size))
            for is_behind in (False, True) if planner is not None else ():
                assert planner is not None
                self._write([], [self._padding_line(-1)] * size, self._padding_line(-1))
                run = partial(self._prepare, size, is_behind, planner)
                self._graphs.run(("prepare", size, is_behind), run)

    def _budget_of(self, size: int) -> int:
        """Outcomes prepared per row (M) at this batch size."""
        return max(1, min(self._budget, MOST_BRANCHES // size))

    def _catch_up(self, rows: Sequence[DraftRow], n_left: int) -> None:
        """Compute each text up to its last n_left tokens."""
        segments = []
        for row in rows:
            trunk, end = self.eager.trunks[row.slot], len(row.text) - n_left
            if trunk.n_computed < end:
                tokens = row.text[trunk.n_computed : end]
                segments.append(Segment(tokens, trunk.n_computed, trunk.table.pages, 0))
                trunk.n_computed = end
        if segments:
            self.eager.forward(segments)

    def _write(self, rows: Sequence[DraftRow], lines: list[list[int]], padding: list[int]) -> None:
        self._tables.write((row.slot, self.eager.trunks[row.slot].table.pages) for row in rows)
        size = bucket(len(lines))
        self._lines[:size] = lines + [padding] * (size - len(lines))
        self._at.lines.send(size)

    def _draft_line(self, row: DraftRow) -> list[int]:
        """The line of a row to draft for; it ends with the last two tokens of its text."""
        request, k = row.request, self._lookahead
        facts = [row.slot, len(row.text), request.seed, float_bits(request.params.temperature)]
        last = [0, *row.text][-2:]
        return [*facts, *[0] * (N_FACTS - len(facts)), *([0] * (k + 1) + last)[-k - 1 :]]

    def _line(self, row: DraftRow, branch: int, decided: Sequence[int] | None) -> list[int]:
        """The line of a row to prepare for; it ends with the last token of its text and the speculation."""
        request, n = row.request, len(row.speculation)
        facts = [row.slot, len(row.text), request.seed, float_bits(request.params.temperature)]
        facts += [n, int(row.is_hit), branch, *(decided or (NEVER_VERIFIED, 0, 0))]
        return [*facts, *[0] * (self._lookahead - n), row.text[-1], *row.speculation]

    def _padding_line(self, length: int) -> list[int]:
        """The line of a padding row."""
        facts = [self._tables.padding_slot, 0, 0, 0, length, 0, -1, NEVER_VERIFIED, 0, 0]
        return [*facts, *[0] * (self._lookahead + 1)]

    def _draft(self, size: int) -> None:
        """K steps after each text, one token each; the first step computes two tokens.

        column     0         1         2      ...   K
        position   text - 2  text - 1  text         text + K - 2
        step       |------ 0 --------|-- 1 --|      K - 1
        """
        lines, k = self._at.lines.device[:size], self._lookahead
        text, pages, is_row = lines[:, TEXT], self._tables.device[lines[:, SLOT]], lines[:, TEXT] > 0
        positions = text - 2 + self._at.steps[:, None]  # [K+1, R]
        slots = kv_indices_at(pages, positions.t(), ((positions >= 0) & is_row).t(), self.eager.cache.page_size).t()
        lengths = torch.where(is_row, positions[1:] + 1, 0).int()  # [K, R]
        positions, following = positions.clamp(min=0), positions + 1
        starts, noise = self._at.starts[: size + 1], self._noise(lines, 1)
        first = Step(
            lines[:, -2:].flatten(), positions[:2].t().flatten(), slots[:2].t().flatten(), self._at.steps[:0],
            pages, starts * 2, lengths[0], 2, self._longest,
        )  # fmt: skip
        hidden = self.eager.runner.hidden(first)[1::2]
        found = [self._rank(hidden, noise, following[1])]
        for step in range(1, k):
            one = Step(
                found[-1][0][:, 0], positions[step + 1], slots[step + 1].contiguous(), self._at.steps[:0],
                pages, starts, lengths[step], 1, self._longest,
            )  # fmt: skip
            hidden = self.eager.runner.hidden(one)
            found.append(self._rank(hidden, noise, following[step + 1]))
        candidates, scores = (torch.stack(each, 1) for each in zip(*found, strict=True))  # [R, K, C]
        width = candidates.shape[2]
        self.eager.candidates[lines[:, SLOT], :k, :width] = candidates
        self.eager.scores[lines[:, SLOT], :k, :width] = scores
        self._at.drafted.device[:size] = candidates[..., 0]

    def _prepare(self, size: int, is_behind: bool, planner: Planner) -> None:
        """Learn, adopt, compute the speculation in flight, plan, and draft after every planned outcome."""
        lines = self._at.lines.device[:size]
        slot, length = lines[:, SLOT], lines[:, LENGTH]
        planner.learn(Outcome(slot, lines[:, VERIFIED], lines[:, ACCEPTED], lines[:, BONUS]))
        pages = self._tables.device[slot]
        self._adopt(lines, pages)
        if is_behind:
            self._extend(lines, pages)
        ahead = Ahead(
            slot,
            self._in_flight(lines),
            length,
            self.eager.candidates[slot],
            self.eager.scores[slot],
            lines[:, IS_PRIMARY] > 0,
        )
        m = self._budget_of(size)
        planned = planner.plan(ahead, m)
        drafted = self._branch(lines, pages, planned).reshape(size, m, -1)
        outcomes = torch.stack((planned.k, planned.token), 2)
        self._at.result.device[:size, :m] = torch.cat((outcomes, drafted), 2)

    def _adopt(self, lines: Tensor, pages: Tensor) -> None:
        """Copy adopted branches behind their texts, whose last token is the branch's first."""
        slot, branch = lines[:, SLOT], lines[:, BRANCH]
        positions = (lines[:, TEXT] - 1)[:, None] + self._at.steps
        is_hit = (branch >= 0)[:, None]
        cache = self.eager.cache
        slots = kv_indices_at(pages, positions, is_hit, cache.page_size)
        self._kernels.adopt(self.eager.attention.own, branch, cache.memory, slots)
        for trunk, own in ((self.eager.candidates, self._at.candidates), (self.eager.scores, self._at.scores)):
            trunk[slot] = torch.where(is_hit[..., None], own[branch.clamp(min=0)], trunk[slot])

    def _extend(self, lines: Tensor, pages: Tensor) -> None:
        """Compute the last token of each text and the speculation in flight, and rank after each token."""
        steps, length = self._at.steps, lines[:, LENGTH]
        starts = self._at.starts[: len(lines) + 1] * len(steps)
        step = left_padded(
            lines[:, N_FACTS:], lines[:, TEXT], length, pages, starts, self.eager.cache.page_size, self._longest
        )
        hidden = self.eager.runner.hidden(step)
        found = self._rank(hidden, self._noise(lines, len(steps)), step.positions + 1)
        candidates, scores = (x.view(len(lines), len(steps), -1) for x in found)
        width = candidates.shape[2]
        at = from_left(length, steps)[..., None].expand(-1, -1, width)
        self.eager.candidates[lines[:, SLOT], :, :width] = candidates.gather(1, at)
        self.eager.scores[lines[:, SLOT], :, :width] = scores.gather(1, at)

    def _branch(self, lines: Tensor, pages: Tensor, planned: Planned) -> Tensor:  # [R * M, K]
        """Run K + 1 steps of every branch."""
        forks = (lines[:, TEXT, None] + planned.k.clamp(min=0)).flatten()  # [R * M]
        positions = forks + self._at.steps[:, None]  # [K+1, R * M]
        slots, following = self._branches.places(len(forks), self._at.steps), positions + 1
        before, noise, tokens = forks.int(), self._noise(lines, planned.k.shape[1]), planned.token.flatten()
        found = []
        for step in range(self._lookahead + 1):
            self._branches.plan(pages, before, slots[step], step)
            hidden = self._model(tokens, positions[step], self._branches, self._kernels.products)
            found.append(self._rank(hidden, noise, following[step]))
            tokens = found[-1][0][:, 0]
        candidates, scores = (torch.stack(each, 1) for each in zip(*found, strict=True))  # [R * M, K+1, C]
        n, _, width = candidates.shape
        self._at.candidates[:n, :, :width], self._at.scores[:n, :, :width] = candidates, scores
        return candidates[:, :-1, 0]

    def _noise(self, lines: Tensor, n: int) -> tuple[Tensor, Tensor]:  # [R * n] each
        """Temperature and seed, repeated for each of a row's n positions."""
        return noise_of(lines[:, TEMPERATURE], lines[:, SEED], n)

    def _rank(self, hidden: Tensor, noise: tuple[Tensor, Tensor], following: Tensor) -> tuple[Tensor, Tensor]:
        """Rank candidates for these positions, [T], after these hidden states -> tokens, scores [T, C]."""
        logits = self._model.logits(hidden, self._kernels.products)
        width = min(self.eager.candidates.shape[2], self._n_known)
        return self._kernels.rank(logits, *noise, following, self._n_known, width)

    def _in_flight(self, lines: Tensor) -> Tensor:  # [R, K]
        """The speculations, left-aligned and padded with 0."""
        length = lines[:, LENGTH]
        tokens = lines[:, N_FACTS:].gather(1, from_left(length, self._at.steps)[:, 1:])
        return torch.where(self._at.steps[:-1] < length[:, None], tokens, 0)
