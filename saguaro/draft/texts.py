"""The texts of a draft's rows: their keys and values on the draft's own pages, read in chunks."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from saguaro.attention.step import Segment, make_step
from saguaro.draft.rows import DraftRow
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool, PageTable
from saguaro.model.transformer import Transformer
from saguaro.runner.runner import make_runner
from saguaro.target.step_cost import StepCost, Work

MAX_READ = 512  # tokens of text read per round: as many as the target computes
CHUNK = 64  # tokens of text read between two checks for the outcome

now = time.perf_counter


@dataclass
class Trunk:
    """A row's text in the draft."""

    table: PageTable
    n_computed: int  # tokens whose keys and values are on the pages


class DraftTexts:
    """A draft model and the texts that it has read."""

    def __init__(
        self, model: Transformer, kv: KVPlan, *, n_after: int, kernels: Kernels | None = None, n_scratch: int = 0
    ) -> None:
        """n_after: tokens that may follow a text on its pages; n_scratch: further KV places, behind all pages."""
        self._model, self._n_after = model, n_after
        self.longest = min(kv.longest, model.spec.max_length)
        self.pool = PagePool(kv.n_pages, kv.page_size)
        self.scratch = kv.n_pages * kv.page_size  # KV index of the first place that is on no page
        longest = kv.longest
        kv = KVPlan(kv.n_pages - (-n_scratch // kv.page_size), kv.page_size, kv.bytes_per_token, kv.max_length)
        self.cache = KVCache(kv, model.spec, model.device, model.dtype)
        self.runner = make_runner(model, self.cache, kernels, longest)
        self.trunks: dict[int, Trunk] = {}
        self._pace = StepCost()  # of reading texts

    def admit(self, rows: Sequence[DraftRow]) -> None:
        """Add these rows, reusing cached pages. Rows with token ids beyond the model's vocabulary are skipped."""
        for row in rows:
            params = row.request.params
            named = (*params.logit_bias, *params.allowed_token_ids, *row.request.stop_ids)
            if max(*row.text, *named, 0) < self._model.spec.n_vocab:
                table, n_cached = self.pool.match(row.text)
                self.trunks[row.slot] = Trunk(table, n_cached)

    def retire(self, slots: Sequence[int]) -> None:
        """Drop these rows. Unknown slots are ignored."""
        for slot in slots:
            trunk = self.trunks.pop(slot, None)
            if trunk is not None:
                self.pool.release(trunk.table)

    def settle(self, rows: Sequence[DraftRow]) -> None:
        """Keep the computed part of each text. Its last token, the bonus, is never computed yet."""
        for row in rows:
            trunk = self.trunks.get(row.slot)
            if trunk is not None:
                trunk.n_computed = min(trunk.n_computed, len(row.text) - 1)
                self.pool.publish(trunk.table, row.text, trunk.n_computed)

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
            while left > 0 and row.slot in self.trunks and not self.is_near(row) and self.reserve(row):
                trunk, starts = self.trunks[row.slot], now()
                fitting = CHUNK
                if seconds < math.inf:
                    fitting = max(least, self._pace.room(seconds - (starts - began), trunk.n_computed))
                n = min(CHUNK, left, fitting)
                tokens = row.text[trunk.n_computed : -1][:n]  # the last token is left out: it gives the candidates
                self.forward([Segment(tokens, trunk.n_computed, trunk.table.pages, 0)])
                self._pace.learn(Work.of(trunk.n_computed, len(tokens)), now() - starts)
                trunk.n_computed += len(tokens)
                left -= len(tokens)
                if is_late() or now() - began >= seconds:
                    return True
        return left < MAX_READ

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        return self.runner.forward(make_step(segments, self.cache.page_size, self._model.device))

    def ready(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """The rows that are nearly computed and have room."""
        return [row for row in rows if self.is_near(row) and self.reserve(row)]

    def is_near(self, row: DraftRow) -> bool:
        """Whether few enough tokens are left to compute them within a draft step."""
        trunk = self.trunks.get(row.slot)
        return trunk is not None and len(row.text) - trunk.n_computed <= self._n_after

    def reserve(self, row: DraftRow) -> bool:
        """Reserve pages for the text and the speculation after it. False if there are none."""
        n_tokens = len(row.text) + self._n_after
        return n_tokens <= self.longest and self.pool.reserve(self.trunks[row.slot].table, n_tokens)
