"""A draft model: keys and values of its texts on its own pages, and branches for possible outcomes.

A row's trunk is its text and the speculation in flight after it:

    trunk     |------------- text -------------|--- speculation ---|
    computed  |-------------------- n_computed ------|
    candidates are known for the token after the text and after each computed token of the speculation

An outcome keeps the text and the accepted part of the speculation; the rest is overwritten. On a hit, the branch's
keys, values and candidates are copied behind the text, and nothing is recomputed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from saguaro.algo.planning import Ahead, Planned
from saguaro.attention.branches import BranchAttention, Fork
from saguaro.attention.sdpa import kv_indices
from saguaro.attention.step import Segment
from saguaro.device.graphs import bucket
from saguaro.draft.planner import Planner
from saguaro.draft.ranking import Ranker, Ranking
from saguaro.draft.rows import DraftRow, GoesOn, Proposal
from saguaro.draft.texts import DraftTexts
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVPlan
from saguaro.model.transformer import Transformer
from saguaro.types import DRAFT, Outcome, Speculation


class Prepared(Protocol):
    """The planned outcomes, and the branch drafted after each."""

    def branches(self) -> dict[tuple[int, int, int], int]:
        """(slot, number accepted, bonus) -> index of the branch."""

    def seconds(self) -> float | None:
        """Device time, available after the result; None on a CPU."""


class Drafter(Protocol):
    """Keeps rows and prepares speculations for possible outcomes."""

    grows: bool  # whether it prepares by growing trees, without a planner

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows."""

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """After a commit: cut each trunk to the part that is text now."""

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> None:
        """Compute more of texts that are far behind, until done or late, or for about so many seconds."""

    def prepare(
        self, rows: Sequence[DraftRow], planner: Planner | None, outcome: Outcome, is_late: Callable[[], bool]
    ) -> Prepared:
        """Let the planner learn the last outcome and plan the next; draft after each until done or late."""

    def adopt(self, hits: Sequence[tuple[DraftRow, int]]) -> list[tuple[list[int], Tensor | None]]:
        """Make branches the trunks of their rows. Returns the tokens and q of each."""

    def warm(self, size: int, planner: Planner | None) -> None:
        """Warm up for batches of this size."""


class NoModel:
    """A drafter without a model. Prepares nothing."""

    grows = False

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Ignored."""

    def retire(self, slots: Sequence[int]) -> None:
        """Ignored."""

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Ignored."""

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> None:
        """Ignored."""

    def prepare(
        self, rows: Sequence[DraftRow], planner: Planner | None, outcome: Outcome, is_late: Callable[[], bool]
    ) -> Prepared:
        """Not supported."""
        raise NotImplementedError("only a model can draft after an outcome")

    def adopt(self, hits: Sequence[tuple[DraftRow, int]]) -> list[tuple[list[int], Tensor | None]]:
        """Always empty."""
        return []

    def warm(self, size: int, planner: Planner | None) -> None:
        """Ignored."""


@dataclass
class _Branches:
    """The tokens drafted after each of R outcomes."""

    tokens: list[list[int]]  # [R][n]
    candidates: Tensor  # [R, K+1, C]
    scores: Tensor  # [R, K+1, C]
    n_own: int = 0  # how many of a branch's own tokens have keys and values, from the bonus on
    q: list[Tensor] = field(default_factory=list)  # [n] of [R, V], if tokens are sampled


class ModelDrafter(DraftTexts):
    """Drafts with a model. Also a Proposer: drafts just in time after the current text."""

    source, grows = DRAFT, False

    def __init__(
        self,
        model: Transformer,
        guess: Ranker,
        kv: KVPlan,
        *,
        max_rows: int,
        lookahead: int,
        budget: int,
        cut: float,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(model, kv, n_after=2 * (lookahead + 1), kernels=kernels)
        self._guess = guess
        self._lookahead, self._budget, self._cut = lookahead, budget, cut
        self.attention = BranchAttention(self.cache, model.spec, bucket(max_rows) * budget, lookahead + 1)
        shape = (max_rows + 1, lookahead + 1, guess.n_candidates)  # the last row is for padding
        self.candidates = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self.scores = torch.full(shape, float("-inf"), device=model.device)
        self._branches = _Branches([], self.candidates[:0], self.scores[:0])

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow], lookahead: int, goes_on: GoesOn | None = None) -> Proposal:
        """Draft after each text until goes_on returns False. Empty if the text is far behind or there is no room."""
        ready = self.ready(rows)
        names = [self._guess.start() for _ in ready]
        drafted: dict[DraftRow, list[int]] = {row: [] for row in rows}
        drawn: list[Tensor] = []
        for _ in range(lookahead if ready else 0):
            guess = self._extend(ready, [drafted[row] for row in ready], names)
            for row, token in zip(ready, guess.token.tolist(), strict=True):
                drafted[row].append(token)
            if guess.q is not None:
                drawn.append(guess.q)
            if goes_on is not None and not goes_on(list(zip(ready, guess.leads().tolist(), strict=True))):
                break
        tokens = [drafted[row][: self._sure(row, drafted[row])] for row in rows]
        if not drawn:
            return Proposal(tokens)
        q = torch.zeros(len(rows), len(drawn), drawn[0].shape[1], dtype=drawn[0].dtype)
        q[[rows.index(row) for row in ready]] = torch.stack(drawn, 1).cpu()
        return Proposal(tokens, q)

    @torch.inference_mode()
    def prepare(
        self, rows: Sequence[DraftRow], planner: Planner | None, outcome: Outcome, is_late: Callable[[], bool]
    ) -> Prepared:
        """See Drafter."""
        assert planner is not None
        planner.learn(outcome)
        planned = planner.plan(self.look_ahead(rows), self._budget)
        return planned if self.branch(rows, planned, is_late) else Planned.nothing()

    @torch.inference_mode()
    def look_ahead(self, rows: Sequence[DraftRow]) -> Ahead:
        """Candidates along the speculations in flight, for rows that are nearly computed."""
        ready = self.ready(rows)
        behind = [row for row in ready if self.trunks[row.slot].n_computed < len(row.text) + len(row.speculation)]
        if behind:
            self._extend(behind, [row.speculation for row in behind], None)
        slots = torch.tensor([row.slot for row in ready], dtype=torch.int64)
        spec = Speculation.of([row.speculation for row in ready], self._lookahead, [row.source for row in ready])
        candidates, scores = self.candidates[slots].cpu(), self.scores[slots].cpu()
        return Ahead(slots, spec.tokens, spec.length, candidates, scores, is_primary=spec.hit)

    @torch.inference_mode()
    def branch(self, rows: Sequence[DraftRow], planned: Planned, is_late: Callable[[], bool]) -> int:
        """Draft K tokens after every planned outcome. The candidates after the last token are computed by look_ahead,
        only for the branch that is adopted."""
        by_slot = {row.slot: row for row in rows}
        forks, befores, requests = [], [], []
        for slot, outcomes in groupby(planned.outcomes(), key=itemgetter(0)):
            row, forked = by_slot[slot], []
            for _, k, token in outcomes:
                forked.append(len(row.text) + k)
                befores.append([*row.speculation[:k], token])
                requests.append(row.request)
            forks.append(Fork(self.trunks[slot].table.pages, forked))
        if not forks:
            return 0
        self.attention.plan(forks)
        positions = torch.tensor([at for fork in forks for at in fork.forks], device=self._model.device)
        tokens = torch.tensor([before[-1] for before in befores], device=self._model.device)
        n, shape = len(befores), self.candidates.shape[1:]
        found = _Branches(
            [[] for _ in befores], self.candidates.new_zeros(n, *shape), self.scores.new_full((n, *shape), -torch.inf)
        )
        names = [self._guess.start() for _ in befores]
        self._branches = found
        for step in range(self._lookahead):
            self.attention.advance(step)
            logits = self._model.logits(self._model(tokens, positions + step, self.attention))
            guess = self._guess(logits, list(zip(requests, befores, strict=True)), names)
            width = guess.candidates.shape[1]
            found.candidates[:, step, :width], found.scores[:, step, :width] = guess.candidates, guess.scores
            found.n_own = step + 1
            tokens = guess.token
            for before, drafted, token in zip(befores, found.tokens, tokens.tolist(), strict=True):
                before.append(token)
                drafted.append(token)
            if guess.q is not None:
                found.q.append(guess.q)
            if is_late():
                break
        return len(found.tokens[0])

    @torch.inference_mode()
    def adopt(self, hits: Sequence[tuple[DraftRow, int]]) -> list[tuple[list[int], Tensor | None]]:
        """Copy branches behind their rows' texts, whose last token, the bonus, is the branch's first."""
        found = self._branches
        sources, places = [], []
        for row, branch in hits:
            trunk, start = self.trunks[row.slot], len(row.text) - 1
            if self.reserve(row):
                end = start + found.n_own
                sources.append(branch)
                places.append(kv_indices(trunk.table.pages, end, self.cache.page_size)[start:])
                trunk.n_computed = end
        if sources:
            own = self.attention.own[:, sources, : found.n_own].flatten(1, 2)
            self.cache.copy_in(torch.cat(places).to(self.cache.device), own)
        slots = [row.slot for row, _ in hits]
        branches = [branch for _, branch in hits]
        self.candidates[slots], self.scores[slots] = found.candidates[branches], found.scores[branches]
        q = torch.stack([each[branches] for each in found.q], 1).cpu() if found.q and hits else None  # [hits, n, V]
        tokens = [found.tokens[branch][: self._sure(row, found.tokens[branch])] for row, branch in hits]
        return [(drafted, None if q is None else q[index]) for index, drafted in enumerate(tokens)]

    def warm(self, size: int, planner: Planner | None) -> None:
        """Nothing to do: nothing is captured."""

    def _extend(self, rows: Sequence[DraftRow], ahead: Sequence[Sequence[int]], names: Sequence[int] | None) -> Ranking:
        """Compute the rest of text and speculation of each row. Returns the ranking after the end of each."""
        segments, places, at = [], [], []
        for row, tokens in zip(rows, ahead, strict=True):
            trunk = self.trunks[row.slot]
            n_known = max(trunk.n_computed - len(row.text) + 1, 0)  # number of candidates known, from the text's end
            full = [*row.text, *tokens]
            wanted = range(n_known, len(tokens) + 1)
            segments.append(Segment(full[trunk.n_computed :], trunk.n_computed, trunk.table.pages, len(wanted)))
            places += [(row.request, tokens[:j]) for j in wanted]
            at += [(row.slot, j) for j in wanted]
            trunk.n_computed = len(full)
        counts = [segment.n_wanted for segment in segments]
        drafts = None if names is None else [name for name, n in zip(names, counts, strict=True) for _ in range(n)]
        guess = self._guess(self.forward(segments), places, drafts)
        slots, js = (torch.tensor(each, device=self.candidates.device) for each in zip(*at, strict=True))
        width = guess.candidates.shape[1]
        self.candidates[slots, js, :width], self.scores[slots, js, :width] = guess.candidates, guess.scores
        last = torch.tensor(counts).cumsum(0).sub(1).to(guess.token.device)
        q = None if guess.q is None else guess.q[last]
        return Ranking(guess.token[last], guess.candidates[last], guess.scores[last], q)

    def _sure(self, row: DraftRow, tokens: Sequence[int]) -> int:
        """How many tokens to speculate: up to the first uncertain one, at least one."""
        if self._cut <= 0 or len(tokens) <= 1:
            return len(tokens)
        lead = self.scores[row.slot, : len(tokens), 0] - self.scores[row.slot, : len(tokens), 1]
        return max(1, int((lead >= self._cut).long().cumprod(0).sum()))
