"""One forward step of one model over paged KV: a captured step is replayed, any other runs operation by operation."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from saguaro.attention.native import cpu_attention
from saguaro.attention.paged import PagedAttention
from saguaro.attention.sdpa import AttentionBackend
from saguaro.attention.step import Segment, Step, make_step
from saguaro.device.graphs import bucket
from saguaro.kernels.bundle import Kernels
from saguaro.kernels.native import own_threads
from saguaro.kv.memory import KVCache
from saguaro.model.products import Products
from saguaro.model.transformer import Transformer
from saguaro.runner.captured import CapturedSteps, Followed
from saguaro.runner.native import NativeForward, native_forward


class Runner:
    """A model, its attention backend, its matrix products (by=None: the model's own), and where there are any its
    captured steps, or all its layers as one native call."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        by: Products | None = None,
        captured: CapturedSteps | None = None,
        native: NativeForward | None = None,
    ) -> None:
        self.model, self.cache, self.attention, self.by = model, cache, attention, by
        self._captured, self._native = captured, native

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.device

    @property
    def page_size(self) -> int:
        """Tokens per page of the KV memory."""
        return self.cache.page_size

    @property
    def captures(self) -> bool:
        """Whether steps are captured, so that the host continues while they run."""
        return self._captured is not None

    @property
    def is_native(self) -> bool:
        """Whether all layers are one native call."""
        return self._native is not None

    def threads(self) -> AbstractContextManager[None]:
        """Context for steps and what follows them: torch's operations leave the cores to the native calls."""
        is_small = self.is_native or (self.model.split.size > 1 and self.device.type == "cpu")
        return own_threads() if is_small else nullcontext()

    def run(self, rows: Sequence[Segment], is_followed: bool) -> Followed | tuple[Tensor, Tensor | None]:
        """Run a step of these rows: a captured one with what follows it, if there is one and `is_followed`.

        Otherwise the logits [L, V], and the hidden states of all tokens [T, D] unless the step was captured.
        """
        if self._captured is not None and self._captured.takes(rows, is_followed):
            self._captured.replay(self._compute, rows, bucket(len(rows)))
            return self._captured.followed(len(rows)) if is_followed else (self._captured.logits(rows), None)
        step = make_step(rows, self.cache.page_size, self.device)
        hidden = self.hidden(step)
        return self.logits(hidden.index_select(0, step.logits_at)), hidden

    def move(self, sources: Tensor, kv_index: Tensor) -> None:  # [T], [T]
        """Copy keys and values of all layers from some places to others."""
        self.cache.move(sources.to(self.device), kv_index.to(self.device))

    def warm(self, size: int) -> None:
        """Capture the step for this batch size, with padding rows."""
        if self._captured is not None:
            self._captured.replay(self._compute, (), size)

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Run a step; return the logits at logits_at, [L, V] float32."""
        return self.logits(self.hidden(step).index_select(0, step.logits_at))

    @torch.inference_mode()
    def hidden(self, step: Step) -> Tensor:
        """Run a step; return the hidden states of all its tokens, [T, D]."""
        if self._native is not None:
            return self._native(step)
        self.attention.plan(step)
        return self.model(step.tokens, step.positions, self.attention, self.by)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of these hidden states: [L, D] -> [L, V] float32."""
        return self.model.logits(hidden, self.by)

    def _compute(self, step: Step) -> Tensor:  # [T, V] float32
        return self.logits(self.hidden(step))


def make_runner(
    model: Transformer, cache: KVCache, kernels: Kernels | None, longest: int, captured: CapturedSteps | None = None
) -> Runner:
    """A runner with these kernels, for texts up to `longest`; None: torch or cpu.c."""
    if kernels is None:
        return Runner(model, cache, cpu_attention(cache, model.own_spec), native=native_forward(model, cache))
    attention = PagedAttention(cache, kernels, longest, model.spec.softmax_scale)
    return Runner(model, cache, attention, kernels.products, captured)
