"""GGUF files: their metadata as a ModelSpec, their tensors under Hugging Face names, their tokenizer.

Tensors are dequantised one at a time. llama.cpp stores the query and key rows of Llama with the two rotary halves
interleaved; they are put back in order here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from saguaro.errors import CorruptModel, ModelNotFound, UnsupportedModel
from saguaro.model.spec import ModelSpec, parse_spec

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

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
        self.reader = _open(path)
        self.family = str(self.get("general.architecture"))
        if self.family not in FAMILIES:
            raise UnsupportedModel(f"{path} holds architecture {self.family!r}; Saguaro reads {', '.join(FAMILIES)}")
        self.spec = self._spec()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """The metadata as the content of a Hugging Face config.json."""

        def need(key: str) -> Any:
            value = self.get(f"{self.family}.{key}")
            if value is None:
                raise CorruptModel(f"{self.path} lacks the metadata {self.family}.{key}")
            return value

        if self.get(f"{self.family}.expert_count"):
            raise UnsupportedModel(f"{self.path} is a mixture of experts, which Saguaro does not compute")
        if self.get(f"{self.family}.attention.sliding_window"):
            raise UnsupportedModel(f"{self.path} uses a sliding window, which Saguaro does not compute")
        names = {tensor.name for tensor in self.reader.tensors}
        heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "num_hidden_layers": int(need("block_count")),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.get(f"{self.family}.attention.head_count_kv", heads)),
            "head_dim": int(self.get(f"{self.family}.attention.key_length", hidden // heads)),
            "intermediate_size": int(need("feed_forward_length")),
            "vocab_size": self._tensor("token_embd.weight").shape.tolist()[-1],
            "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(need("context_length")),
            "rope_theta": float(self.get(f"{self.family}.rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": self.family == "llama" and "blk.0.attn_q.bias" in names,
            "hidden_act": "silu",
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight in float32, under its Hugging Face name and in its order."""
        from gguf import dequantize

        for tensor in self.reader.tensors:
            if tensor.name == "rope_freqs.weight":
                continue  # see rope_factors
            name = self._rename(tensor.name)
            # Read, not mapped: pages of a mapped file would stay in memory beside the weights.
            raw = np.fromfile(self.path, tensor.data.dtype, tensor.data.size, offset=int(tensor.data_offset))
            values = dequantize(raw.reshape(tensor.data.shape), tensor.tensor_type)
            weight = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            if self.family == "llama" and name.endswith(
                ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
            ):
                weight = self._unpermute(weight, self.spec.n_heads if ".q_proj." in name else self.spec.n_kv_heads)
            yield name, weight

    def rope_factors(self) -> Tensor | None:
        """Per-frequency divisors of the rotary base: how a GGUF file stores llama3 rope scaling. [d / 2] float32"""
        found = [tensor for tensor in self.reader.tensors if tensor.name == "rope_freqs.weight"]
        return torch.from_numpy(np.array(found[0].data, dtype=np.float32)) if found else None

    def _spec(self) -> ModelSpec:
        return parse_spec(self.config())

    def _tensor(self, name: str) -> Any:
        for tensor in self.reader.tensors:
            if tensor.name == name:
                return tensor
        raise CorruptModel(f"{self.path} has no tensor {name!r}")

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


def build_tokenizer(model: GGUFModel) -> "Tokenizer":
    """The byte-level BPE tokenizer a GGUF file carries."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    kind, pre = model.get("tokenizer.ggml.model"), str(model.get("tokenizer.ggml.pre", "default"))
    if kind != "gpt2" or pre not in _SPLITS:
        raise UnsupportedModel(
            f"{model.path} carries a tokenizer of kind {kind!r}/{pre!r}; Saguaro reads gpt2 with one of "
            f"{', '.join(_SPLITS)}: pass the original tokenizer's folder as tokenizer"
        )
    texts: list[str] = model.get("tokenizer.ggml.tokens")
    types: list[int] = model.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in model.get("tokenizer.ggml.merges")]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre == "llama-bpe"))
    split = _split(pre)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    control, user_defined = 3, 4
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text, t in zip(texts, types, strict=True) if t == control]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False) for text, t in zip(texts, types, strict=True) if t == user_defined]
    )
    if model.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = int(model.get("tokenizer.ggml.bos_token_id"))
        template = processors.TemplateProcessing(single=f"{texts[bos]} $A", special_tokens=[(texts[bos], bos)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


# How llama.cpp's names for pre-tokenisers split text before byte pairs are merged.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}


def _split(pre: str) -> list[Any]:
    from tokenizers import Regex, pre_tokenizers

    if _SPLITS[pre]:
        return [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _open(path: Path) -> "GGUFReader":
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max(int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OSError) as e:
        raise CorruptModel(f"{path} is not a complete GGUF file ({e}); download it again") from e
    if end > path.stat().st_size:
        raise CorruptModel(f"{path} is {path.stat().st_size} bytes and should be {end}; download it again")
    return reader


def _short(value: float) -> float:
    """A float32 metadata value as it was written: 9.99999974e-06 is 1e-05."""
    return float(np.format_float_scientific(np.float32(value)))
