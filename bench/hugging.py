"""The peer of bench.gpu: transformers on the same weights, greedy decoding alone and assisted by the draft."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from saguaro.model.transformer import Transformer
from saguaro.model.weights import destinations


def as_transformers(model: Transformer) -> Any:
    """A transformers model that shares this one's weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.n_vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_length,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=False,
        attention_bias=spec.has_output_bias,
        mlp_bias=spec.has_mlp_bias,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    for name, place in {"lm_head.weight": model.embedding.data, **destinations(model)}.items():
        owner, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(owner), leaf, nn.Parameter(place, requires_grad=False))
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)  # its buffers are not weights
    twin.generation_config.eos_token_id = None
    return twin.eval()


def measure_peers(
    target: Transformer, draft: Transformer | None, prompts: list[list[int]], max_tokens: int
) -> Iterator[dict[str, Any]]:
    """One cell for decoding alone, and two for assisted decoding if there is a draft."""
    alone = as_transformers(target)
    yield {"cell": "hf", "batch": 1, "T": 0.0, **_measure(alone, prompts, max_tokens, {})}
    if draft is not None:
        assistant = as_transformers(draft)
        for n, schedule in ((5, "constant"), (20, "heuristic")):
            assistant.generation_config.num_assistant_tokens = n
            assistant.generation_config.num_assistant_tokens_schedule = schedule
            settings = {"assistant_model": assistant}
            cell = f"hf+{n}{schedule[0]}"
            yield {"cell": cell, "batch": 1, "T": 0.0, **_measure(alone, prompts, max_tokens, settings)}


def _measure(model: Any, prompts: list[list[int]], max_tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second after the first token, prompt by prompt."""
    seconds, n_tokens = 0.0, 0
    _seconds(model, prompts[0], 16, settings)
    for prompt in prompts:
        first = _seconds(model, prompt, 1, {})
        seconds += _seconds(model, prompt, max_tokens, settings) - first
        n_tokens += max_tokens - 1
    return {"tok_s": n_tokens / seconds, "n_tokens": n_tokens}


def _seconds(model: Any, prompt: list[int], max_tokens: int, settings: dict[str, Any]) -> float:
    tokens = torch.tensor([prompt], device=model.device)
    began = time.perf_counter()
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        **settings,
    )
    torch.cuda.synchronize()
    assert found.shape[1] == len(prompt) + max_tokens
    return time.perf_counter() - began
