"""Tiny random models for tests: real Hugging Face checkpoints with a real tokenizer, a few hundred kilobytes each.

Every weight is random, norms and biases too: with their usual 1 and 0 a missing one would go unnoticed. Weights are
large enough that logits differ by several units. No config value is a default that a loader might assume.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saguaro.model.token_bytes import byte_letters

EOS = "<|end|>"
EOS_ID = 256  # tokens 0..255 are the bytes themselves
MERGES = (
    (" ", "\xc3"),
    ("t", "h"),
    ("th", "e"),
    ("i", "n"),
    ("a", "n"),
    ("e", "r"),
    (" ", "the"),
)  # tokens from 257 on
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
FAMILIES: dict[str, dict[str, Any]] = {  # by model_type: fields of its config beyond _SIZES
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}


def write_tiny(folder: Path, family: str, *, seed: int = 0, tied: bool = False, **overrides: Any) -> Path:
    """Write a random checkpoint of a family and its tokenizer; overrides are fields of the family's config."""
    model = tiny_model(family, seed=seed, tied=tied, **overrides)
    model.save_pretrained(folder)
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def tiny_model(family: str, *, seed: int = 0, tied: bool = False, **overrides: Any) -> Any:
    """The transformers model with random float32 weights: the reference, and the model that write_tiny saves."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**_SIZES, **FAMILIES[family], "tie_word_embeddings": tied, **overrides}
    fields.setdefault("eos_token_id", _eos_id(fields["vocab_size"]))
    fields.setdefault("bos_token_id", None)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        randomise(name, weight.data, generator)
    return model.eval()


def tiny_tokenizer(n_vocab: int = 288) -> Any:
    """A byte-level transformers tokenizer of at most n_vocab tokens: token b is byte b, then EOS, then MERGES."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = byte_letters()
    eos_id = _eos_id(n_vocab)
    vocab = {letters[byte]: byte for byte in range(eos_id)} | {EOS: eos_id}
    merges = [(_spell(left), _spell(right)) for left, right in MERGES[: max(0, n_vocab - EOS_ID - 1)]]
    vocab |= {left + right: EOS_ID + 1 + index for index, (left, right) in enumerate(merges)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, chat_template=CHAT_TEMPLATE)


def _spell(text: str) -> str:
    """Bytes, given as latin-1 text, in a byte-level tokenizer's letters."""
    letters = byte_letters()
    return "".join(letters[byte] for byte in text.encode("latin-1"))


def _eos_id(n_vocab: int) -> int:
    return min(EOS_ID, n_vocab - 1)


def randomise(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Fill a weight of this name."""
    if weight.dim() == 2:
        weight.normal_(0.0, 2.0 / weight.shape[1] ** 0.5, generator=generator)
    else:
        weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
