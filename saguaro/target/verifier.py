"""The verifier: computes text and speculation in one step, then decides by a rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from saguaro.algo import tree
from saguaro.algo.verification import BROKEN
from saguaro.attention.sdpa import kv_indices
from saguaro.attention.step import Segment, Step, make_step
from saguaro.runner.runner import Runner
from saguaro.target.request import Request
from saguaro.target.rules import Rule
from saguaro.target.sampler import Context, logprobs, prompt_logprobs
from saguaro.target.scheduler import Batch, BatchRow
from saguaro.types import Outcome, Speculation, TokenLogprobs

SCORED_BYTES = 2**25  # limit of the prompt logits held at once


class Pending(Protocol):
    """A running verification."""

    def outcome(self) -> Outcome:
        """Wait for the result."""

    def seconds(self) -> float | None:
        """Device time, available after the result; None on a CPU."""


class Verifier(Protocol):
    """Launches verifications on the target."""

    @property
    def runs_ahead(self) -> bool:
        """Whether launch returns before the result is computed, so that the host can continue."""

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """Start computing a batch. spec has one row per sampling row, at most as long as its lookahead."""


@dataclass(frozen=True)
class EagerPending:
    """A verification whose result tensors may still be computed."""

    batch: Batch
    slots: list[int]  # [B] at launch; a request that is aborted later loses its slot
    drafted: list[list[int]]  # [B][length]
    n_accepted: Tensor  # [B]
    bonus: Tensor  # [B]
    path: Tensor | None  # [B, N] of trees
    raw: Tensor | None  # [L, known V] unmodified logits, if logprobs are requested
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()  # [R] of prompt tokens, if requested

    def outcome(self) -> Outcome:
        """Wait for the result."""
        slots = torch.tensor(self.slots, dtype=torch.int64)
        length = torch.tensor([len(tokens) for tokens in self.drafted], dtype=torch.int64)
        path = None if self.path is None else self.path.cpu()
        outcome = Outcome(slots, length, self.n_accepted.cpu(), self.bonus.cpu(), path, (), self.scored)
        return replace(outcome, logprobs=self._logprobs(outcome))

    def seconds(self) -> float | None:
        """None: the host measures launch and wait itself."""
        return None

    def _logprobs(self, outcome: Outcome) -> tuple[tuple[TokenLogprobs, ...], ...]:
        if self.raw is None:
            return ()
        found: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        decided = zip(outcome.accepted(), outcome.bonus.tolist(), strict=True)
        for row, tokens, (nodes, last) in zip(self.batch.sampling, self.drafted, decided, strict=True):
            written = [*(tokens[node] for node in nodes), *([] if last == BROKEN else [last])]
            places = [first, *(first + 1 + node for node in nodes)][: len(written)]
            n_top, device = row.request.params.logprobs, self.raw.device
            if n_top is None:
                found.append(())
            else:
                found.append(logprobs(self.raw[places], torch.tensor(written, device=device), n_top))
            first += len(tokens) + 1
        return tuple(found)


class EagerVerifier:
    """Runs verifications eagerly. Handles every batch and request."""

    runs_ahead = False

    def __init__(self, runner: Runner, rule: Rule, *, n_known: int, page_size: int) -> None:
        self._runner, self._rule = runner, rule
        self._n_known, self._page_size = n_known, page_size

    @torch.inference_mode()
    def launch(self, batch: Batch, spec: Speculation) -> "EagerPending":
        """See Verifier."""
        sampling = batch.sampling
        drafted = [tokens[:n] for tokens, n in zip(spec.tokens.tolist(), spec.length.tolist(), strict=True)]
        parents = spec.parents()
        segments = [
            _segment(row, drafted[i], parents[i]) if i < len(sampling) else _segment(row, (), None)
            for i, row in enumerate(batch.rows)
        ]
        step = make_step(segments, self._page_size, self._runner.device)
        hidden = self._runner.hidden(step)
        pending = self.decide(batch, spec, drafted, self._runner.logits(hidden.index_select(0, step.logits_at)))
        self.straighten(batch, pending)
        if not any(row.request.n_unscored for row in batch.rows):
            return pending
        return replace(pending, scored=self._score(batch, step, hidden))

    @torch.inference_mode()
    def decide(self, batch: Batch, spec: Speculation, drafted: list[list[int]], logits: Tensor) -> EagerPending:
        """Apply the rule to the logits, [L, V], after the text and each speculated token of every sampling row."""
        sampling = batch.sampling
        wants_logprobs = any(row.request.params.logprobs is not None for row in sampling)
        raw = logits[:, : self._n_known].clone() if wants_logprobs else None
        each = zip(sampling, drafted, spec.parents(), strict=True)
        places = [place for row, tokens, parents in each for place in _contexts(row.request, tokens, parents)]
        none = torch.zeros(0, dtype=torch.int64)
        decision = self._rule(logits, places, spec) if places else (none, none, None)
        return EagerPending(batch, [row.request.slot for row in sampling], drafted, *decision, raw)

    @torch.inference_mode()
    def straighten(self, batch: Batch, pending: EagerPending) -> None:
        """Move the keys and values of accepted nodes right behind the text, as if they had been a chain."""
        if pending.path is None:
            return
        sources: list[Tensor] = []
        places: list[Tensor] = []
        decided = zip(pending.path.tolist(), pending.n_accepted.tolist(), strict=True)
        for row, (path, n) in zip(batch.sampling, decided, strict=True):
            if path[:n] != list(range(n)):
                end = row.start + row.n_tokens
                own = kv_indices(row.request.table.pages, end + path[n - 1] + 1, self._page_size)[end:]
                sources.append(own[path[:n]])
                places.append(own[:n])
        if sources:
            device = self._runner.device
            self._runner.cache.move(torch.cat(sources).to(device), torch.cat(places).to(device))

    def _score(self, batch: Batch, step: Step, hidden: Tensor) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """For each row, the log-probabilities of the prompt tokens after those of this step; hidden: [T, D]."""
        found = []
        for row, first in zip(batch.rows, step.starts.tolist(), strict=False):  # starts has one more entry, the end
            own = hidden[first : first + row.n_tokens]
            found.append(self._score_row(row, own) if row.request.n_unscored else ())
        return tuple(found)

    def _score_row(self, row: BatchRow, hidden: Tensor) -> tuple[TokenLogprobs, ...]:  # [n_tokens, D]
        request, n_top = row.request, row.request.params.prompt_logprobs
        assert n_top is not None
        # Hidden state i is at position start + i and scores the next token.
        begin, end = len(request.prompt_logprobs) - 1 - row.start, len(request.prompt) - 1 - row.start
        end = min(end, row.n_tokens)
        width = max(1, SCORED_BYTES // (4 * self._n_known))
        found: list[TokenLogprobs] = []
        for at in range(begin, end, width):
            some = hidden[at : min(at + width, end)]
            next_ones = request.prompt[row.start + at + 1 : row.start + at + 1 + len(some)]
            tokens = torch.tensor(next_ones, device=hidden.device)
            found += prompt_logprobs(self._runner.logits(some)[:, : self._n_known], tokens, n_top)
        return tuple(found)


def _segment(row: BatchRow, drafted: Sequence[int], parents: Sequence[int] | None) -> Segment:
    text = row.request.tokens[row.start : row.start + row.n_tokens]
    n_wanted = len(drafted) + 1 if row.samples else 0
    return Segment([*text, *drafted], row.start, row.request.table.pages, n_wanted, parents)


def _contexts(request: Request, tokens: Sequence[int], parents: Sequence[int] | None) -> list[Context]:
    """What stands before each logit of a row: the text, and the tokens on the path to a node."""
    if parents is None:
        return [(request, tokens[:n]) for n in range(len(tokens) + 1)]
    paths = ([tokens[node] for node in path] for path in tree.paths(parents))
    return [(request, ()), *((request, path) for path in paths)]
