"""DFlash written out from its description: whole sequences, dictionaries of tensors, no cache and no pages.

context       hidden_norm(fc(features of the text but its last token)), which no norm of a layer is applied to
block         embeddings of the last token and of masks, at their positions in the text
a layer       keys and values of [context, norm(block)], queries of norm(block); every query sees every key
logits        head(norm(output)) at the masks; row j of an own head is token j + d2t[j]
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """One draft beside its target's weights."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.inner = self.config.get("transformer_layer_config", self.config)
        self.weights = load_file(folder / "model.safetensors")
        self.of_target = load_file(target / "model.safetensors")

    @property
    def mask(self) -> int:
        found: int = self.config.get("dflash_config", self.config)["mask_token_id"]
        return found

    def logits(self, features: Tensor, last: int, first: int, n: int) -> Tensor:  # [c, F] -> [n, V]
        """At n masks behind the last token that is known, which has the position `first`."""
        context = self._norm(features @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        x = self.of_target["model.embed_tokens.weight"][torch.tensor([last, *[self.mask] * n])]
        for index in range(self.inner["num_hidden_layers"]):
            w = {name.removeprefix(f"layers.{index}."): one for name, one in self.weights.items()}
            x = x + self._attend(context, self._norm(x, w["input_layernorm.weight"]), first, w)
            read = self._norm(x, w["post_attention_layernorm.weight"])
            gate, up = read @ w["mlp.gate_proj.weight"].T, read @ w["mlp.up_proj.weight"].T
            x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return self._head(self._norm(x[1:], self.weights["norm.weight"]))

    def _head(self, normed: Tensor) -> Tensor:
        if "lm_head.weight" not in self.weights:
            found: Tensor = normed @ self.of_target["lm_head.weight"].T
            return found
        said = normed @ self.weights["lm_head.weight"].T
        full = torch.full((len(said), self.inner["vocab_size"]), -torch.inf)
        for row, offset in enumerate(self.weights["d2t"].tolist()):
            full[:, row + offset] = said[:, row]
        return full

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps: float = self.inner["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def _attend(self, context: Tensor, x: Tensor, first: int, w: dict[str, Tensor]) -> Tensor:
        n_heads, n_kv = self.inner["num_attention_heads"], self.inner["num_key_value_heads"]
        both = torch.cat((context, x))
        q = (x @ w["self_attn.q_proj.weight"].T).view(len(x), n_heads, -1)
        k, v = ((both @ w[f"self_attn.{one}_proj.weight"].T).view(len(both), n_kv, -1) for one in "kv")
        if "self_attn.q_norm.weight" in w:
            q, k = self._norm(q, w["self_attn.q_norm.weight"]), self._norm(k, w["self_attn.k_norm.weight"])
        positions = torch.cat((torch.arange(len(context)), torch.arange(first, first + len(x))))
        q, k = self._turn(q, positions[len(context) :]), self._turn(k, positions)
        k, v = (one.repeat_interleave(n_heads // n_kv, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return mixed.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T

    def _turn(self, heads: Tensor, positions: Tensor) -> Tensor:  # [n, heads, d], [n]
        half = heads.shape[-1] // 2
        rates = self.inner["rope_theta"] ** (-torch.arange(half) / half)
        angle = positions[:, None] * rates
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        left, right = heads[..., :half], heads[..., half:]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
