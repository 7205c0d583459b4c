"""Write a transformers model as llama.cpp's converter does, through the `gguf` package and its own tensor names."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from saguaro.model.tiny import EOS, tiny_tokenizer

Array = NDArray[np.float32]
F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path,
    model: Any,
    kind: gguf.GGMLQuantizationType = F32,
    *,
    family: str | None = None,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] | None = None,
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write matrices as `kind` and vectors in float32; `family` overrides the architecture's name, `tokenizer` writes
    another than the tiny one, `add` adds more."""
    config = model.config
    writer = gguf.GGUFWriter(path, family or config.model_type)
    _add_metadata(writer, config)
    (tokenizer or _add_tokenizer)(writer, config.vocab_size)
    add(writer)
    names = gguf.get_tensor_name_map(_architecture(config.model_type), config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _permuted(name, weight.numpy(), config)
        own = kind if values.ndim == 2 else F32
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert to is not None
        writer.add_tensor(to, gguf.quants.quantize(values, own), raw_dtype=own)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def through(model: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """The same model, its matrices quantised and put back."""
    for weight in model.parameters():
        if weight.dim() == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(weight.data.numpy(), kind), kind)
            weight.data.copy_(torch.from_numpy(values))
    return model


def llama3_divisors(config: Any) -> Array:  # [d / 2]
    """llama.cpp's rope_freqs: what each frequency is divided by."""
    rope = config.rope_parameters
    low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    divisors = []
    for pair in range(config.head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / config.head_dim)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    tokenizer = tiny_tokenizer(n_vocab)
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_types([control if text == EOS else normal for text in texts])
    writer.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _merges(tokenizer: Any) -> list[list[str]]:
    found: list[list[str]] = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return found


def _architecture(family: str) -> gguf.MODEL_ARCH:
    return {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[family]


def _permuted(name: str, values: Array, config: Any) -> Array:
    """llama.cpp interleaves the two rotary halves of Llama's queries and keys."""
    if config.model_type != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return values
    n_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
