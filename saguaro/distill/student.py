"""A draft made from its target: some of its layers, some rows of its head, and its embedding, which is shared.

    config.json              the target's with fewer layers, plus "saguaro": {"embedding": "target"}
    model.safetensors        layers, last norm and head rows in half precision or int8; no embedding
    token_map.safetensors    the token of each row of the head

An older config.json is removed first and the new one is written last: a folder with config.json is complete.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.errors import ConfigError, ModelError
from saguaro.model.load import borrower
from saguaro.model.rounded import rounded
from saguaro.model.shapes import EMBEDDING
from saguaro.model.spec import ModelSpec, Rope
from saguaro.model.token_map import fault, write_token_map
from saguaro.model.transformer import Transformer
from saguaro.model.weights import destinations, save_tensors, write_whole


def pick_layers(n_target: int, n: int) -> list[int]:
    """The target layers from which a draft of n layers is initialised: first, last and evenly between.

    >>> pick_layers(30, 4), pick_layers(30, 1)
    ([0, 10, 19, 29], [0])
    """
    if not 1 <= n <= n_target:
        raise ConfigError(f"the draft is to have {n} layers; the target has {n_target}: choose 1 to {n_target}")
    return [round(index * (n_target - 1) / max(n - 1, 1)) for index in range(n)]


def make_student(
    target: Transformer,
    layers: Sequence[int],
    ids: Tensor,  # [head rows] int64: the tokens of its head
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """Copies of these layers, the last norm and these rows of the head; the embedding is the target's tensor."""
    spec = target.spec
    if not layers or not all(0 <= layer < spec.n_layers for layer in layers):
        raise ConfigError(f"the draft is to have layers {list(layers)}; the target has 0 to {spec.n_layers - 1}")
    ids = ids.long().to(target.device)
    wrong = fault(ids, spec.n_vocab)
    if wrong is not None:
        raise ConfigError(f"the draft's head {wrong}")
    unsaid = set(spec.eos_ids) - set(ids.tolist())
    if unsaid:
        raise ConfigError(f"the draft's head lacks the target's end of text, {sorted(unsaid)}; add it to the ids")
    assert target.token_map is None, "rows of the head are tokens"
    own = replace(spec, n_layers=len(layers), is_tied=False)
    student = borrower(own, ids, target.embedding, target.device, dtype)
    student.frequencies = target.frequencies
    _copy(target, layers, ids, student)
    return student


@torch.no_grad()
def with_head(student: Transformer, target: Transformer, ids: Tensor) -> Transformer:  # [head rows] int64
    """The student with a head of these tokens: rows that it has are kept, the others are copied from the target."""
    assert student.token_map is not None
    changed = make_student(target, [0] * student.spec.n_layers, ids, student.head.matrix.dtype)
    changed.frequencies = student.frequencies
    for ours, theirs in zip(changed.layers, student.layers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    changed.norm.load_state_dict(student.norm.state_dict())
    row = torch.full((target.spec.n_vocab,), -1, device=student.device)
    row[student.token_map] = torch.arange(len(student.token_map), device=student.device)
    row = row[ids.to(student.device)]  # row in the student's head, [head rows]
    changed.head.matrix[:, row >= 0] = student.head.matrix[:, row[row >= 0]]
    return changed


def save_student(student: Transformer, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder for `--draft`, in this dtype (None: the half precision that loses less). With int8, other tensors
    than matrices are in half precision."""
    weights = {name: place for name, place in destinations(student).items() if name != EMBEDDING}
    assert student.token_map is not None
    half = half_for(weights)
    dtype = dtype or half
    if dtype == torch.int8:
        weights = rounded(weights, half)
    else:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    content = {**config_of(student.spec), "dtype": str(dtype).removeprefix("torch."), "saguaro": _about(student)}
    write_draft(folder, weights, content, student.token_map)


def write_draft(
    folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], token_map: Tensor | None = None
) -> None:
    """Write the files of a draft. An older config.json is removed first and the new one written last."""
    path = folder / "config.json"
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise ModelError(f"cannot write to {folder} ({e.strerror}); choose another folder") from e
    save_tensors(weights, folder / "model.safetensors")
    if token_map is not None:
        write_token_map(token_map, folder)
    write_whole(path, lambda partial: partial.write_text(json.dumps(config, indent=2) + "\n"))


def half_for(weights: Mapping[str, Tensor]) -> torch.dtype:
    """float16 or bfloat16, whichever has the smaller rounding error on these weights.

    >>> half_for({"usual": torch.tensor([0.1])}), half_for({"too large for float16": torch.tensor([0.1, 1e5])})
    (torch.float16, torch.bfloat16)
    """

    def loss(dtype: torch.dtype) -> float:
        return sum(float((weight.to(dtype).float() - weight.float()).square().sum()) for weight in weights.values())

    return min((torch.float16, torch.bfloat16), key=loss)


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The content of a Hugging Face config.json that parse_spec reads as this spec."""
    eos = list(spec.eos_ids)
    return {
        "architectures": [spec.architecture],
        "model_type": spec.architecture.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": spec.n_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.n_vocab,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_length,
        "rope_parameters": _rope_config(spec.rope),
        "tie_word_embeddings": spec.is_tied,
        "attention_bias": spec.has_qkv_bias and spec.architecture != "Qwen2ForCausalLM",  # Qwen2 always has them
        "mlp_bias": spec.has_mlp_bias,
        "hidden_act": "silu",
        "sliding_window": None,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "attention_multiplier": spec.attention_scale,
        **spec.sizes,
    }


@torch.no_grad()
def _copy(target: Transformer, layers: Sequence[int], ids: Tensor, student: Transformer) -> None:
    for ours, index in zip(student.layers, layers, strict=True):
        for name, weight in ours.named_parameters():
            weight.copy_(target.layers[index].get_parameter(name))
    student.norm.load_state_dict(target.norm.state_dict())
    student.head.matrix.copy_(target.head.matrix.index_select(1, ids))


def _about(student: Transformer) -> dict[str, Any]:
    """The `saguaro` object of config.json: the embedding's owner, and rope frequencies if rope_parameters differ."""
    usual = student.spec.rope.frequencies(student.spec.head_dim)
    own = student.frequencies.cpu()
    odd = {} if own.equal(usual) else {"frequencies": own.tolist()}  # from a GGUF file with rope divisors
    return {"embedding": "target", **odd}


def _rope_config(rope: Rope) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        found["factor"] = rope.factor
    if rope.kind == "llama3":
        found |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_length,
        }
    return found
