"""One forward step of one model over paged KV."""

import torch
from torch import Tensor

from saguaro.engine.attention import AttentionBackend
from saguaro.engine.layout import Layout
from saguaro.model.transformer import TORCH, Products, Transformer


class Runner:
    """A model, and the attention and the products it runs with."""

    def __init__(self, model: Transformer, attention: AttentionBackend, by: Products = TORCH) -> None:
        self.model, self.attention, self.by = model, attention, by

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.model.device

    @torch.inference_mode()
    def forward(self, layout: Layout) -> Tensor:
        """Compute a step; logits of the wanted positions, [L, V] float32."""
        self.attention.plan(layout)
        hidden = self.model(layout.tokens, layout.positions, self.attention, self.by)
        return self.model.logits(hidden.index_select(0, layout.wanted), self.by)
