"""EAGLE-3 written out from its description: whole sequences, dictionaries of tensors, no cache and no pages.

input of token i + 1    its embedding, and the target's feature of token i, at rotary position i
first layer             attention over [norm(embedding), norm(state)], residual from the state
logits                  head(norm(output)); row j of the head is token j + d2t[j]
a drafted token         is fed the output before it (norm_output: normed) in place of a feature
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """One draft beside its target's weights."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.inner = self.config.get("transformer_layer_config", self.config)
        own = load_file(folder / "model.safetensors")
        self.of_target = load_file(target / "model.safetensors")
        self.weights: dict[str, Tensor] = {name.replace("midlayer.", "layers.0."): one for name, one in own.items()}

    def states(self, features: Tensor) -> Tensor:  # [n, F] -> [n, h]
        """Features of the target as the draft's first states."""
        if self.config.get("fc_norm"):
            parts = features.chunk(sum("fc_norm" in name for name in self.weights), -1)
            named = [self.weights[f"fc_norm.{at}.weight"] for at in range(len(parts))]
            features = torch.cat([self._norm(part, one) for part, one in zip(parts, named, strict=True)], -1)
        found: Tensor = features @ self.weights["fc.weight"].T
        return found

    def run(self, tokens: Sequence[int], states: Tensor) -> Tensor:  # [n], [n, h] -> [n, h]
        """The outputs for these tokens, each with the state before it; the first has rotary position 0."""
        own = "embed_tokens.weight"
        table = self.weights[own] if own in self.weights else self.of_target["model.embed_tokens.weight"]
        embedded = table[torch.tensor(tokens)]
        x = states
        for index in range(self.inner["num_hidden_layers"]):
            w = {name.removeprefix(f"layers.{index}."): one for name, one in self.weights.items()}
            if index == 0:
                normed = self._norm(x, w["hidden_norm.weight"])
                read = torch.cat((self._norm(embedded, w["input_layernorm.weight"]), normed), -1)
                x = normed if self.config.get("norm_before_residual") else x
            else:
                read = self._norm(x, w["input_layernorm.weight"])
            x = x + self._attend(read, w)
            read = self._norm(x, w["post_attention_layernorm.weight"])
            gate, up = read @ w["mlp.gate_proj.weight"].T, read @ w["mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return x

    def logits(self, outputs: Tensor) -> Tensor:  # [n, h] -> [n, V]
        """Over the target's vocabulary; -inf for tokens that the head lacks."""
        normed = self._norm(outputs, self.weights["norm.weight"])
        if "lm_head.weight" not in self.weights:
            found: Tensor = normed @ self.of_target["lm_head.weight"].T
            return found
        said = normed @ self.weights["lm_head.weight"].T
        full = torch.full((len(said), self.inner["vocab_size"]), -torch.inf)
        for row, offset in enumerate(self.weights["d2t"].tolist()):
            full[:, row + offset] = said[:, row]
        return full

    def draft(self, text: Sequence[int], features: Tensor, n: int, n_known: int) -> tuple[list[int], Tensor]:
        """n tokens, greedily, after a text with these features [len(text) - 1, F]; and the logits of each step. The
        target knows n_known tokens; its head may have more rows."""
        tokens, states = list(text[1:]), self.states(features)
        found: list[Tensor] = []
        for _ in range(n):
            outputs = self.run(tokens, states)
            found.append(self.logits(outputs[-1:])[0])
            tokens.append(int(found[-1][:n_known].argmax()))
            last = outputs[-1:]
            last = self._norm(last, self.weights["norm.weight"]) if self.config.get("norm_output") else last
            states = torch.cat((states, last))
        return tokens[len(text) - 1 :], torch.stack(found)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps: float = self.inner["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def _attend(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        n, n_heads, n_kv = len(x), self.inner["num_attention_heads"], self.inner["num_key_value_heads"]
        q, k, v = (x @ w[f"self_attn.{one}_proj.weight"].T for one in "qkv")
        q, k, v = q.view(n, n_heads, -1), k.view(n, n_kv, -1), v.view(n, n_kv, -1)
        if "self_attn.q_norm.weight" in w:
            q, k = self._norm(q, w["self_attn.q_norm.weight"]), self._norm(k, w["self_attn.k_norm.weight"])
        q, k = self._turn(q), self._turn(k)
        k, v = (one.repeat_interleave(n_heads // n_kv, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        return mixed.reshape(n, -1) @ w["self_attn.o_proj.weight"].T

    def _turn(self, heads: Tensor) -> Tensor:  # [n, heads, d]
        half = heads.shape[-1] // 2
        rates = self.inner["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(len(heads))[:, None] * rates
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = heads[..., :half], heads[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def features_of(target: Any, text: Sequence[int], taps: Sequence[int]) -> Tensor:  # [n, F]
    """What a transformers model computes: hidden_states[i] enters layer i."""
    with torch.no_grad():
        states = target(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in taps], -1)


def watched(function: Callable[[Tensor], Tensor], seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """The same function; what it returned is kept."""

    def watch(hidden: Tensor) -> Tensor:
        found = function(hidden)
        seen.append(found.clone())  # it may be changed in place
        return found

    return watch
