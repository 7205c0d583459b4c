"""The peer: Hugging Face transformers on the same folder, dtype and threads."""

from pathlib import Path
from typing import Any

import torch


class Peer:
    """transformers' generate(), greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.device = device

    @torch.inference_mode()
    def generate(self, prompt: list[int], n_tokens: int, stops: bool = False) -> list[int]:
        """Greedy continuation; exactly n_tokens unless it stops at the end of text."""
        tokens = torch.tensor([prompt], device=self.device)
        out = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=n_tokens,
            min_new_tokens=None if stops else n_tokens,
            do_sample=False,
        )
        return [int(token) for token in out[0, len(prompt) :]]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:  # [T, V]
        """Logits after every token."""
        found: torch.Tensor = self.model(torch.tensor([tokens], device=self.device)).logits[0].float()
        return found
