"""The table of model families: what an architecture has that config.json does not state."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from saguaro.model.layout import Layout
from saguaro.model.mlp import MLP
from saguaro.model.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """Properties of an architecture that config.json does not state."""

    gguf: str = ""  # general.architecture of its GGUF files; empty: none
    qkv_bias: bool = False  # always; otherwise given by attention_bias
    output_bias: bool = False  # attention_bias applies to the output projection too
    qk_norm: bool = False  # per-head RMSNorm of queries and keys
    scales_attention: bool = False  # attention_multiplier is the factor of query-key products
    has_window: bool = False  # sliding_window is used unless use_sliding_window is false
    mlp: Callable[[ModelSpec, Layout], nn.Module] = MLP  # the block after attention; see MLP.forward
    sizes: tuple[str, ...] = ()  # sizes in config.json that its blocks need beyond ModelSpec's: ModelSpec.sizes


FAMILIES = {  # by the name in config.json's architectures
    "LlamaForCausalLM": Family("llama", output_bias=True),
    "MistralForCausalLM": Family(has_window=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", output_bias=True, qk_norm=True),
}
