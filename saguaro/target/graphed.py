"""Verification and acceptance as one captured step, for batches in which every row decodes.

Rows are left-padded: text and speculation fill the last of a row's K + 1 positions (attention.paged.Ends), so padding
attends only to computed text. The host writes one line of numbers per row and waits once for the outcome.
"""

import struct
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import torch
from torch import Tensor

from saguaro.algo.verification import accept
from saguaro.attention.paged import from_left, left_padded
from saguaro.device.graphs import Graphs, Mirror, Moment, as_float, bucket
from saguaro.kernels.bundle import Kernels
from saguaro.kv.tables import PageTables
from saguaro.runner.runner import Runner
from saguaro.target.request import Request
from saguaro.target.sampler import is_plain
from saguaro.target.scheduler import Batch
from saguaro.target.verifier import EagerVerifier, Pending
from saguaro.types import Outcome, Speculation

MOST_FLOAT = torch.finfo(torch.float32).max

SLOT, TEXT, LENGTH, SEED, TEMPERATURE, TOKENS = range(6)  # columns of a row's line; the tokens come last


@dataclass(frozen=True)
class GraphPending:
    """A running captured verification."""

    slots: list[int]
    length: list[int]
    result: Mirror  # [rows, 2]: n_accepted, bonus (or BROKEN)
    began: Moment
    done: Moment

    def outcome(self) -> Outcome:
        """Wait for the result."""
        self.done.wait()
        found = self.result.host[: len(self.slots)].clone()
        return Outcome(torch.tensor(self.slots), torch.tensor(self.length), found[:, 0], found[:, 1])

    def seconds(self) -> float | None:
        """See Pending."""
        return self.done.since(self.began)


@dataclass
class _Buffers:
    """Fixed input and output buffers of the captured step."""

    lines: Mirror  # [rows, TOKENS + K + 1] int64
    result: Mirror  # [rows, 2] int64
    starts: Tensor  # [rows + 1] int32: row r begins at r * (K + 1)
    steps: Tensor  # [K + 1] int64: 0..K
    logits: dict[int, Tensor] = field(default_factory=dict)  # by rows: [rows * (K + 1), V], valid until the next step


class GraphVerifier:
    """Replays a captured step for batches of decoding rows. Other batches go to the eager verifier."""

    runs_ahead = True

    def __init__(
        self,
        eager: EagerVerifier,
        runner: Runner,
        kernels: Kernels,
        *,
        n_known: int,
        max_rows: int,
        lookahead: int,
        longest: int,
        is_shared: bool = True,  # shared noise; otherwise the eager verifier decides
    ) -> None:
        self._eager, self._runner, self._kernels, self._is_shared = eager, runner, kernels, is_shared
        self._n_known, self._lookahead, self._longest = n_known, lookahead, longest
        cache = runner.cache
        self._page_size = cache.page_size
        self._graphs, self._began, self._done = Graphs(cache.device), Moment(cache.device), Moment(cache.device)
        device, size, width = cache.device, bucket(max_rows), lookahead + 1
        self._tables = PageTables(max_rows, longest, cache.page_size, device)
        self._at = _Buffers(
            lines=Mirror((size, TOKENS + width), torch.int64, device),
            result=Mirror((size, 2), torch.int64, device),
            starts=torch.arange(size + 1, dtype=torch.int32, device=device) * width,
            steps=torch.arange(width, device=device),
        )
        self._lines = self._at.lines.host.numpy()

    @torch.inference_mode()
    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """See Verifier."""
        if not all(row.samples and row.n_tokens == 1 for row in batch.rows):
            return self._eager.launch(batch, spec)
        requests = [row.request for row in batch.rows]
        drafted = [tokens[:n] for tokens, n in zip(spec.tokens.tolist(), spec.length.tolist(), strict=True)]
        self._tables.write((request.slot, request.table.pages) for request in requests)
        self._replay(list(starmap(self._line, zip(requests, drafted, strict=True))))
        if not (self._is_shared and all(map(_is_simple, requests))):
            return self._eager.decide(batch, spec, drafted, self._places(drafted))
        self._at.result.fetch(len(requests))
        self._done.mark()
        lengths = [len(tokens) for tokens in drafted]
        slots = [request.slot for request in requests]
        return GraphPending(slots, lengths, self._at.result, self._began, self._done)

    def warm(self, size: int) -> None:
        """Capture the step for this batch size, with padding rows."""
        self._replay([self._padding_line()] * size)

    def _replay(self, lines: list[list[int]]) -> None:
        size = bucket(len(lines))
        lines += [self._padding_line()] * (size - len(lines))
        self._lines[:size] = lines
        self._began.mark()
        self._at.lines.send(size)
        self._graphs.run(size, partial(self._step, size))

    def _line(self, request: Request, drafted: list[int]) -> list[int]:
        padding = [0] * (self._lookahead - len(drafted))
        temperature = float_bits(request.params.temperature)
        facts = [request.slot, len(request.tokens), len(drafted), request.seed, temperature]
        return [*facts, *padding, request.tokens[-1], *drafted]

    def _padding_line(self) -> list[int]:
        return [self._tables.padding_slot, 0, -1, 0, 0, *[0] * (self._lookahead + 1)]

    def _step(self, size: int) -> None:
        """Compute, choose and accept on the device."""
        steps, lines = self._at.steps, self._at.lines.device[:size]
        n, tokens, pages = lines[:, LENGTH], lines[:, TOKENS:], self._tables.device[lines[:, SLOT]]
        starts = self._at.starts[: size + 1]
        step = left_padded(tokens, lines[:, TEXT], n, pages, starts, self._page_size, self._longest)
        logits = self._runner.logits(self._runner.hidden(step))
        self._at.logits[size] = logits
        noise = noise_of(lines[:, TEMPERATURE], lines[:, SEED], len(steps))
        chosen = self._kernels.choose(logits, *noise, step.positions + 1, self._n_known)
        at = from_left(n, steps)  # [R, K+1]
        targets = chosen.view(size, len(steps)).gather(1, at)
        n_accepted, bonus = accept(targets, tokens.gather(1, at[:, 1:]), n.clamp(min=0))
        self._at.result.device[:size] = torch.stack((n_accepted, bonus), 1)

    def _places(self, drafted: list[list[int]]) -> Tensor:  # [L, V]
        """The logits after the text and each speculated token of every row."""
        width = self._lookahead + 1
        wanted = [at for row, tokens in enumerate(drafted) for at in range((row + 1) * width)[-1 - len(tokens) :]]
        logits = self._at.logits[bucket(len(drafted))]
        return logits.index_select(0, torch.tensor(wanted, device=logits.device))


def _is_simple(request: Request) -> bool:
    return request.params.logprobs is None and is_plain(request.params)


def noise_of(temperature: Tensor, seeds: Tensor, n: int) -> tuple[Tensor, Tensor]:  # [R] as they travel -> [R * n]
    """Temperature and seed, repeated for each of a row's n positions."""
    return as_float(temperature)[:, None].expand(-1, n).flatten(), seeds[:, None].expand(-1, n).flatten()


def float_bits(value: float) -> int:
    """The bits of a float32 as an int, to store it in an int64 line.

    >>> hex(float_bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", min(value, MOST_FLOAT)), "little")
