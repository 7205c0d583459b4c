"""Tiny random DFlash drafts for tests, in each layout of their files (model/dflash_config.py, model/feature_files.py).

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
    "model_type": "qwen3",
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 2,
    "rms_norm_eps": 2e-3,
    "rope_theta": 3000.0,
    "max_position_embeddings": 32,
}
MASK = 270  # no token of the tiny tokenizer
NESTED = "transformer_layer_config"
# By layout: its config beyond the sizes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "z-lab": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]},
        "layer_types": ["full_attention", "full_attention"],
    },
    "speculators": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": 6,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "draft_vocab_size": 96,
        "speculators_config": {"verifier": {"name_or_path": "a target"}},
    },
    "llama": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "llama",
        "block_size": 16,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3]},
    },
}


def write_tiny_dflash(folder: Path, layout: str, target: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random draft for the target in this folder; overrides are fields of its config."""
    config = dflash_config(layout, target, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(dflash_tensors(config, target, seed), folder / "model.safetensors")
    return folder


def dflash_config(layout: str, target: Path, **overrides: Any) -> dict[str, Any]:
    """The config of a tiny draft."""
    about = json.loads((target / "config.json").read_text())
    sizes = {**_SIZES, "hidden_size": about["hidden_size"], "vocab_size": about["vocab_size"]}
    config = {**sizes, **LAYOUTS[layout], **overrides}
    if layout != "speculators":
        return {"num_target_layers": about["num_hidden_layers"], **config}
    inner = {name: config.pop(name) for name in sizes}
    return {**config, NESTED: inner}


def dflash_tensors(config: Mapping[str, Any], target: Path, seed: int) -> dict[str, Tensor]:
    """Random tensors for a config."""
    about = json.loads((target / "config.json").read_text())
    inner = config.get(NESTED, config)
    h, wide, d = inner["hidden_size"], inner["intermediate_size"], inner["head_dim"]
    n_q, n_kv = d * inner["num_attention_heads"], d * inner["num_key_value_heads"]
    ids = config.get("dflash_config", {}).get("target_layer_ids") or config["aux_hidden_state_layer_ids"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(ids) * about["hidden_size"]),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for index in range(inner["num_hidden_layers"]):
        names: dict[str, tuple[int, ...]] = {
            **{f"self_attn.{x}_proj": (n, h) for x, n in (("q", n_q), ("k", n_kv), ("v", n_kv))},
            "self_attn.o_proj": (h, n_q),
            **{f"mlp.{x}_proj": (wide, h) for x in ("gate", "up")},
            "mlp.down_proj": (h, wide),
            **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (h,)),
        }
        names |= {f"self_attn.{x}_norm": (d,) for x in "qk" if inner["model_type"] == "qwen3"}
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in names.items()}
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
