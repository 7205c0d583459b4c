"""The verifier: computes text and speculation in one step, then decides by a rule.

The runner replays a captured step if it has one for the rows. That step also decides the requests whose rules it knows
(saguaro.target.step_rules), and the host waits for its outcome. Any other request is decided on the host, from the
step's logits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from saguaro.algo.verification import BROKEN
from saguaro.attention.sdpa import kv_indices
from saguaro.attention.step import Segment
from saguaro.device.graphs import guard, to_device
from saguaro.runner.captured import Followed, Room
from saguaro.runner.runner import Ran
from saguaro.target.graphed import decision_of
from saguaro.target.pinned import Pins
from saguaro.target.request import Request
from saguaro.target.rules import Decision, Rule, SharedNoise
from saguaro.target.sampler import contexts, logprobs, prompt_logprobs
from saguaro.target.scheduler import Batch, BatchRow
from saguaro.target.step_rules import StepRules
from saguaro.types import Features, Outcome, Speculation, TokenLogprobs

SCORED_BYTES = 2**25  # limit of the prompt logits held at once


@dataclass(frozen=True)
class Pending:
    """A running verification."""

    batch: Batch
    spec: Speculation
    slots: list[int]  # [B] at launch; a request that is aborted later loses its slot
    drafted: list[list[int]]  # [B][length]
    decided: Followed | Decision  # by the captured step, or by the host; its tensors may still be computed
    raw: Tensor | None = None  # [L, known V] unmodified logits, if logprobs are requested
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()  # [R] of prompt tokens, if requested
    threads: Callable[[], AbstractContextManager[None]] = nullcontext  # of the runner
    features: Features | None = None  # of an eager step's text and accepted tokens, if the draft reads them

    def outcome(self) -> Outcome:
        """Wait for the result."""
        slots = torch.tensor(self.slots, dtype=torch.int64)
        decision = self._decision()
        outcome = Outcome(slots, self.spec.length, *decision, (), self.scored, self._read(decision))
        if self.raw is None:
            return outcome
        with self.threads():
            return replace(outcome, logprobs=self._logprobs(outcome, self.raw))

    def seconds(self) -> float | None:
        """Device time of a captured step, available after the result; None: the host measures launch and wait."""
        return self.decided.seconds() if isinstance(self.decided, Followed) else None

    def _decision(self) -> Decision:
        if isinstance(self.decided, Followed):
            return decision_of(self.decided.wait(), self.spec)
        n_accepted, bonus, path = self.decided
        return n_accepted.cpu(), bonus.cpu(), None if path is None else path.cpu()

    def _read(self, decision: Decision) -> Features | None:
        """What the draft reads. Of a captured step it is copied, because the next step overwrites it."""
        if not isinstance(self.decided, Followed) or self.decided.features is None:
            return self.features
        known: list[tuple[int, int, int]] = []
        values: list[Tensor] = []
        each = zip(self.batch.rows, self.slots, decision[0].tolist(), self.decided.features, strict=True)
        for row, slot, n, own in each:
            if row.request.speculates:
                known.append((slot, row.start, 1 + n))
                values.append(own[: 1 + n])
        return _told(known, torch.cat(values) if values else self.decided.features[:0].flatten(0, 1))

    def _logprobs(self, outcome: Outcome, raw: Tensor) -> tuple[tuple[TokenLogprobs, ...], ...]:
        found: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        decided = zip(outcome.accepted(), outcome.bonus.tolist(), strict=True)
        for row, tokens, (nodes, last) in zip(self.batch.sampling, self.drafted, decided, strict=True):
            written = [*(tokens[node] for node in nodes), *([] if last == BROKEN else [last])]
            places = [first, *(first + 1 + node for node in nodes)][: len(written)]
            n_top = row.request.params.logprobs
            if n_top is None:
                found.append(())
            else:
                found.append(logprobs(raw[places], torch.tensor(written, device=raw.device), n_top))
            first += len(tokens) + 1
        return tuple(found)


class Runs(Protocol):
    """Runs steps of the target: a Runner, or what leads the runners of several ranks."""

    @property
    def device(self) -> torch.device:
        """See Runner."""

    @property
    def page_size(self) -> int:
        """See Runner."""

    @property
    def captures(self) -> bool:
        """See Runner."""

    @property
    def room(self) -> Room | None:
        """See Runner."""

    def threads(self) -> AbstractContextManager[None]:
        """See Runner."""

    def takes(self, rows: Sequence[Segment]) -> bool:
        """See Runner."""

    def run(self, rows: Sequence[Segment], is_followed: bool) -> Followed | Ran:
        """See Runner."""

    def last_logits(self, rows: Sequence[Segment]) -> Tensor:
        """See Runner."""

    def warm(self, size: int) -> None:
        """See Runner."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See Runner."""

    def move(self, sources: Tensor, kv_index: Tensor) -> None:
        """See Runner."""


class Verifier:
    """Launches verifications on the target. Handles every batch and request."""

    def __init__(self, runner: Runs, rule: Rule, *, n_known: int, pins: Pins | None = None) -> None:
        self._runner, self._rule, self._n_known, self._pins = runner, rule, n_known, pins
        room = runner.room if isinstance(rule, SharedNoise) else None
        self._step_rules = None if room is None else StepRules(room, n_known)

    @property
    def runs_ahead(self) -> bool:
        """Whether launch returns before the result is computed, so that the host can continue."""
        return self._runner.captures

    def warm(self, size: int) -> None:
        """Capture the step for this batch size."""
        with guard(self._runner.device):
            self._runner.warm(size)

    @torch.inference_mode()
    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """Start computing a batch. spec has one row per sampling row, at most as long as its lookahead."""
        pinned = nullcontext() if self._pins is None else self._pins(sum(row.n_tokens for row in batch.rows))
        with guard(self._runner.device), pinned, self._runner.threads():
            return self._launch(batch, spec)

    def _launch(self, batch: Batch, spec: Speculation) -> Pending:
        drafted = [tokens[:n] for tokens, n in zip(spec.tokens.tolist(), spec.length.tolist(), strict=True)]
        each = zip_longest(batch.rows, drafted, spec.parents())  # the last rows sample nothing
        segments = [_segment(row, tokens or (), parents) for row, tokens, parents in each]
        ran = self._run(segments, [row.request for row in batch.rows])
        slots = [row.request.slot for row in batch.sampling]
        wants_logprobs = any(row.request.params.logprobs is not None for row in batch.sampling)
        if isinstance(ran, Followed):
            raw = self._runner.last_logits(segments)[:, : self._n_known] if wants_logprobs else None
            return Pending(batch, spec, slots, drafted, ran, raw)
        logits, hidden, computed = ran
        raw = logits[:, : self._n_known].clone() if wants_logprobs else None
        decision = self.decide(batch, spec, drafted, logits)
        self.straighten(batch, decision)
        scored = self._score(batch, segments, hidden)
        features = None if computed is None else _features(batch, segments, decision, computed)
        return Pending(batch, spec, slots, drafted, decision, raw, scored, self._runner.threads, features)

    def _run(self, segments: list[Segment], requests: list[Request]) -> Followed | Ran:
        """Run the step; a captured one decides, if it can."""
        rules = self._step_rules
        if rules is None or not rules.take(segments, requests) or not self._runner.takes(segments):
            return self._runner.run(segments, False)
        ran = self._runner.run(rules.told(segments, requests), True)
        rules.launched()
        return ran

    def decide(self, batch: Batch, spec: Speculation, drafted: list[list[int]], logits: Tensor) -> Decision:
        """Apply the rule to the logits, [L, V], after the text and each speculated token of every sampling row."""
        each = zip(batch.sampling, drafted, spec.parents(), strict=True)
        places = [place for row, tokens, parents in each for place in contexts(row.request, tokens, parents)]
        none = torch.zeros(0, dtype=torch.int64)
        return self._rule(logits, places, spec) if places else (none, none, None)

    def straighten(self, batch: Batch, decision: Decision) -> None:
        """Move the keys and values of accepted nodes right behind the text, as if they had been a chain."""
        n_accepted, _, paths = decision
        if paths is None:
            return
        page_size = self._runner.page_size
        sources: list[Tensor] = []
        places: list[Tensor] = []
        for row, path, n in zip(batch.sampling, paths.tolist(), n_accepted.tolist(), strict=True):
            if path[:n] != list(range(n)):
                end = row.start + row.n_tokens
                own = kv_indices(row.request.table.pages, end + path[n - 1] + 1, page_size)[end:]
                sources.append(own[path[:n]])
                places.append(own[:n])
        if sources:
            self._runner.move(torch.cat(sources), torch.cat(places))

    def _score(
        self, batch: Batch, segments: list[Segment], hidden: Tensor | None
    ) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """For each row, the log-probabilities of the prompt tokens after those of this step; hidden: [T, D]."""
        if not any(row.request.n_unscored for row in batch.rows):
            return ()
        assert hidden is not None, "a row whose prompt is not scored still reads it"
        found: list[tuple[TokenLogprobs, ...]] = []
        first = 0
        for row, segment in zip(batch.rows, segments, strict=True):
            own = hidden[first : first + row.n_tokens]
            found.append(self._score_row(row, own) if row.request.n_unscored else ())
            first += len(segment.tokens)
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
    request, n_wanted = row.request, len(drafted) + 1 if row.samples else 0
    tokens = [*request.tokens[row.start : row.start + row.n_tokens], *drafted]
    return Segment(tokens, row.start, request.table.pages, n_wanted, parents, request.slot)


def _features(batch: Batch, segments: list[Segment], decision: Decision, computed: Tensor) -> Features:
    """Those of the rows that a draft knows, of text and accepted tokens; computed [T, F]: of all tokens of the step."""
    n_accepted, _, paths = decision
    nodes = [list(range(n)) for n in n_accepted.tolist()]
    if paths is not None:
        nodes = [path[: len(own)] for path, own in zip(paths.tolist(), nodes, strict=True)]
    nodes += [[]] * (len(batch.rows) - len(nodes))  # the last rows sample nothing
    known: list[tuple[int, int, int]] = []
    places: list[int] = []
    first = 0
    for row, segment, own in zip(batch.rows, segments, nodes, strict=True):
        if row.request.speculates:
            end = first + row.n_tokens
            places += [*range(first, end), *(end + node for node in own)]
            known.append((segment.slot, row.start, row.n_tokens + len(own)))
        first += len(segment.tokens)
    return _told(known, computed.index_select(0, to_device(places, computed.device)))


def _told(known: list[tuple[int, int, int]], values: Tensor) -> Features:
    """Features of rows: slot, position of the first token and number of tokens of each."""
    slots, starts, lengths = torch.tensor(known, dtype=torch.int64).view(-1, 3).unbind(1)
    return Features(slots, starts, lengths, values)
