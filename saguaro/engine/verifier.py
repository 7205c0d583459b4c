"""The target's side of a round: compute the text and the speculation in one step, then accept by shared noise."""

from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.algo.verification import accept
from saguaro.engine.layout import Segment, flatten
from saguaro.engine.runner import Runner
from saguaro.engine.sampler import Place, Sampler, logprobs
from saguaro.engine.scheduler import Batch, Row
from saguaro.types import Outcome, Speculation, TokenLogprobs


@dataclass(frozen=True)
class Pending:
    """A verification under way."""

    batch: Batch
    slots: list[int]  # [B] at launch: a request aborted in the meantime has none any more
    targets: Tensor  # [B, K+1] int64: the target's tokens; beyond a row's speculation: 0
    n_accepted: Tensor  # [B]
    bonus: Tensor  # [B]
    raw: Tensor | None  # [L, known V] logits before any shaping, if someone asked for logprobs
    first: list[int]  # [B] index of each row's first logit

    def outcome(self) -> Outcome:
        """Wait for the result."""
        slots = torch.tensor(self.slots, dtype=torch.int64)
        return Outcome(slots, self.n_accepted.cpu(), self.bonus.cpu(), self._logprobs())

    def _logprobs(self) -> tuple[tuple[TokenLogprobs, ...], ...]:
        if self.raw is None:
            return ()
        found: list[tuple[TokenLogprobs, ...]] = []
        for b, row in enumerate(self.batch.sampling):
            n_top = row.request.params.logprobs
            if n_top is None:
                found.append(())
                continue
            n = int(self.n_accepted[b]) + 1
            rows = self.raw[self.first[b] : self.first[b] + n]
            found.append(logprobs(rows, self.targets[b, :n], n_top))
        return tuple(found)


class Verifier:
    """Launches verifications on the target."""

    def __init__(self, runner: Runner, sampler: Sampler, page_size: int) -> None:
        self._runner, self._sampler, self._page_size = runner, sampler, page_size

    @torch.inference_mode()
    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """Start computing a batch. spec has a row for every sampling row, no longer than its lookahead."""
        sampling = batch.sampling
        drafted = [tokens[:n] for tokens, n in zip(spec.tokens.tolist(), spec.length.tolist(), strict=True)]
        segments = [_segment(row, drafted[i] if i < len(sampling) else ()) for i, row in enumerate(batch.rows)]
        logits = self._runner.forward(flatten(segments, self._page_size, self._runner.device))
        wants_logprobs = any(row.request.params.logprobs is not None for row in sampling)
        raw = logits[:, : self._sampler.n_known].clone() if wants_logprobs else None
        places: list[Place] = [
            (row.request, tokens[:j])
            for row, tokens in zip(sampling, drafted, strict=True)
            for j in range(len(tokens) + 1)
        ]
        chosen = self._sampler(logits, places) if places else logits.new_zeros(0, dtype=torch.int64)
        counts = [len(tokens) + 1 for tokens in drafted]
        targets = torch.nn.utils.rnn.pad_sequence(chosen.split(counts), batch_first=True) if places else chosen[:, None]
        device = chosen.device
        width = max(targets.shape[1] - 1, 0)
        n_accepted, bonus = accept(targets, spec.tokens[:, :width].to(device), spec.length.to(device))
        first = [sum(counts[:b]) for b in range(len(counts))]
        slots = [row.request.slot for row in sampling]
        return Pending(batch, slots, targets, n_accepted, bonus, raw, first)


def _segment(row: Row, drafted: list[int] | tuple[int, ...]) -> Segment:
    text = row.request.tokens[row.start : row.start + row.n_tokens]
    n_wanted = len(drafted) + 1 if row.samples else 0
    return Segment([*text, *drafted], row.start, row.request.table.pages, n_wanted)
