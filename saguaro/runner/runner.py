"""One forward step of one model over paged KV."""

import torch
from torch import Tensor

from saguaro.attention.native import cpu_attention
from saguaro.attention.paged import PagedAttention
from saguaro.attention.sdpa import AttentionBackend
from saguaro.attention.step import Step
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.model.transformer import Products, Transformer


class Runner:
    """A model, the attention it runs with, and the products; None: the model's own."""

    def __init__(self, model: Transformer, attention: AttentionBackend, by: Products | None = None) -> None:
        self.model, self.attention, self.by = model, attention, by

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.device

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Compute a step; logits of the logits_at positions, [L, V] float32."""
        return self.logits(self.hidden(step).index_select(0, step.logits_at))

    @torch.inference_mode()
    def hidden(self, step: Step) -> Tensor:
        """Compute a step; the hidden states of all its tokens, [T, D]."""
        self.attention.plan(step)
        return self.model(step.tokens, step.positions, self.attention, self.by)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """What comes after each of these hidden states: [L, D] -> [L, V] float32."""
        return self.model.logits(hidden, self.by)


def make_runner(model: Transformer, cache: KVCache, kernels: Kernels | None, longest: int) -> Runner:
    """The model with these kernels, for texts up to this long; without any, by torch's own operations."""
    if kernels is None:
        return Runner(model, cpu_attention(cache, model.spec))
    return Runner(model, PagedAttention(cache, kernels, longest), kernels.products)
