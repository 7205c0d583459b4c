"""Grows a model (saguaro.measure.grown), compares it with its source, and finds the noise for an agreement.

python -m bench.grown --shape 0.6b --epsilon 0
python -m bench.grown --shape 1b --agreement 0.8
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from saguaro import LLM, SamplingParams
from saguaro.config import format_bytes
from saguaro.engine.assembly import find_device
from saguaro.llm import default_cache
from saguaro.measure.grown import SHAPES, agreement, find_epsilon, forward, grow
from saguaro.measure.prompts import OURS
from saguaro.model.default import fetch_default
from saguaro.model.load import load, locate
from saguaro.model.tokenizer import load_tokenizer
from saguaro.model.transformer import Transformer


@dataclass(frozen=True)
class Args:
    """What to grow, and what to check."""

    shape: Literal["32b", "8b", "1b", "0.6b"] = "0.6b"
    epsilon: float = 0.0
    agreement: float | None = None
    """Find the epsilon with this greedy agreement with the draft, on the source's answers to our own prompts."""
    draft: Literal["32b", "8b", "1b", "0.6b"] = "0.6b"
    """The shape of the draft to agree with, grown without noise."""
    model: str | None = None
    """A folder, .gguf file or Hub id to grow; without it, the default model."""
    seed: int = 0
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def main(args: Args) -> None:
    """Grow a model, compare it with its source, and optionally find an epsilon."""
    device = find_device("device", args.device)
    usual = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = usual if args.dtype == "auto" else cast(torch.dtype, getattr(torch, args.dtype))
    path = locate(args.model) if args.model else fetch_default(default_cache())
    source = load(path.name, path, device, torch.float32).model
    n_known = load_tokenizer(path, source.spec.n_vocab).n_vocab
    texts = _answers(path, device)
    began = time.perf_counter()
    grown = grow(source, SHAPES[args.shape], epsilon=args.epsilon, seed=args.seed, device=device, dtype=dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    print(f"{args.shape} in {dtype} on {device}: {format_bytes(grown.n_bytes)} in {seconds:.1f} s")
    print(f"epsilon {args.epsilon}: {_compare(grown.model, source, texts[:2], n_known)}")
    if args.agreement is not None:
        shape = SHAPES[args.draft]
        draft = grow(source, shape, epsilon=0.0, seed=args.seed, device=device, dtype=dtype).model
        epsilon = find_epsilon(grown, draft, texts, n_known, args.agreement)
        found = agreement(grown.model, draft, texts, n_known)
        print(f"epsilon {epsilon:.4f}: agreement {found:.3f} with {args.draft} on {sum(map(len, texts))} tokens")


def _answers(path: Path, device: torch.device) -> list[list[int]]:
    """Our own prompts, each with the model's answer."""
    llm = LLM(path, device=str(device), kv_memory="256MiB", max_model_len=1024)
    encode = llm.engine.tokenizer.encode_chat
    prompts = [encode([{"role": "user", "content": text}]) for text in OURS[:8]]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def _compare(model: Transformer, source: Transformer, texts: list[list[int]], n_known: int) -> str:
    pairs = list(zip(forward(model, texts), forward(source, texts), strict=True))
    worst = max(float((ours[:, :n_known] - theirs[:, :n_known]).abs().max()) for ours, theirs in pairs)
    largest = max(float(theirs[:, :n_known].abs().max()) for _, theirs in pairs)
    return f"logits differ from the source's by {worst:.2e} at most; the largest is {largest:.1f}"


if __name__ == "__main__":
    import tyro  # not installed on a bare GPU machine, which also imports this module

    main(tyro.cli(Args))
