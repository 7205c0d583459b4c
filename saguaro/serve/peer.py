"""The peer: Hugging Face transformers on the same folder, dtype, device and threads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saguaro.config import SamplingParams
from saguaro.errors import ConfigError

NAME = "transformers"
SAME = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")


class Peer:
    """transformers' generate()."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        self.device = device

    @torch.inference_mode()
    def generate(self, prompt: list[int], n_tokens: int, stops: bool = False) -> list[int]:
        """Greedy continuation; exactly n_tokens unless it stops at the end of text."""
        params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=not stops)
        return self.generate_batch([prompt], params)[0]

    @torch.inference_mode()
    def generate_batch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Continue prompts together, padded on the left to the longest; each output ends with its end of text, if any.

        Sampling is reproducible by the seed, and its law is ours; the noise is not.
        """
        if params.seed is not None:
            torch.manual_seed(params.seed)
        longest = max(len(prompt) for prompt in prompts)
        n_pad = [longest - len(prompt) for prompt in prompts]
        tokens = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(n_pad, prompts, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(n_pad)[:, None]).long()  # [B, T]
        sampling = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        out = self.model.generate(
            tokens.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.max_tokens if params.ignore_eos else None,
            do_sample=params.temperature > 0,
            repetition_penalty=params.repetition_penalty,
            pad_token_id=0,
            **({**sampling, "min_p": params.min_p or None} if params.temperature > 0 else {}),
        )
        return [self._until_end(row, params.ignore_eos) for row in out[:, longest:].tolist()]

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:  # [T, V]
        """Logits after every token."""
        found: torch.Tensor = self.model(torch.tensor([tokens], device=self.device)).logits[0].float()
        return found

    def _until_end(self, tokens: list[int], ignore_eos: bool) -> list[int]:
        ends = self.model.generation_config.eos_token_id
        stops = set() if ignore_eos or ends is None else set(ends if isinstance(ends, list) else [ends])
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
        return tokens[: end + 1]


def check_peer(model: str | None, params: SamplingParams) -> None:
    """Raise if the peer cannot read the model, or does not know a parameter that is set."""
    if model is not None and model.endswith(".gguf"):
        raise ConfigError(f"model is {model!r}; {NAME} is measured on Hugging Face folders: give one, or no peer")
    plain = SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        if name not in SAME and getattr(params, name) != getattr(plain, name):
            raise ConfigError(f"{name} is {getattr(params, name)!r}; {NAME} knows {', '.join(SAME)}: leave it out")
