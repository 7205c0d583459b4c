"""The verifier: computes text and speculation in one step, then decides by a rule."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from saguaro.algo.verification import BROKEN
from saguaro.attention.step import Segment, Step, make_step
from saguaro.runner.runner import Runner
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
    raw: Tensor | None  # [L, known V] unmodified logits, if logprobs are requested
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()  # [R] of prompt tokens, if requested

    def outcome(self) -> Outcome:
        """Wait for the result."""
        slots = torch.tensor(self.slots, dtype=torch.int64)
        length = torch.tensor([len(tokens) for tokens in self.drafted], dtype=torch.int64)
        n_accepted, bonus = self.n_accepted.cpu(), self.bonus.cpu()
        own = self._logprobs(n_accepted.tolist(), bonus.tolist())
        return Outcome(slots, length, n_accepted, bonus, own, self.scored)

    def seconds(self) -> float | None:
        """None: the host measures launch and wait itself."""
        return None

    def _logprobs(self, n_accepted: list[int], bonus: list[int]) -> tuple[tuple[TokenLogprobs, ...], ...]:
        if self.raw is None:
            return ()
        found: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        for row, tokens, k, last in zip(self.batch.sampling, self.drafted, n_accepted, bonus, strict=True):
            written = tokens[:k] if last == BROKEN else [*tokens[:k], last]
            n_top, here = row.request.params.logprobs, self.raw[first : first + len(written)]
            emitted = torch.tensor(written, dtype=torch.int64, device=here.device)
            found.append(() if n_top is None else logprobs(here, emitted, n_top))
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
        segments = [_segment(row, drafted[i] if i < len(sampling) else ()) for i, row in enumerate(batch.rows)]
        step = make_step(segments, self._page_size, self._runner.device)
        hidden = self._runner.hidden(step)
        pending = self.decide(batch, spec, drafted, self._runner.logits(hidden.index_select(0, step.logits_at)))
        if not any(row.request.n_unscored for row in batch.rows):
            return pending
        return replace(pending, scored=self._score(batch, step, hidden))

    @torch.inference_mode()
    def decide(self, batch: Batch, spec: Speculation, drafted: list[list[int]], logits: Tensor) -> EagerPending:
        """Apply the rule to the logits, [L, V], after the text and each speculated token of every sampling row."""
        sampling = batch.sampling
        wants_logprobs = any(row.request.params.logprobs is not None for row in sampling)
        raw = logits[:, : self._n_known].clone() if wants_logprobs else None
        places: list[Context] = [
            (row.request, tokens[:j])
            for row, tokens in zip(sampling, drafted, strict=True)
            for j in range(len(tokens) + 1)
        ]
        none = torch.zeros(0, dtype=torch.int64)
        n_accepted, bonus = self._rule(logits, places, spec) if places else (none, none)
        return EagerPending(batch, [row.request.slot for row in sampling], drafted, n_accepted, bonus, raw)

    def _score(self, batch: Batch, step: Step, hidden: Tensor) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """For each row, the log-probabilities of the prompt tokens after those of this step; hidden: [T, D]."""
        found = []
        for row, first in zip(batch.rows, step.starts, strict=False):  # starts has one more entry, the end
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


def _segment(row: BatchRow, drafted: list[int] | tuple[int, ...]) -> Segment:
    text = row.request.tokens[row.start : row.start + row.n_tokens]
    n_wanted = len(drafted) + 1 if row.samples else 0
    return Segment([*text, *drafted], row.start, row.request.table.pages, n_wanted)
