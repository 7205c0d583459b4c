"""Verification and acceptance as one captured step, for batches in which every row decodes.

Rows are left-padded: the text's last token and the speculation fill the last of a row's N + 1 positions
(attention.paged.left_padded, left_padded_trees). The host writes one line of numbers per row and waits once for the
outcome.

A verifier of as many nodes as its lookahead is for chains. With more nodes it verifies trees, and chains as trees: the
step also moves the keys and values of accepted nodes right behind the text.
"""

import struct
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.algo.tree import accept_along, is_deeper, nodes_at
from saguaro.algo.verification import accept
from saguaro.attention.paged import StepTrees, from_left, left_padded, left_padded_trees
from saguaro.attention.step import Step
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

# Columns of a row's line; the tokens come last, and of trees the parents behind them. DECIDES: 1 if the step's own
# decision counts, 0 if the eager verifier decides and nothing may be moved.
SLOT, TEXT, LENGTH, SEED, TEMPERATURE, DECIDES, TOKENS = range(7)


@dataclass(frozen=True)
class GraphPending:
    """A running captured verification."""

    slots: list[int]
    length: list[int]
    n_nodes: int | None  # width of the speculation, if it is of trees
    result: Mirror  # [rows, 2]: n_accepted, bonus (or BROKEN); of trees [rows, 2 + D]: also the path, then -1
    began: Moment
    done: Moment

    def outcome(self) -> Outcome:
        """Wait for the result."""
        self.done.wait()
        found = self.result.host[: len(self.slots)].clone()
        path = None
        if self.n_nodes is not None:
            path = F.pad(found[:, 2:], (0, self.n_nodes + 2 - found.shape[1]), value=-1)
        return Outcome(torch.tensor(self.slots), torch.tensor(self.length), found[:, 0], found[:, 1], path)

    def seconds(self) -> float | None:
        """See Pending."""
        return self.done.since(self.began)


@dataclass
class _Buffers:
    """Fixed input and output buffers of the captured step."""

    lines: Mirror  # [rows, TOKENS + N + 1] int64; of trees [rows, TOKENS + N + 1 + N]
    result: Mirror  # [rows, 2] int64; of trees [rows, 2 + D]
    starts: Tensor  # [rows + 1] int32: 0, 1, 2 ..
    steps: Tensor  # [N + 1] int64: 0..N
    logits: dict[int, Tensor] = field(default_factory=dict)  # by rows: [rows * (N + 1), V], valid until the next step


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
        lookahead: int,  # D: most depth of a tree, most tokens of a chain
        longest: int,
        nodes: int | None = None,  # N: most nodes of a tree; None: as many as the lookahead, only chains are captured
        is_shared: bool = True,  # shared noise; otherwise the eager verifier decides
    ) -> None:
        self._eager, self._runner, self._kernels, self._is_shared = eager, runner, kernels, is_shared
        self._n_known, self._lookahead, self._longest = n_known, lookahead, longest
        self._n_nodes = max(lookahead, nodes or 0)
        cache = runner.cache
        self._page_size = cache.page_size
        self._graphs, self._began, self._done = Graphs(cache.device), Moment(cache.device), Moment(cache.device)
        device, size, width = cache.device, bucket(max_rows), self._n_nodes + 1
        n_parents, n_path = (self._n_nodes, lookahead) if self._n_nodes > lookahead else (0, 0)
        self._tables = PageTables(max_rows, longest, cache.page_size, device)
        self._at = _Buffers(
            lines=Mirror((size, TOKENS + width + n_parents), torch.int64, device),
            result=Mirror((size, 2 + n_path), torch.int64, device),
            starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            steps=torch.arange(width, device=device),
        )
        self._lines = self._at.lines.host.numpy()

    @torch.inference_mode()
    def launch(self, batch: Batch, spec: Speculation) -> Pending:
        """See Verifier."""
        requests = [row.request for row in batch.rows]
        decides = self._is_shared and all(map(_is_simple, requests))
        if not self._computes(batch, spec, decides):
            return self._eager.launch(batch, spec)
        drafted = [tokens[:n] for tokens, n in zip(spec.tokens.tolist(), spec.length.tolist(), strict=True)]
        self._tables.write((request.slot, request.table.pages) for request in requests)
        line = partial(self._line, self._nodes_at(len(requests)), decides)
        self._replay(list(starmap(line, zip(requests, drafted, spec.parents(), strict=True))))
        if not decides:
            pending = self._eager.decide(batch, spec, drafted, self._places(drafted))
            self._eager.straighten(batch, pending)
            return pending
        self._at.result.fetch(len(requests))
        self._done.mark()
        lengths = [len(tokens) for tokens in drafted]
        slots = [request.slot for request in requests]
        n_nodes = None if spec.parent is None else spec.tokens.shape[1]
        return GraphPending(slots, lengths, n_nodes, self._at.result, self._began, self._done)

    def warm(self, size: int) -> None:
        """Capture the step for this batch size, with padding rows."""
        self._replay([self._padding_line(self._nodes_at(size))] * size)

    def _nodes_at(self, n_rows: int) -> int:
        """Nodes per row of the step for this batch size; chains only, if not more than the lookahead."""
        return nodes_at(n_rows, self._n_nodes, self._lookahead)

    def _computes(self, batch: Batch, spec: Speculation, decides: bool) -> bool:
        """Whether the captured step is for this batch.

        It neither computes nor accepts nodes deeper than the lookahead; the eager verifier could accept them.
        """
        if not all(row.samples and row.n_tokens == 1 for row in batch.rows):
            return False
        n = self._nodes_at(len(batch.rows))
        if bool((spec.length > n).any()):
            return False
        if spec.parent is None:
            return n <= self._lookahead or decides or bool((spec.length <= self._lookahead).all())
        return n > self._lookahead and (decides or not is_deeper(spec.parent, spec.length, self._lookahead))

    def _replay(self, lines: list[list[int]]) -> None:
        size = bucket(len(lines))
        lines += [self._padding_line(self._nodes_at(size))] * (size - len(lines))
        self._lines[:size, : len(lines[0])] = lines
        self._began.mark()
        self._at.lines.send(size)
        self._graphs.run(size, partial(self._step, size))

    def _line(
        self, n: int, decides: bool, request: Request, drafted: list[int], parents: list[int] | None
    ) -> list[int]:
        n_padding = n - len(drafted)
        temperature = float_bits(request.params.temperature)
        facts = [request.slot, len(request.tokens), len(drafted), request.seed, temperature, decides]
        line = [*facts, *[0] * n_padding, request.tokens[-1], *drafted]
        if n > self._lookahead:
            line += [*(range(-1, len(drafted) - 1) if parents is None else parents), *[-1] * n_padding]
        return line

    def _padding_line(self, n: int) -> list[int]:
        line = [self._tables.padding_slot, 0, -1, 0, 0, 0, *[0] * (n + 1)]
        return [*line, *[-1] * n] if n > self._lookahead else line

    def _step(self, size: int) -> None:
        """Compute, choose and accept on the device; of trees, move what was accepted."""
        most = self._nodes_at(size)
        lines, starts = self._at.lines.device[:size], self._at.starts[: size + 1] * (most + 1)
        text, n, pages = lines[:, TEXT], lines[:, LENGTH], self._tables.device[lines[:, SLOT]]
        tokens, parent = lines[:, TOKENS : TOKENS + most + 1], lines[:, TOKENS + most + 1 : TOKENS + 2 * most + 1]
        where = (text, n, pages, starts, self._page_size, self._longest)
        if most <= self._lookahead:
            targets, drafted = self._targets(size, left_padded(tokens, *where))
            n_accepted, bonus = accept(targets, drafted, n.clamp(min=0))
            self._at.result.device[:size, :2] = torch.stack((n_accepted, bonus), 1)
            return
        step, grown = left_padded_trees(tokens, parent, *where, self._lookahead)
        targets, drafted = self._targets(size, step)
        n_accepted, path, bonus = accept_along(targets, drafted, parent, n.clamp(min=0), grown.paths, grown.depth)
        self._runner.cache.move(*moves(path, lines[:, DECIDES], n, grown))
        self._at.result.device[:size] = torch.cat((n_accepted[:, None], bonus[:, None], path), 1)

    def _targets(self, size: int, step: Step) -> tuple[Tensor, Tensor]:  # [R, N+1], [R, N]
        """Run a step: the target's tokens after each row's text and nodes, and the nodes, from the left."""
        steps, lines = self._at.steps[: step.n_queries], self._at.lines.device[:size]
        logits = self._runner.logits(self._runner.hidden(step))
        self._at.logits[size] = logits
        noise = noise_of(lines[:, TEMPERATURE], lines[:, SEED], len(steps))
        chosen = self._kernels.choose(logits, *noise, step.positions + 1, self._n_known)
        at = from_left(lines[:, LENGTH], steps)  # [R, N+1]
        return chosen.view(size, len(steps)).gather(1, at), step.tokens.view(size, len(steps)).gather(1, at[:, 1:])

    def _places(self, drafted: list[list[int]]) -> Tensor:  # [L, V]
        """The logits after the text and each speculated token of every row."""
        width = self._nodes_at(len(drafted)) + 1
        wanted = [at for row, tokens in enumerate(drafted) for at in range((row + 1) * width)[-1 - len(tokens) :]]
        logits = self._at.logits[bucket(len(drafted))]
        return logits.index_select(0, torch.tensor(wanted, device=logits.device))


def moves(
    path: Tensor,  # [R, D] int64: accepted nodes, then -1
    decides: Tensor,  # [R] int64: 0: nothing is moved
    n: Tensor,  # [R] int64: nodes; -1: padding row
    grown: StepTrees,
) -> tuple[Tensor, Tensor]:  # sources [R * D], kv_index [R * D]
    """Where the keys and values of accepted nodes are, and their places right behind the text.

    An entry with nothing to move copies its row's root onto itself, which no other entry reads or writes. A padding row
    has no root, and copies the first row's, or the first place of all if every row is padding.

    >>> grown = StepTrees(*[torch.empty(0)] * 3, torch.tensor([[7], [3]]), torch.tensor([[8, 9, 10], [-1, -1, -1]]))
    >>> moves(torch.tensor([[1, 2], [-1, -1]]), torch.tensor([1, 0]), torch.tensor([3, -1]), grown)
    (tensor([ 9, 10,  7,  7]), tensor([8, 9, 7, 7]))
    """
    root = torch.where(n[:, None] < 0, grown.root[:1].clamp(min=0), grown.root)
    is_moved = (path >= 0) & (decides[:, None] > 0)
    sources = torch.where(is_moved, grown.kv_index.gather(1, path.clamp(min=0)), root)
    places = torch.where(is_moved, grown.kv_index[:, : path.shape[1]], root)
    return sources.flatten(), places.flatten()


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
