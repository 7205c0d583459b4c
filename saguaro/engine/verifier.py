"""The target's side of a round: compute the text and the speculation in one step, then decide by a rule."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from saguaro.engine.layout import Segment, flatten
from saguaro.engine.rules import Rule
from saguaro.engine.runner import Runner
from saguaro.engine.sampler import Place, logprobs
from saguaro.engine.scheduler import Batch, Row
from saguaro.types import Outcome, Speculation, TokenLogprobs


class Pending(Protocol):
    """A verification under way."""

    def outcome(self) -> Outcome:
        """Wait for the result."""

    def seconds(self) -> float | None:
        """How long a device computed, once the result is there; None where the host can tell by itself."""


class Verifier(Protocol):
    """Launches verifications on the target."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a launch returns long before its result is there, so that the host is free meanwhile."""

    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """Start computing a batch. spec has a row for every sampling row, no longer than its lookahead."""


@dataclass(frozen=True)
class EagerPending:
    """A verification whose parts are on their way one by one."""

    batch: Batch
    slots: list[int]  # [B] at launch: a request aborted in the meantime has none any more
    drafted: list[list[int]]  # [B][length]
    n_accepted: Tensor  # [B]
    bonus: Tensor  # [B]
    raw: Tensor | None  # [L, known V] logits before any shaping, if someone asked for logprobs

    def outcome(self) -> Outcome:
        """Wait for the result."""
        slots = torch.tensor(self.slots, dtype=torch.int64)
        length = torch.tensor([len(tokens) for tokens in self.drafted], dtype=torch.int64)
        n_accepted, bonus = self.n_accepted.cpu(), self.bonus.cpu()
        return Outcome(slots, length, n_accepted, bonus, self._logprobs(n_accepted.tolist(), bonus.tolist()))

    def seconds(self) -> float | None:
        """Launching and waiting is all there is."""
        return None

    def _logprobs(self, n_accepted: list[int], bonus: list[int]) -> tuple[tuple[TokenLogprobs, ...], ...]:
        if self.raw is None:
            return ()
        found: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        for row, tokens, k, last in zip(self.batch.sampling, self.drafted, n_accepted, bonus, strict=True):
            n_top, here = row.request.params.logprobs, self.raw[first : first + k + 1]
            emitted = torch.tensor([*tokens[:k], last], device=here.device)
            found.append(() if n_top is None else logprobs(here, emitted, n_top))
            first += len(tokens) + 1
        return tuple(found)


class EagerVerifier:
    """Launches verifications operation by operation: any batch, any request."""

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
        logits = self._runner.forward(flatten(segments, self._page_size, self._runner.device))
        return self.decide(batch, spec, drafted, logits)

    @torch.inference_mode()
    def decide(self, batch: Batch, spec: Speculation, drafted: list[list[int]], logits: Tensor) -> EagerPending:
        """Decide by the logits, [L, V], after the text and each speculated token of every sampling row."""
        sampling = batch.sampling
        wants_logprobs = any(row.request.params.logprobs is not None for row in sampling)
        raw = logits[:, : self._n_known].clone() if wants_logprobs else None
        places: list[Place] = [
            (row.request, tokens[:j])
            for row, tokens in zip(sampling, drafted, strict=True)
            for j in range(len(tokens) + 1)
        ]
        none = torch.zeros(0, dtype=torch.int64)
        n_accepted, bonus = self._rule(logits, places, spec) if places else (none, none)
        return EagerPending(batch, [row.request.slot for row in sampling], drafted, n_accepted, bonus, raw)


def _segment(row: Row, drafted: list[int] | tuple[int, ...]) -> Segment:
    text = row.request.tokens[row.start : row.start + row.n_tokens]
    n_wanted = len(drafted) + 1 if row.samples else 0
    return Segment([*text, *drafted], row.start, row.request.table.pages, n_wanted)
