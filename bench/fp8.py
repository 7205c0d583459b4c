"""What weights in FP8 lose, on greedy texts of the float32 model: the default model is written as a checkpoint in FP8
with blocks of several sizes, and loaded.

    python -m bench.fp8 --data ../shared/datasets [--prompts 6] [--tokens 64]

KL is that of the float32 model's distribution from the other model's, per token; agreement is that of the argmax.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.int8 import logits, texts
from saguaro import LLM
from saguaro.llm import default_cache
from saguaro.model.default import fetch_default
from saguaro.model.weights import save_tensors

LARGEST = 448.0  # of e4m3
WHOLE = 2**20  # more rows and columns than a matrix has
BLOCKS = {"a block of 128 x 128": (128, 128), "a row of 128": (1, 128), "a row": (1, WHOLE), "a matrix": (WHOLE, WHOLE)}


class Loss(NamedTuple):
    """What was lost on some tokens."""

    kl: float
    agreement: float
    n: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=6, help="of each set")
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    exact, source = LLM(dtype="float32"), fetch_default(default_cache())
    written = list(texts(exact, asked.data, asked.prompts, asked.tokens))
    right = [logits(exact, [*prompt, *answer], len(answer)).log_softmax(1) for prompt, answer in written]
    _tell("int8, from float32", loss(LLM(dtype="int8"), written, right))
    for name, block in BLOCKS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(source, Path(folder), block)
            for dtype in ("float32", "int8"):
                found = loss(LLM(folder, dtype=dtype), written, right)
                _tell(f"FP8 with a scale for {name}, computed in {dtype}", found)


def loss(llm: LLM, written: list[tuple[list[int], list[int]]], right: list[Tensor]) -> Loss:
    """Of a model on these texts."""
    kl, n_same, n = 0.0, 0, 0
    for (prompt, answer), p in zip(written, right, strict=True):
        q = logits(llm, [*prompt, *answer], len(answer)).log_softmax(1)
        kl += float((p.exp() * (p - q)).sum())
        n_same += int((p.argmax(1) == q.argmax(1)).sum())
        n += len(answer)
    return Loss(kl / n, n_same / n, n)


def write(source: Path, folder: Path, block: tuple[int, int]) -> None:
    """A copy of a model folder whose layers' matrices are in e4m3, as Qwen3-FP8 stores them."""
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.dim() != 2 or ".layers." not in name:
            tensors[name] = weight
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = quantised(weight, block)
    save_tensors(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3, and the scale of each block: its largest value becomes the largest of e4m3."""
    height, width = min(block[0], weight.shape[0]), min(block[1], weight.shape[1])
    rows = weight.abs().split(height, 0)
    most = torch.stack([torch.stack([part.max() for part in row.split(width, 1)]) for row in rows])
    scales = most.clamp(min=1e-12) / LARGEST
    spread = scales.repeat_interleave(height, 0)[: len(weight)].repeat_interleave(width, 1)[:, : weight.shape[1]]
    return (weight / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def _tell(name: str, found: Loss) -> None:
    print(f"{name}: KL {found.kl:.4f}, agreement {found.agreement:.4f}, {found.n} tokens", flush=True)


if __name__ == "__main__":
    main()
