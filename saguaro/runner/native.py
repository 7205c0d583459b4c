"""All layers of a model as one call of cpu.c, over pages in float32."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from saguaro.attention.step import Step
from saguaro.kernels import native
from saguaro.kernels.cpu import Float32Weight, Int8Weight
from saguaro.kernels.native import at, n_threads
from saguaro.kv.memory import KVCache
from saguaro.model.attention import Attention
from saguaro.model.linear import Linear
from saguaro.model.mlp import MLP
from saguaro.model.norm import Norm
from saguaro.model.transformer import Layer, Taps, Transformer

FIRST_POSITIONS = 1024  # of the first table of cos and sin; a longer text doubles it


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Layer(ctypes.Structure):
    """The struct `layer` of forward.h."""

    _fields_ = _pointers(
        "qkv", "out", "gate_up", "down", "qkv_bias", "out_bias", "gate_up_bias", "down_bias",
        "attention_norm", "mlp_norm", "q_norm", "k_norm", "memory",
    )  # fmt: skip


class _Model(ctypes.Structure):
    """The struct `model` of forward.h."""

    _fields_ = (
        *_pointers("layers", "embedding", "cosines", "sines"),
        *((name, ctypes.c_int32) for name in ("n_layers", "hidden", "n_q", "n_kv", "d", "page_size")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """The struct `step` of forward.h."""

    _fields_ = (
        *_pointers("tokens", "positions", "kv_index", "pages", "starts", "lengths", "texts", "seen", "paths"),
        *_pointers("taps", "features"),
        *((name, ctypes.c_int32) for name in ("n_tokens", "n_rows", "n_pages", "depth", "n_taps")),
    )


class NativeForward:
    """The hidden states of a step. The same results as of the model's modules, bit for bit."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        """The model must be one that `takes` accepts."""
        self._model, self._cache, spec, self._library = model, cache, model.spec, native.library()
        layers = [_layer_of(layer, memory) for layer, memory in zip(model.layers, cache.layers, strict=True)]
        self._layers = (_Layer * len(layers))(*layers)
        self._struct = _Model(
            layers=ctypes.addressof(self._layers), embedding=at(model.embedding.data), n_layers=len(layers),
            hidden=spec.hidden, n_q=spec.n_heads, n_kv=spec.n_kv_heads, d=spec.head_dim, page_size=cache.page_size,
            eps=spec.norm_eps, scale=spec.softmax_scale,
        )  # fmt: skip
        self._rope: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._reach(FIRST_POSITIONS)

    def __call__(self, step: Step, taps: Taps | None = None) -> Tensor:  # [T, D]
        """Compute the layers; write keys and values, and what is tapped."""
        if step.longest > len(self._rope[0]):
            self._reach(max(step.longest, 2 * len(self._rope[0])))
        nodes, n_tokens = step.nodes, len(step.tokens)
        given = (step.tokens, step.positions, step.kv_index, step.pages, step.starts, step.lengths)
        of_nodes = () if nodes is None else (nodes.texts, nodes.seen, nodes.paths)
        tensors = [each.contiguous() for each in (*given, *of_nodes)]  # kept until the call is over
        tapped = None if taps is None else torch.tensor(taps.layers, dtype=torch.int32)
        struct = _Step(
            *map(at, tensors), *[None] * (3 - len(of_nodes)), at(tapped), at(None if taps is None else taps.into),
            n_tokens, *step.pages.shape, 0 if nodes is None else nodes.paths.shape[1],
            0 if taps is None else len(taps.layers),
        )  # fmt: skip
        hidden = torch.empty(n_tokens, self._struct.hidden)
        self._library.forward(
            n_threads(), ctypes.addressof(self._struct), ctypes.addressof(struct), hidden.data_ptr()
        )  # fmt: skip
        return hidden

    def _reach(self, n_positions: int) -> None:
        """Make the table of cos and sin for so many positions."""
        cos, sin = self._model.turns(torch.arange(n_positions))
        self._rope = cos.contiguous(), sin.contiguous()
        self._struct.cosines, self._struct.sines = (each.data_ptr() for each in self._rope)


def native_forward(model: Transformer, cache: KVCache) -> NativeForward | None:
    """The model as one call, if all its modules are ones that cpu.c computes; else None."""
    can = model.is_plain and native.is_there()
    return NativeForward(model, cache) if can and _takes(model, cache) else None


def _takes(model: Transformer, cache: KVCache) -> bool:
    """Whether cpu.c computes these modules: plain ones, whose weights are all packed to one of its formats."""
    table = model.embedding
    if cache.device.type != "cpu" or {cache.dtype, table.dtype} != {torch.float32} or not table.is_contiguous():
        return False
    kinds = {kind for layer in model.layers for kind in _kinds_of(layer)}
    return model.spec.head_dim % 8 == 0 and (kinds in ({Int8Weight}, {Float32Weight}))


def _kinds_of(layer: nn.Module) -> set[type]:
    """The kinds of a layer's weights, or of a module that cpu.c does not compute."""
    found: set[type] = set()
    for part in layer.modules():
        if type(part) is Linear:
            found.add(type(part.weight))
        elif type(part) not in (Layer, Attention, MLP, Norm):
            found.add(type(part))
    return found


def _layer_of(layer: Any, memory: Tensor) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm, attention.q_norm, attention.k_norm)
    return _Layer(
        *(linear.weight.address for linear in linears),
        *(at(linear.bias) for linear in linears),
        *(None if norm is None else at(norm.weight) for norm in norms),
        at(memory),
    )
