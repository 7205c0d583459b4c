"""One forward step of one model over paged KV: a captured step is replayed, any other runs operation by operation."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

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
from saguaro.model.transformer import Taps, Transformer
from saguaro.runner.captured import CapturedSteps, Followed, Room
from saguaro.runner.native import NativeForward, native_forward


class Ran(NamedTuple):
    """What a step has computed."""

    logits: Tensor  # [L, V] float32
    hidden: Tensor | None  # [T, D] of all tokens; None: the step was captured
    features: Tensor | None  # [T, F] of all tokens; None: there are no taps


class Runner:
    """A model, its attention backend, its matrix products (by=None: the model's own), and where there are any its
    captured steps, or all its layers as one native call.

    taps: the layers whose input is returned beside the logits (model.transformer.Taps).
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionBackend,
        by: Products | None = None,
        captured: CapturedSteps | None = None,
        native: NativeForward | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        self.model, self.cache, self.attention, self.by = model, cache, attention, by
        self._captured, self._native, self._taps = captured, native, taps

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
    def room(self) -> Room | None:
        """What captured steps can hold of their rows' rules; None: no step is captured."""
        return None if self._captured is None else self._captured.room

    @property
    def is_native(self) -> bool:
        """Whether all layers are one native call."""
        return self._native is not None

    def threads(self) -> AbstractContextManager[None]:
        """Context for steps and what follows them: torch's operations leave the cores to the native calls."""
        is_small = self.is_native or (self.model.split.size > 1 and self.device.type == "cpu")
        return own_threads() if is_small else nullcontext()

    def takes(self, rows: Sequence[Segment]) -> bool:
        """Whether there is a captured step for these rows, with what follows it."""
        return self._captured is not None and self._captured.takes(rows, True)

    def run(self, rows: Sequence[Segment], is_followed: bool) -> Followed | Ran:
        """Run a step of these rows: a captured one with what follows it, if there is one and `is_followed`."""
        if self._captured is not None and self._captured.takes(rows, is_followed):
            self._captured.replay(self._compute, rows, bucket(len(rows)))
            if is_followed:
                return self._captured.followed(len(rows))
            logits, features = self._captured.computed(rows)
            return Ran(logits, None, features)
        step = make_step(rows, self.cache.page_size, self.device)
        taps = self._new_taps(len(step.tokens)) if self._taps else None
        hidden = self.hidden(step, taps)
        logits = self.logits(hidden.index_select(0, step.logits_at))
        return Ran(logits, hidden, None if taps is None else taps.into)

    def last_logits(self, rows: Sequence[Segment]) -> Tensor:  # [L, V]
        """A copy of the logits of the last step, which was captured and was of these rows."""
        assert self._captured is not None
        return self._captured.logits(rows)

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
    def hidden(self, step: Step, taps: Taps | None = None) -> Tensor:
        """Run a step; return the hidden states of all its tokens, [T, D]."""
        if self._native is not None and step.features is None:
            return self._native(step, taps)
        self.attention.plan(step)
        beside = [each for each in (step.features, taps) if each is not None]
        return self.model(step.tokens, step.positions, self.attention, self.by, *beside)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits of these hidden states: [L, D] -> [L, V] float32."""
        return self.model.logits(hidden, self.by)

    def _compute(self, step: Step) -> tuple[Tensor, Tensor | None]:  # [T, V] float32, [T, F]
        taps = self._new_taps(len(step.tokens)) if self._taps else None
        return self.logits(self.hidden(step, taps)), None if taps is None else taps.into

    def _new_taps(self, n_tokens: int) -> Taps:
        width = len(self._taps) * self.model.spec.hidden
        return Taps(self._taps, torch.empty(n_tokens, width, device=self.device, dtype=self.model.dtype))


def make_runner(
    model: Transformer,
    cache: KVCache,
    kernels: Kernels | None,
    longest: int,
    captured: CapturedSteps | None = None,
    taps: Sequence[int] = (),
) -> Runner:
    """A runner with these kernels, for texts up to `longest`; None: torch or cpu.c."""
    if kernels is None:
        return Runner(
            model, cache, cpu_attention(cache, model.own_spec), native=native_forward(model, cache), taps=taps
        )
    attention = PagedAttention(cache, kernels, longest, model.spec.softmax_scale)
    return Runner(model, cache, attention, kernels.products, captured, taps=taps)
