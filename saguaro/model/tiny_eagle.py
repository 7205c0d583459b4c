"""Tiny random EAGLE-3 drafts for tests, in each layout of their files (model/eagle_config.py, model/feature_files.py).

A draft is made for a target in a folder, as saguaro.model.tiny writes it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.model.tiny import randomise
from saguaro.model.weights import save_tensors

_SIZES: dict[str, Any] = {
    "model_type": "llama",
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 2e-3,
    "rope_theta": 3000.0,
    "max_position_embeddings": 32,
}
IDS = "eagle_aux_hidden_state_layer_ids"
# By layout: its config beyond the sizes, and the tensors that it has or lacks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "safeailab": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 120},
    "specforge": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 150,
        "eagle_config": {IDS: [0, 2, 4], "use_aux_hidden_state": True},
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 96,
        "norm_before_residual": True,
        IDS: [1, 3, 5],
        "speculators_config": {"verifier": {"name_or_path": "a target"}},
    },
    "eagle3.1": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 120,
        "fc_norm": True,
        "norm_output": True,
    },
    "qwen3": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 24,
        "num_hidden_layers": 2,
    },
}
EMBEDS = ("specforge", "speculators")  # layouts whose files hold an embedding
NESTED = "transformer_layer_config"


def write_tiny_eagle(folder: Path, layout: str, target: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random draft for the target in this folder; overrides are fields of its config."""
    config = eagle_config(layout, target, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(eagle_tensors(layout, config, target, seed), folder / "model.safetensors")
    return folder


def eagle_config(layout: str, target: Path, **overrides: Any) -> dict[str, Any]:
    """The config of a tiny draft."""
    about = json.loads((target / "config.json").read_text())
    config = {**_SIZES, "hidden_size": about["hidden_size"], "vocab_size": about["vocab_size"], **LAYOUTS[layout]}
    config |= overrides
    if layout != "speculators":
        return config
    inner = {name: config.pop(name) for name in (*_SIZES, "hidden_size", "vocab_size")}
    return {**config, NESTED: inner}


def eagle_tensors(layout: str, config: Mapping[str, Any], target: Path, seed: int) -> dict[str, Tensor]:
    """Random tensors for a config."""
    about = json.loads((target / "config.json").read_text())
    inner = config.get(NESTED, config)
    h, wide, h_target = inner["hidden_size"], inner["intermediate_size"], about["hidden_size"]
    d = inner.get("head_dim", h // inner["num_attention_heads"])
    n_q, n_kv = d * inner["num_attention_heads"], d * inner["num_key_value_heads"]
    ids = config.get("eagle_config", config).get(IDS)
    n_taps = 3 if ids is None else len(ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, n_taps * h_target), "norm.weight": (h,)}
    for index in range(inner["num_hidden_layers"]):
        prefix = f"layers.{index}." if layout in ("speculators", "qwen3") else "midlayer."
        n_in = h if index else 2 * h
        names: dict[str, tuple[int, ...]] = {
            **{f"self_attn.{x}_proj": (n, n_in) for x, n in (("q", n_q), ("k", n_kv), ("v", n_kv))},
            "self_attn.o_proj": (h, n_q),
            **{f"mlp.{x}_proj": (wide, h) for x in ("gate", "up")},
            "mlp.down_proj": (h, wide),
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (h,)),
        }
        names |= {} if index else {"hidden_norm": (h,)}
        names |= {f"self_attn.{x}_norm": (d,) for x in "qk" if inner["model_type"] == "qwen3"}
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in names.items()}
    shapes |= {f"fc_norm.{at}.weight": (h_target,) for at in range(n_taps) if config.get("fc_norm")}
    if layout in EMBEDS:
        shapes["embed_tokens.weight"] = (inner["vocab_size"], h)
    n_rows = config.get("draft_vocab_size")
    if n_rows is not None:
        shapes["lm_head.weight"] = (n_rows, h)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        randomise(name, tensor, generator)
    if n_rows is not None:
        tokens = torch.randperm(min(264, inner["vocab_size"]), generator=generator)[:n_rows].sort().values
        tensors["d2t"] = tokens - torch.arange(n_rows)
        tensors["t2d"] = torch.isin(torch.arange(inner["vocab_size"]), tokens)
    return tensors
