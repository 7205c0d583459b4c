"""Attention on a CPU by cpu.c: each query is computed separately, directly from the pages.

Invariant: a token's result depends only on its text, bit for bit, not on the rest of the step.
"""

import torch
from torch import Tensor

from saguaro.attention.sdpa import AttentionBackend, SDPAttention
from saguaro.attention.step import Nodes, Step
from saguaro.kernels import native
from saguaro.kernels.native import at, n_threads
from saguaro.kv.memory import KVCache
from saguaro.model.products import KVWrite
from saguaro.model.spec import ModelSpec


class NativeAttention:
    """cpu.c's `attend` over a float32 cache."""

    def __init__(self, cache: KVCache, scale: float) -> None:
        """scale: of query-key products."""
        self._cache, self._scale, self._library = cache, scale, native.library()
        self._kv_index = self._text = self._seen = torch.empty(0)
        self._places: list[KVWrite] = []

    def plan(self, step: Step) -> None:
        """Compute the KV indices of each row's text, and the number of keys that each token sees."""
        self._places = [KVWrite(memory, step.kv_index) for memory in self._cache.layers]
        # [texts, longest]: KV index of every key. A row has one text; each node of a tree has its own, which ends with
        # the path to the node.
        size = self._cache.page_size
        kv_index = (step.pages[..., None] * size + torch.arange(size, dtype=torch.int32)).flatten(1)
        starts = step.starts.long()
        row = torch.repeat_interleave(torch.arange(len(step.lengths)), starts.diff())  # [T]
        if step.nodes is None:
            seen = step.lengths[row] - starts[row + 1] + torch.arange(1, len(row) + 1)
        else:
            row, kv_index = _with_paths(kv_index, row, step.nodes)
            seen = step.nodes.seen
        self._kv_index, self._text, self._seen = kv_index, row.int(), seen.int()

    def place(self, layer: int) -> KVWrite:
        """See AttentionBackend."""
        return self._places[layer]

    def run(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionBackend."""
        memory = self._cache.layers[layer]
        n_tokens, n_heads, d = q.shape
        assert q.stride()[1:] == (d, 1), q.stride()
        out = torch.empty(n_tokens, n_heads * d)
        self._library.attend(
            n_threads(), q.data_ptr(), q.stride(0), n_tokens, n_heads, memory.shape[1] // 2, d, self._scale, at(memory),
            at(self._kv_index), self._kv_index.shape[1], at(self._text), at(self._seen), at(out),
        )  # fmt: skip
        return out


def _with_paths(kv_index: Tensor, row: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:  # [R, n], [T] -> [T], [more, n]
    """Give every token that sees more than its row's text a text of its own."""
    texts, depth = nodes.texts[row].long(), nodes.paths.shape[1]
    own = (nodes.seen > texts).nonzero()[:, 0]
    width = max(kv_index.shape[1], int(nodes.texts.max()) + depth)
    kv_index = torch.nn.functional.pad(kv_index, (0, width - kv_index.shape[1]))
    places = texts[own, None] + torch.arange(depth)
    text = row.clone()
    text[own] = len(kv_index) + torch.arange(len(own))
    return text, torch.cat((kv_index, kv_index[row[own]].scatter(1, places, nodes.paths[own])))


def cpu_attention(cache: KVCache, spec: ModelSpec) -> AttentionBackend:
    """The attention for a device without Triton kernels: cpu.c's where it is supported, else torch's."""
    is_plain = cache.device.type == "cpu" and cache.dtype == torch.float32 and spec.head_dim % 8 == 0
    if is_plain and native.is_there():
        return NativeAttention(cache, spec.softmax_scale)
    return SDPAttention(cache, spec.n_heads // spec.n_kv_heads, spec.softmax_scale)
