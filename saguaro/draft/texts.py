"""The texts of a draft's rows: their keys and values on the draft's own pages, read in chunks."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saguaro.attention.step import Segment, make_step
from saguaro.device.graphs import Graphs, SideStream
from saguaro.draft.inputs import TextInputs
from saguaro.draft.last_places import Behind, CatchUp
from saguaro.draft.rows import DraftRow
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool, PageTable
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import make_runner
from saguaro.target.step_cost import StepCost, Work
from saguaro.types import Features

MAX_READ = 512  # tokens of text read per round: as many as the target computes
CHUNK = 64  # tokens of text read between two checks for the outcome; a GPU's work is only launched

now = time.perf_counter


@dataclass
class Trunk:
    """A row's text in the draft."""

    table: PageTable
    n_computed: int  # tokens whose keys and values are on the pages: the first places
    shift: int  # tokens of the text before the last place that have none (inputs.py)
    text: list[int]  # the row's


class DraftTexts:
    """A draft model and the texts that it has read."""

    def __init__(
        self,
        model: Transformer,
        kv: KVPlan,
        *,
        inputs: TextInputs,
        n_after: int,
        max_rows: int,
        kernels: Kernels | None = None,
        n_scratch: int = 0,
    ) -> None:
        """n_after: tokens that may follow a text on its pages; n_scratch: further KV places, behind all pages. With
        kernels, steps are captured."""
        self._model, self.inputs, self._n_after = model, inputs, n_after
        self.longest = min(kv.longest, model.spec.max_length)
        self.pool = PagePool(kv.n_pages, kv.page_size)
        self.scratch = kv.n_pages * kv.page_size  # KV index of the first place that is on no page
        longest = kv.longest
        n_more = n_scratch + 1  # and a place that nothing reads
        kv = KVPlan(kv.n_pages - (-n_more // kv.page_size), kv.page_size, kv.bytes_per_token, kv.max_length)
        self.cache = KVCache(kv, model.spec, model.device, model.dtype)
        self.runner = make_runner(model, self.cache, kernels, longest)
        self._stream, self._graphs = SideStream(model.device), Graphs(model.device)
        self._catches_up = None  # a language model computes text within its drafts
        if inputs.reads_features and kernels is not None:
            unused = self.scratch + n_scratch
            sizes = {"n": n_after, "max_rows": max_rows, "longest": self.longest, "unused": unused}
            self._catches_up = CatchUp(self.runner, inputs, self._graphs, **sizes)
        self.trunks: dict[int, Trunk] = {}
        self._pace = StepCost()  # of reading texts

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows, reusing cached pages. Rows with token ids beyond the model's vocabulary are skipped."""
        for row in rows:
            params = row.request.params
            named = (*params.logit_bias, *params.allowed_token_ids, *row.request.stop_ids)
            if max(*row.text, *named, 0) < self._model.spec.n_vocab:
                table, n_cached = self.pool.match(self.inputs.keys(row.text))
                self.trunks[row.slot] = Trunk(table, n_cached, self.inputs.first, row.text)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        self.inputs.retire(slots)
        for slot in slots:
            trunk = self.trunks.pop(slot, None)
            if trunk is not None:
                self.pool.release(trunk.table)

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Keep the computed part of each text. Its last token, the bonus, is never computed yet."""
        for row in rows:
            trunk = self.trunks.get(row.slot)
            if trunk is not None:
                trunk.n_computed = min(trunk.n_computed, max(0, self.length(row) - 1))
                self._publish(row, trunk)

    def receive(self, features: Features | None) -> None:
        """Keep what the target computed of texts, if the model reads it."""
        if features is None or not self.inputs.reads_features:
            return
        self._stream.take(features.values)
        with self.working():
            for slot, start, values in features.rows():
                trunk = self.trunks.get(slot)
                if trunk is not None:
                    if trunk.shift == self.inputs.first and start > self._needed(trunk):
                        self._match_again(trunk)
                    trunk.shift += self.inputs.put(slot, start, values, self._needed(trunk))
            self.inputs.put_recent(features)

    def working(self) -> AbstractContextManager[object]:
        """Where the draft computes: on its stream of a GPU, or on the library's threads."""
        return self.runner.threads() if self.runner.is_native else self._stream()

    def length(self, row: DraftRow) -> int:
        """Places of a row's text. The last token has the last one."""
        return len(row.text) - self.trunks[row.slot].shift

    def read(self, rows: Sequence[DraftRow], is_late: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Compute up to MAX_READ tokens of texts that are far behind, in chunks; at least a page of the first. Returns
        whether there were any.

        The time limit applies while other rows are ready to be drafted for and would wait. On a GPU reading runs in the
        background, and MAX_READ tokens of a small model are limit enough.
        """
        if self._model.device.type != "cpu" or not any(self.is_near(row) for row in rows):
            seconds = math.inf
        left, began = MAX_READ, now()
        least = self.cache.page_size
        for row in rows:
            while left > 0 and not self.is_near(row) and self.n_behind(row) > 0 and self.reserve(row):
                trunk, starts = self.trunks[row.slot], now()
                fitting = CHUNK if self._model.device.type == "cpu" else MAX_READ
                if seconds < math.inf:
                    fitting = max(least, min(CHUNK, self._pace.room(seconds - (starts - began), trunk.n_computed)))
                n = min(left, fitting, self.n_behind(row))
                self.compute([(row, n)])
                self._pace.learn(Work.of(trunk.n_computed - n, n), now() - starts)
                left -= n
                if is_late() or now() - began >= seconds:
                    return True
        return left < MAX_READ

    def compute(self, rows: Sequence[tuple[DraftRow, int]]) -> None:
        """Compute the next n places of each of these rows' texts."""
        segments: list[Segment] = []
        shifts: list[int] = []
        features: list[Tensor] = []
        for row, n in rows:
            trunk = self.trunks[row.slot]
            first = trunk.n_computed + trunk.shift
            segments.append(Segment(row.text[first : first + n], trunk.n_computed, trunk.table.pages, 0))
            shifts += [trunk.shift] * n
            own = self.inputs.of_text(row.slot, first, n)
            features += [] if own is None else [own]
            trunk.n_computed += n
        step = make_step(segments, self.cache.page_size, self._model.device)
        if features:
            shift = torch.tensor(shifts, device=self._model.device)
            rotary = self.inputs.rotary(step.positions[:, None], shift)[:, 0]
            step = replace(step, positions=rotary, features=torch.cat(features))
        self.runner.hidden(step)

    def catch_up(self, rows: Sequence[DraftRow]) -> None:
        """Compute the places of these texts that can be computed now, but the last."""
        behind = [(row, n) for row in rows if (n := self.n_behind(row)) > 0]
        most = 0 if self._catches_up is None else self._catches_up.n
        far, near = ([(row, n) for row, n in behind if (n <= most) == is_near] for is_near in (False, True))
        if far:
            self.compute(far)
        if near and self._catches_up is not None:
            self._catches_up([self._behind(row, n) for row, n in near])

    def ready(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """The rows that are nearly computed and have room."""
        return [row for row in rows if self.is_near(row) and self.reserve(row)]

    def is_near(self, row: DraftRow) -> bool:
        """Whether few enough tokens are left to compute them within a draft step."""
        trunk = self.trunks.get(row.slot)
        if trunk is None or not 0 < self.length(row) <= trunk.n_computed + self._n_after:
            return False
        return self._n_ready(row) == self.length(row)

    def n_behind(self, row: DraftRow) -> int:
        """Places of a text that can be computed now and are not. The last is left out: it gives the candidates."""
        trunk = self.trunks.get(row.slot)
        return 0 if trunk is None else min(self._n_ready(row), self.length(row) - 1) - trunk.n_computed

    def reserve(self, row: DraftRow) -> bool:
        """Reserve pages for the text and the speculation after it. False if there are none."""
        n_tokens = len(row.text) + self._n_after
        return n_tokens <= self.longest and self.pool.reserve(self.trunks[row.slot].table, n_tokens)

    def _behind(self, row: DraftRow, n: int) -> Behind:
        """The next n places of a text, which count as computed from now on."""
        trunk = self.trunks[row.slot]
        n_computed, shift = trunk.n_computed, trunk.shift
        trunk.n_computed += n
        tokens = row.text[max(0, n_computed + shift) : trunk.n_computed + shift]
        return Behind(row.slot, trunk.table.pages, tokens, n_computed, n, shift)

    def _n_ready(self, row: DraftRow) -> int:
        """Places of a row's text that can be computed, or are."""
        trunk = self.trunks[row.slot]
        return self.inputs.n_ready(row.slot, self.length(row), trunk.shift, trunk.n_computed)

    def _needed(self, trunk: Trunk) -> int:
        """Position of the feature that the next place is read with."""
        return trunk.n_computed + trunk.shift - self.inputs.first

    def _match_again(self, trunk: Trunk) -> None:
        """The target has found more of this text in its prefix cache: this cache may have it too by now."""
        table, n_cached = self.pool.match(self.inputs.keys(trunk.text))
        if n_cached > trunk.n_computed:
            trunk.table, trunk.n_computed, table = table, n_cached, trunk.table
        self.pool.release(table)

    def _publish(self, row: DraftRow, trunk: Trunk) -> None:
        """Put full pages into the prefix cache, unless the text has gaps."""
        is_whole = trunk.shift == self.inputs.first
        if is_whole and trunk.n_computed // self.cache.page_size > len(trunk.table.digests):
            self.pool.publish(trunk.table, self.inputs.keys(row.text), trunk.n_computed)
