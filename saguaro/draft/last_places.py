"""The last places of texts, computed in one function that a GPU captures.

text      c0 c1 c2 c3 c4 c5            the row computes c4 and c5 now, and the function has room for n = 3
places             .  c4 c5            what comes before the row's first new place is padding: its keys and values
                                       are written to a place that nothing reads
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from saguaro.attention.paged import kv_indices_at
from saguaro.attention.step import Step
from saguaro.device.graphs import Graphs, Mirror, Moment, bucket
from saguaro.draft.inputs import TextInputs
from saguaro.kv.tables import PageTables
from saguaro.runner.runner import Runner

SLOT, END, SHIFT, NEW, TOKENS = range(5)  # columns of a row's line; from TOKENS on the last n tokens before the end


@dataclass(frozen=True)
class LastPlaces:
    """The last places of B texts, on the device."""

    tokens: Tensor  # [B, n] int64: the last one that of the place before the end
    slots: Tensor  # [B] int64
    end: Tensor  # [B] int64: place after the last; 0: padding row
    shift: Tensor  # [B] int64: see draft/inputs.py
    new: Tensor  # [B] int64: first place that is computed
    pages: Tensor  # [B, P] int32
    unused: Tensor  # [B] int64: KV index that padding is written to

    def step(self, inputs: TextInputs, page_size: int, longest: int) -> Step:
        """The step that computes them."""
        n, device = self.tokens.shape[1], self.tokens.device
        places = self.end[:, None] - n + torch.arange(n, device=device)
        is_real = (places >= self.new[:, None]) & (self.end > 0)[:, None]
        kv_index = kv_indices_at(self.pages, places, is_real, page_size)
        starts = torch.arange(len(self.end) + 1, dtype=torch.int32, device=device) * n
        rotary = inputs.rotary(places.clamp(min=0), self.shift)
        return Step(
            self.tokens.flatten(), rotary.flatten(), torch.where(is_real, kv_index, self.unused[:, None]).flatten(),
            starts[:0].long(), self.pages, starts, self.end.int(), n, longest,
            features=inputs.of_places(self.slots, places, self.shift),
        )  # fmt: skip


@dataclass(frozen=True)
class Behind:
    """Places of a text to compute: n of them, from the first that is not computed."""

    slot: int
    pages: Sequence[int]
    tokens: Sequence[int]  # of the places before the end, the last ones at least
    n_computed: int
    n: int
    shift: int


class CatchUp:
    """Computes the last places of texts, and nothing after them: their keys and values are read with features."""

    def __init__(
        self, runner: Runner, inputs: TextInputs, graphs: Graphs, *, n: int, max_rows: int, longest: int, unused: int
    ) -> None:
        """n: most places of a row; unused: KV index of a place that nothing reads."""
        self.n, self._runner, self._inputs, self._graphs = n, runner, inputs, graphs
        self._longest, self._unused, device = longest, unused, runner.device
        self._tables = PageTables(max_rows, longest, runner.page_size, device)
        self._lines = Mirror((bucket(max_rows), TOKENS + n), torch.int64, device)
        self._host, self._sent = self._lines.host.numpy(), Moment(device)

    def __call__(self, rows: Sequence[Behind]) -> None:
        """Compute these."""
        self._sent.wait()
        self._tables.write((row.slot, row.pages) for row in rows)
        self._run(bucket(len(rows)), [self._line(row) for row in rows])

    def warm(self, size: int) -> None:
        """Capture the function for this batch size, with padding rows."""
        self._sent.wait()
        self._run(size, [])

    def _run(self, size: int, lines: list[list[int]]) -> None:
        padding = [self._tables.padding_slot, *[0] * (TOKENS - 1 + self.n)]
        self._host[:size] = lines + [padding] * (size - len(lines))
        self._lines.send(size)
        self._sent.mark()
        self._graphs.run(("catch up", size), partial(self._compute, size))

    def _line(self, row: Behind) -> list[int]:
        last = row.tokens[-self.n :]
        facts = [row.slot, row.n_computed + row.n, row.shift, row.n_computed]
        return [*facts, *[0] * (self.n - len(last)), *last]

    def _compute(self, size: int) -> None:
        lines = self._lines.device[:size]
        slots, end, shift, new = lines[:, :TOKENS].unbind(1)
        unused = torch.full_like(end, self._unused)
        at = LastPlaces(lines[:, TOKENS:], slots, end, shift, new, self._tables.device[slots], unused)
        self._runner.hidden(at.step(self._inputs, self._runner.page_size, self._longest))
