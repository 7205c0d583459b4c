"""GGUF files: their metadata as a ModelSpec, their tensors under Hugging Face names.

Tensors are dequantised one at a time. llama.cpp stores the query and key rows of Llama with the two rotary halves
interleaved; they are put back in order here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saguaro.errors import CorruptModel, ModelNotFound, UnsupportedModel
from saguaro.model.gguf_header import TensorInfo, read_header
from saguaro.model.spec import parse_spec

ROPE_FREQS = "rope_freqs.weight"
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFModel:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist; give the path of a .gguf file")
        self.path = path
        self.metadata, self.infos = read_header(path)
        n_files = self.get("split.count", 1)
        if n_files > 1:
            raise UnsupportedModel(
                f"{path} is one of {n_files} files of a split model; merge them with llama-gguf-split --merge"
            )
        self.family = str(self.get("general.architecture"))
        if self.family not in FAMILIES:
            raise UnsupportedModel(f"{path} holds architecture {self.family!r}; Saguaro reads {', '.join(FAMILIES)}")
        self.spec = parse_spec(self.config())
        self._refuse_unknown_tensors()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        return self.metadata.get(key, default)

    def special_id(self, role: str) -> int | None:
        """The token of a role: bos, eos, unknown, padding, eot or eom; SentencePiece has ids for three by default."""
        usual = {"unknown": 0, "bos": 1, "eos": 2} if self.get("tokenizer.ggml.model") == "llama" else {}
        found = self.get(f"tokenizer.ggml.{role}_token_id", usual.get(role))
        return None if found is None else int(found)

    def config(self) -> dict[str, Any]:
        """The metadata as the content of a Hugging Face config.json."""

        def need(key: str, default: float | None = None) -> Any:
            value = self.get(f"{self.family}.{key}", default)
            if value is None:
                raise CorruptModel(f"{self.path} lacks the metadata {self.family}.{key}")
            if isinstance(value, list):
                raise UnsupportedModel(f"{self.path} has one {self.family}.{key} per layer; Saguaro reads one for all")
            return value

        if self.get(f"{self.family}.expert_count"):
            raise UnsupportedModel(f"{self.path} is a mixture of experts, which Saguaro does not compute")
        if self.get(f"{self.family}.attention.sliding_window"):
            raise UnsupportedModel(f"{self.path} uses a sliding window, which Saguaro does not compute")
        if self.get(f"{self.family}.rope.scale_linear", 1.0) != 1.0:
            raise UnsupportedModel(f"{self.path} has the old rope.scale_linear; convert the model anew")
        ends = {token: None for role in ("eos", "eot", "eom") if (token := self.special_id(role)) is not None}
        heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
        head_dim = int(need("attention.key_length", hidden // max(heads, 1)))
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "num_hidden_layers": int(need("block_count")),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": int(need("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "intermediate_size": int(need("feed_forward_length")),
            "vocab_size": self._info("token_embd.weight").shape[0],
            "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(need("context_length")),
            "rope_theta": float(need("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": need("rope.dimension_count", head_dim) / max(head_dim, 1),
            "tie_word_embeddings": "output.weight" not in self.infos,
            "attention_bias": self.family == "llama" and "blk.0.attn_q.bias" in self.infos,
            "hidden_act": "silu",
            "bos_token_id": self.special_id("bos"),
            "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in float32, under its Hugging Face name and in its order."""
        for info in self.infos.values():
            if info.name == ROPE_FREQS:
                continue  # see rope_factors
            name, weight = self._rename(info.name), self._read(info)
            if self.family == "llama" and name.endswith(
                ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
            ):
                weight = self._unpermute(weight, self.spec.n_heads if ".q_proj." in name else self.spec.n_kv_heads)
            yield name, weight

    def rope_factors(self) -> Tensor | None:
        """Per-frequency divisors of the rotary base: how a GGUF file stores llama3 rope scaling. [d / 2] float32"""
        return self._read(self.infos[ROPE_FREQS]) if ROPE_FREQS in self.infos else None

    def _read(self, info: TensorInfo) -> Tensor:
        from gguf import dequantize

        # Read, not mapped: pages of a mapped file would stay in memory beside the weights.
        raw = np.fromfile(self.path, np.uint8, info.n_bytes, offset=info.offset)
        try:
            values = dequantize(raw.reshape(info.byte_shape), info.kind)
        except NotImplementedError as e:
            raise UnsupportedModel(
                f"{self.path} holds {info.name!r} as {info.kind.name}, which Saguaro does not read; "
                "use another quantisation of the model"
            ) from e
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise CorruptModel(f"{self.path} has no tensor {name!r}")
        return self.infos[name]

    def _refuse_unknown_tensors(self) -> None:
        """A tensor left out would change the result, and it is no damage to the file."""
        spec = self.spec
        optional = {f"self_attn.{name}_proj.bias": spec.has_qkv_bias for name in "qkv"}
        optional |= {f"self_attn.{name}_norm.weight": spec.has_qk_norm for name in "qk"}
        optional["self_attn.o_proj.bias"] = spec.has_output_bias
        for name in self.infos.keys() - {ROPE_FREQS}:
            part = self._rename(name).split(".", 3)[-1]
            if not optional.get(part, part.endswith("weight")):
                raise UnsupportedModel(f"{self.path} holds {name!r}, which Saguaro's {spec.architecture} does not have")
        if spec.has_output_bias and "blk.0.attn_output.bias" not in self.infos:
            raise UnsupportedModel(
                f"{self.path} has biases of queries and none of the attention's output, which Saguaro's "
                f"{spec.architecture} does not compute"
            )

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.get(f"{self.family}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": float(self.get(f"{self.family}.rope.scaling.factor", 1.0))}

    def _rename(self, name: str) -> str:
        if name in _GLOBAL:
            return _GLOBAL[name]
        parts = name.split(".")  # blk.3.attn_q.weight
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
            return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
        raise UnsupportedModel(f"{self.path} holds tensor {name!r}, which {FAMILIES[self.family]} does not have")

    @staticmethod
    def _unpermute(weight: Tensor, n_heads: int) -> Tensor:  # [h * d, in] (or [h * d])
        rest = weight.shape[1:]
        pairs = weight.view(n_heads, weight.shape[0] // n_heads // 2, 2, *rest)
        return pairs.transpose(1, 2).reshape(weight.shape)


def _short(value: float) -> float:
    """A float32 metadata value as it was written: 9.99999974e-06 is 1e-05."""
    return float(np.format_float_scientific(np.float32(value)))
