"""A model's hyperparameters from a Hugging Face config.json, or an error that names the unsupported feature."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.families import FAMILIES
from saguaro.model.files import AGAIN, brief, is_there, read_json
from saguaro.model.quantization import read_quantization
from saguaro.model.spec import ModelSpec, Rope

MOST_POSITIONS = 2**24  # more than any model has; no tensor shape could refute a larger number


def read_spec(folder: Path) -> ModelSpec:
    """The spec of a Hugging Face model folder."""
    config, generation = folder / "config.json", folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if is_there(generation) else None
    content = read_json(config)
    if read_quantization(folder) is not None:  # of the weights: saguaro.model.folder reads them
        content = {**content, "quantization_config": None}
    return parse_spec(content, eos_ids=eos, source=str(config))


def parse_spec(config: Mapping[str, Any], eos_ids: object = None, source: str = "config.json") -> ModelSpec:
    """The spec of a config.json's content; eos_ids overrides its end-of-text ids, source is its name in errors."""
    architecture = "language model"
    try:
        architecture = _architecture(config, source)
        family = FAMILIES[architecture]
        _refuse_unknown(config, architecture, source)
        n_heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
        attention_bias = _flag(config, "attention_bias")
        spec = ModelSpec(
            architecture=architecture,
            n_layers=_whole(config, "num_hidden_layers"),
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=_whole(config, "num_key_value_heads", n_heads),
            head_dim=_whole(config, "head_dim", hidden // n_heads),
            intermediate=_whole(config, "intermediate_size"),
            n_vocab=_whole(config, "vocab_size"),
            norm_eps=_number(config, "rms_norm_eps", 1e-6, may_be_zero=True),
            max_length=_whole(config, "max_position_embeddings", 2048),
            rope=_rope(config, source),
            is_tied=_flag(config, "tie_word_embeddings"),
            has_qkv_bias=family.qkv_bias or attention_bias,
            has_output_bias=family.output_bias and attention_bias,
            has_mlp_bias=_flag(config, "mlp_bias"),
            has_qk_norm=family.qk_norm,
            eos_ids=_tokens(eos_ids if eos_ids is not None else config.get("eos_token_id")),
            attention_scale=_number(config, "attention_multiplier") if family.scales_attention else None,
            sizes={name: _whole(config, name) for name in family.sizes},
        )
    except KeyError as e:
        raise CorruptModel(f"{source} has no {e.args[0]!r}; it is not a complete {architecture} config") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise CorruptModel(f"{source} is no {architecture} config ({e}); {AGAIN}") from e
    _check_sizes(spec, source)
    return spec


def _whole(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size: an integer of at least 1. A missing or null field has the default; without one it is required."""
    value = fields[key] if default is None else fields.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {brief(value)}; it must be a whole number of at least 1")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
    """A positive, finite number; the default as in `_whole`."""
    value = fields[key] if default is None else fields.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_positive(value, may_be_zero):
        least = "at least 0" if may_be_zero else "more than 0"
        raise ValueError(f"{key} is {brief(value)}; it must be a number of {least}, and finite")
    return float(value)


def _is_positive(value: float, may_be_zero: bool) -> bool:
    try:
        return math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))
    except OverflowError:  # an integer too large for a float
        return False


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {brief(value)}; it must be true or false")
    return bool(value)


def _tokens(ids: object) -> tuple[int, ...]:
    """Token ids: one, several or none."""
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in found:
        if type(token) is not int:
            raise ValueError(f"eos_token_id has {brief(token)}; it must be a whole number")
    return tuple(found)


def _architecture(config: Mapping[str, Any], source: str) -> str:
    known = ", ".join(FAMILIES)
    named = config.get("architectures") or []
    if not isinstance(named, list):
        raise TypeError(f"architectures is {brief(named)}; it must be a list")
    if named and named[0] in FAMILIES:
        return str(named[0])
    by_type = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
    if not named and config.get("model_type") in by_type:
        return by_type[config["model_type"]]
    found = named[0] if named else config.get("model_type", "no architecture at all")
    found = found if isinstance(found, str) and len(found) < 80 else brief(found)
    raise UnsupportedModel(f"{source} names {found}, which Saguaro does not compute; it knows {known}")


def _refuse_unknown(config: Mapping[str, Any], architecture: str, source: str) -> None:
    """Refuse features that would change the result if ignored."""

    def refuse(feature: str, remedy: str) -> None:
        raise UnsupportedModel(f"{source}: {architecture} with {feature} is not supported; {remedy}")

    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        refuse(f"quantisation {brief(method)}", "use the unquantised checkpoint or a GGUF file")
    if config.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act {brief(config['hidden_act'])}", "only silu is computed")
    uses_window = config.get("use_sliding_window", FAMILIES[architecture].has_window)
    if uses_window and config.get("sliding_window"):
        refuse(f"sliding_window {brief(config['sliding_window'])}", "use a checkpoint with full attention")
    if "sliding_attention" in (config.get("layer_types") or []):
        refuse("sliding_attention layers", "use a checkpoint with full attention")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(
            f"partial_rotary_factor {brief(config['partial_rotary_factor'])}",
            "only full rotary embedding is computed",
        )
    for key in ("num_local_experts", "num_experts"):
        if config.get(key) and key not in FAMILIES[architecture].sizes:
            refuse(f"{key} {brief(config[key])}", "mixtures of experts are not computed")


def _check_sizes(spec: ModelSpec, source: str) -> None:
    """Refuse inconsistent sizes."""
    if spec.max_length > MOST_POSITIONS:
        length = brief(spec.max_length)
        raise CorruptModel(f"{source} says the model knows {length} positions; {MOST_POSITIONS} are the most: {AGAIN}")
    if spec.n_heads % spec.n_kv_heads:
        raise CorruptModel(
            f"{source} has {brief(spec.n_heads)} heads, no multiple of its {brief(spec.n_kv_heads)} key heads; {AGAIN}"
        )
    if spec.head_dim % 2 or spec.head_dim < 2:
        size = brief(spec.head_dim)
        raise CorruptModel(f"{source} has heads of size {size}; rotary embedding needs pairs: {AGAIN}")


def _rope(config: Mapping[str, Any], source: str) -> Rope:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{source}: partial_rotary_factor {brief(found['partial_rotary_factor'])} is not supported; only full "
            "rotary embedding is"
        )
    kind = found.get("rope_type", found.get("type", "default"))
    theta = _number(found, "rope_theta", _number(config, "rope_theta", 10000.0))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=_number(found, "factor"))
    if kind == "llama3":
        rope = Rope(
            theta=theta,
            kind=kind,
            factor=_number(found, "factor"),
            low_freq_factor=_number(found, "low_freq_factor"),
            high_freq_factor=_number(found, "high_freq_factor"),
            original_length=_whole(found, "original_max_position_embeddings"),
        )
        if rope.high_freq_factor <= rope.low_freq_factor or rope.original_length > MOST_POSITIONS:
            raise ValueError(f"the llama3 rope has {brief(found)}; high_freq_factor must be more than low_freq_factor")
        return rope
    raise UnsupportedModel(
        f"{source}: rope type {brief(kind)} is not supported; Saguaro computes default, linear and llama3"
    )
