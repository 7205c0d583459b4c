"""What a model is: the numbers of a Hugging Face config.json, or a refusal that names what is not supported."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import CorruptModel, ModelNotFound, UnsupportedModel

# architecture -> (query/key/value bias, norm of queries and keys)
ARCHITECTURES = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: base frequency and how it is stretched."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def frequencies(self, head_dim: int) -> Tensor:  # [head_dim / 2] float32
        """Radians per position of each rotated pair."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequency = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "llama3":
            return self._llama3(frequency)
        return frequency

    def _llama3(self, frequency: Tensor) -> Tensor:
        """Long wavelengths are stretched, short ones kept, those between blended."""
        wavelength = 2 * math.pi / frequency
        longest = self.original_length / self.low_freq_factor
        shortest = self.original_length / self.high_freq_factor
        blend = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - blend) * frequency / self.factor + blend * frequency
        stretched = torch.where(wavelength > longest, frequency / self.factor, frequency)
        is_between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(is_between, between, stretched)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One transformer, by its numbers."""

    architecture: str
    n_layers: int
    hidden: int  # D
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    n_vocab: int  # rows of the embedding; a tokenizer may know fewer
    norm_eps: float
    max_length: int
    rope: Rope
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_ids: tuple[int, ...]

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token holds, all layers together."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * dtype.itemsize


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face model folder."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_spec(config, eos_ids=eos)


def parse_spec(config: Mapping[str, Any], eos_ids: int | list[int] | None = None) -> ModelSpec:
    """The spec of a config.json's content; eos_ids overrides its end-of-text ids."""
    architecture = "language model"
    try:
        architecture = _architecture(config)
        has_qkv_bias, has_qk_norm = ARCHITECTURES[architecture]
        _refuse_unknown(config, architecture)
        n_heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        eos = eos_ids if eos_ids is not None else config.get("eos_token_id")
        attention_bias = bool(config.get("attention_bias", False))
        spec = ModelSpec(
            architecture=architecture,
            n_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
            head_dim=int(config.get("head_dim") or hidden // n_heads),
            intermediate=int(config["intermediate_size"]),
            n_vocab=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_length=int(config.get("max_position_embeddings", 2048)),
            rope=_rope(config),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            has_qkv_bias=has_qkv_bias or attention_bias,
            has_output_bias=attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            has_qk_norm=has_qk_norm,
            eos_ids=tuple(int(token) for token in eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )
    except KeyError as e:
        raise CorruptModel(f"config.json has no {e.args[0]!r}; it is not a complete {architecture} config") from e
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise CorruptModel(f"config.json is no {architecture} config ({e}); download the model again") from e
    _check_sizes(spec)
    return spec


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an error that names the file."""
    if not path.exists():
        raise ModelNotFound(
            f"{path.parent} has no {path.name}; a model folder holds config.json, weights and tokenizer"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CorruptModel(f"{path} is not valid JSON ({e}); download the model again") from e
    if not isinstance(content, dict):
        raise CorruptModel(f"{path} holds {type(content).__name__}, not an object; download the model again")
    return content


def _architecture(config: Mapping[str, Any]) -> str:
    known = ", ".join(ARCHITECTURES)
    named = config.get("architectures") or []
    if named and named[0] in ARCHITECTURES:
        return str(named[0])
    by_type = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}
    if not named and config.get("model_type") in by_type:
        return by_type[config["model_type"]]
    found = named[0] if named else config.get("model_type", "no architecture at all")
    raise UnsupportedModel(f"config.json names {found}, which Saguaro does not compute; it knows {known}")


def _refuse_unknown(config: Mapping[str, Any], architecture: str) -> None:
    """Features that would change the result if ignored."""

    def refuse(feature: str, remedy: str) -> None:
        raise UnsupportedModel(f"{architecture} with {feature} is not supported; {remedy}")

    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        refuse(f"quantisation {method!r}", "use the unquantised checkpoint or a GGUF file")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act {config['hidden_act']!r}", "only silu is computed")
    uses_window = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    if uses_window and config.get("sliding_window"):
        refuse(f"sliding_window {config['sliding_window']}", "use a checkpoint with full attention")
    if "sliding_attention" in (config.get("layer_types") or []):
        refuse("sliding_attention layers", "use a checkpoint with full attention")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"partial_rotary_factor {config['partial_rotary_factor']}",
            "only full rotary embedding is computed",
        )
    for key in ("num_local_experts", "num_experts"):
        if config.get(key):
            refuse(f"{key} {config[key]}", "mixtures of experts are not computed")


def _check_sizes(spec: ModelSpec) -> None:
    """Numbers that no model can have."""
    sizes = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "intermediate", "n_vocab", "max_length")
    for name in sizes:
        if getattr(spec, name) < 1:
            raise CorruptModel(f"config.json says {name} is {getattr(spec, name)}; it must be at least 1")
    if spec.n_heads % spec.n_kv_heads:
        raise CorruptModel(f"config.json has {spec.n_heads} heads, no multiple of its {spec.n_kv_heads} key heads")
    if spec.head_dim % 2:
        raise CorruptModel(f"config.json has heads of odd size {spec.head_dim}; rotary embedding needs pairs")


def _rope(config: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial_rotary_factor {found['partial_rotary_factor']} is not supported; only full rotary embedding is"
        )
    kind = str(found.get("rope_type", found.get("type", "default")))
    theta = float(found.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(found["factor"]))
    if kind == "llama3":
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(found["factor"]),
            low_freq_factor=float(found["low_freq_factor"]),
            high_freq_factor=float(found["high_freq_factor"]),
            original_length=int(found["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"rope type {kind!r} is not supported; Saguaro computes default, linear and llama3")
