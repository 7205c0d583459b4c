"""One model over paged KV, driven by hand, and transformers' word on the same tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.attention.native import cpu_attention
from saguaro.attention.step import Segment, make_step
from saguaro.kv.memory import KVCache, KVPlan
from saguaro.kv.pages import PagePool, PageTable
from saguaro.model.linear import Packed
from saguaro.model.load import load
from saguaro.runner.runner import Runner

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # of logits in float32
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
PAGE_SIZE = 4
N_PAGES = 64


class Driver:
    """A loaded model, a page pool, and a KV memory in which everything that was not written is NaN."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, kind: type[Packed] | None = None) -> None:
        self.model = load(path.name, path, CPU, dtype, kind).model
        spec = self.model.spec
        plan = KVPlan(N_PAGES, PAGE_SIZE, spec.kv_bytes_per_token(dtype), N_PAGES * PAGE_SIZE)
        cache = KVCache(plan, spec, CPU, dtype)
        for memory in (*cache.keys, *cache.values):
            memory.fill_(float("nan"))
        self.pool = PagePool(N_PAGES, PAGE_SIZE)
        self._runner = Runner(self.model, cache, cpu_attention(cache, self.model.spec))

    def step(self, rows: Sequence[tuple[PageTable, Sequence[int], int, int]]) -> list[Tensor]:
        """Compute tokens[start:stop] of each (table, tokens, start, stop); all their logits, [stop - start, V] each."""
        segments = []
        for table, tokens, start, stop in rows:
            assert self.pool.reserve(table, stop)
            segments.append(Segment(tokens[start:stop], start, table.pages, n_wanted=stop - start))
        logits = self._runner.forward(make_step(segments, PAGE_SIZE, CPU))
        return list(logits.split([stop - start for _, _, start, stop in rows]))

    def chunks(self, tokens: Sequence[int], sizes: Sequence[int]) -> Tensor:  # [len(tokens), V]
        """The logits of a text computed in chunks of these sizes."""
        table, start, found = PageTable(), 0, []
        for size in sizes:
            found += self.step([(table, tokens, start, start + size)])
            start += size
        assert start == len(tokens)
        self.pool.release(table)
        return torch.cat(found)


def reference(model: Any, tokens: Sequence[int]) -> Tensor:  # [len(tokens), V]
    """transformers' logits of a text; they must differ enough to tell a right model from a wrong one."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    assert logits.std() > 0.5
    return logits


def random_tokens(n: int, n_vocab: int, seed: int = 1) -> list[int]:
    """A random text."""
    found: list[int] = torch.randint(n_vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors of one shape; NaN is infinitely far from anything."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().nan_to_num(nan=float("inf")).max())
