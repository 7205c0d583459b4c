"""Peers: Hugging Face transformers on the same folder, dtype and device, and llama.cpp on the same .gguf file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from saguaro.config import SamplingParams
from saguaro.errors import ConfigError
from saguaro.measure.candidate import cores_of, method_of, sizes_of
from saguaro.model.default import GGUF_NAME
from saguaro.model.default import NAME as DEFAULT

NAME, LLAMA = "transformers", "llama.cpp"
SAME = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "ignore_eos")


class Peer:
    """transformers' generate()."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        self.model: Any = model.eval().to(device)
        self.device = device

    @torch.inference_mode()
    def generate(self, prompt: list[int], n_tokens: int, stops: bool = False) -> list[int]:
        """Greedy continuation; exactly n_tokens unless it stops at the end of text."""
        params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=not stops)
        return self.generate_batch([prompt], params)[0]

    @torch.inference_mode()
    def generate_batch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Continue prompts together, padded on the left to the longest; each output ends with its end of text, if any.

        Sampling is reproducible by the seed and has our distribution, but not our noise.
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


class LlamaCpp:
    """llama.cpp, through llama-cpp-python."""

    def __init__(self, path: Path, n_threads: int, n_context: int) -> None:
        llama_cpp = _llama_cpp()
        threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
        self.model: Any = llama_cpp.Llama(str(path), n_ctx=n_context, verbose=False, **threads)

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """Continue prompts one by one; each output ends with its end of text, if any."""
        return [self._one(prompt, own) for prompt, own in zip(prompts, params, strict=True)]

    def _one(self, prompt: list[int], params: SamplingParams) -> list[int]:
        assert params.max_tokens is not None
        if params.seed is not None:
            self.model.set_seed(params.seed % 2**32)
        tokens: list[int] = []
        rules = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
        rules |= {"repeat_penalty": params.repetition_penalty, "temp": params.temperature}
        for token in self.model.generate(prompt, **rules):
            tokens.append(int(token))
            is_end = token == self.model.token_eos() and not params.ignore_eos
            if is_end or len(tokens) == params.max_tokens:
                break
        return tokens


def _llama_cpp() -> Any:
    try:
        import llama_cpp
    except ImportError as e:
        raise ConfigError(f"{LLAMA} is not installed ({e}); pip install llama-cpp-python") from e
    return llama_cpp


def gguf_of(path: Path) -> Path:
    """The .gguf file of a model: the file itself, or the one that the default model's folder was converted from."""
    found = path if path.suffix == ".gguf" else path.parent / GGUF_NAME
    if path.suffix != ".gguf" and path.name != DEFAULT:
        raise ConfigError(f"model is {str(path)!r}; {LLAMA} reads a .gguf file: give one, or no {LLAMA}")
    return found


def check_peer(peer: str, model: str | None, params: SamplingParams) -> None:
    """Raise if a peer is unknown, cannot read the model, or does not support a parameter that is set."""
    name = method_of(peer)
    cores_of(peer)
    if name not in (NAME, LLAMA) or sizes_of(peer):  # K applies only to our methods
        raise ConfigError(f"peer is {peer!r}; peers are {NAME} and {LLAMA}")
    if name == LLAMA:
        _llama_cpp()
    elif model is not None and model.endswith(".gguf"):
        raise ConfigError(f"model is {model!r}; {NAME} is measured on Hugging Face folders: give one, or no peer")
    plain = SamplingParams()
    for field in SamplingParams.__dataclass_fields__:
        if field not in SAME and getattr(params, field) != getattr(plain, field):
            raise ConfigError(f"{field} is {getattr(params, field)!r}; {name} knows {', '.join(SAME)}: leave it out")
