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
    """A model, its attention backend and its matrix products (by=None: the model's own)."""

    def __init__(
        self, model: Transformer, cache: KVCache, attention: AttentionBackend, by: Products | None = None
    ) -> None:
        self.model, self.cache, self.attention, self.by = model, cache, attention, by

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Run a step; return the logits at logits_at, [L, V] float32."""
        return self.logits(self.hidden(step).index_select(0, step.logits_at))

    @torch.inference_mode()
    def hidden(self, step: Step) -> Tensor:
        """Run a step; return the hidden states of all its tokens, [T, D]."""
        self.attention.plan(step)
        return self.model(step.tokens, step.positions, self.attention, self.by)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of these hidden states: [L, D] -> [L, V] float32."""
        return self.model.logits(hidden, self.by)


def make_runner(model: Transformer, cache: KVCache, kernels: Kernels | None, longest: int) -> Runner:
    """A runner with these kernels, for texts up to `longest`; None: torch or cpu.c."""
    if kernels is None:
        return Runner(model, cache, cpu_attention(cache, model.spec))
    return Runner(model, cache, PagedAttention(cache, kernels, longest), kernels.products)
