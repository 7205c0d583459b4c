"""Attention on a CPU by cpu.c: each query is computed separately, directly from the pages.

Invariant: a token's result depends only on its text, bit for bit, not on the rest of the step.
"""

import torch
from torch import Tensor

from saguaro.attention.sdpa import AttentionBackend, SDPAttention, kv_indices
from saguaro.attention.step import Step
from saguaro.kernels import native
from saguaro.kernels.native import at
from saguaro.kv.memory import KVCache
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import KVWrite


class NativeAttention:
    """cpu.c's `attend` over a float32 cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache, self._library = cache, native.library()
        self._kv_index = self._text = self._seen = torch.empty(0)
        self._places: list[KVWrite] = []

    def plan(self, step: Step) -> None:
        """Compute the KV indices of each row's text, and the number of keys that each token sees."""
        sizes, longest = step.sizes, max(step.lengths)
        self._places = [KVWrite(memory, step.kv_index) for memory in self._cache.layers]
        # [texts, longest]: KV index of every key. A row has one text; each node of a tree has its own, which ends with
        # the path to the node.
        self._kv_index = torch.zeros(len(sizes) + sum(map(len, step.paths)), longest, dtype=torch.int32)
        text: list[int] = []
        seen: list[int] = []
        n_texts = len(sizes)
        for row, (pages, length, n, paths) in enumerate(zip(step.pages, step.lengths, sizes, step.paths, strict=True)):
            own, end = self._kv_index[row], length - len(paths)
            own[:length] = kv_indices(pages, length, self._cache.page_size)
            text += [row] * (n - len(paths)) + list(range(n_texts, n_texts + len(paths)))
            seen += range(length - n + 1, end + 1)
            for path in paths:
                self._kv_index[n_texts, :end] = own[:end]
                self._kv_index[n_texts, end : end + len(path)] = own[end:][path]
                seen.append(end + len(path))
                n_texts += 1
        self._text, self._seen = torch.tensor([text, seen], dtype=torch.int32)  # [T] each: text, keys seen

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
            q.data_ptr(), q.stride(0), n_tokens, n_heads, memory.shape[1] // 2, d, at(memory), at(self._kv_index),
            self._kv_index.shape[1], at(self._text), at(self._seen), at(out),
        )  # fmt: skip
        return out


def cpu_attention(cache: KVCache, spec: ModelSpec) -> AttentionBackend:
    """The attention for a device without Triton kernels: cpu.c's where it is supported, else torch's."""
    is_plain = cache.device.type == "cpu" and cache.dtype == torch.float32 and spec.head_dim % 8 == 0
    if is_plain and native.is_there():
        return NativeAttention(cache)
    return SDPAttention(cache, spec.n_heads // spec.n_kv_heads)
