"""Attention of prompts on a GPU: which tile is fastest, beside torch's fused attention over contiguous keys.

    python -m bench.prompt_attention --json prompt_attention.json

A row of N queries ends a text of L tokens on pages. `present` is what the engine runs: tiles of few rows, and splits as
in decoding. The others compute all keys of a tile in one split; a tile has so many rows (pairs of a query and a head
that share a key head), so many keys per block and warps. `torch` reads keys and values that lie one after the other.
Errors are relative to torch's result. TFLOP/s counts the products of seen keys only.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from saguaro.attention.paged import split_of

SHAPES = {"8b": (32, 8, 128), "32b": (64, 8, 128), "0.6b": (16, 8, 128), "smollm2": (9, 3, 64)}  # H, H_kv, d
CASES = ((512, 512), (2048, 2048), (2048, 4096), (512, 7168))  # queries, tokens of the text
TILES = ((32, 128, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8))
PAGE_SIZE, LONGEST = 16, 8192
CALLS = 8


@dataclass(frozen=True)
class Args:
    """What to measure."""

    shapes: tuple[str, ...] = ("8b", "32b", "0.6b", "smollm2")
    json: Path | None = None


class Case:
    """Queries, keys and values, and what a kernel needs to know of them."""

    def __init__(self, shape: tuple[int, int, int], n: int, length: int, device: torch.device) -> None:
        self.n_heads, self.n_kv, self.d = shape
        self.n, self.length = n, length
        n_pages = -(-length // PAGE_SIZE)
        self.q = torch.randn(n, self.n_heads, self.d, device=device, dtype=torch.bfloat16)
        self.memory = torch.randn(n_pages * PAGE_SIZE, 2 * self.n_kv, self.d, device=device, dtype=torch.bfloat16)
        self.pages = torch.randperm(n_pages, device=device)[None].int()
        self.starts = torch.tensor([0, n], dtype=torch.int32, device=device)
        self.lengths = torch.tensor([length], dtype=torch.int32, device=device)

    @property
    def flops(self) -> float:
        """Of both products, for seen keys."""
        n_seen = self.n * (self.length - self.n) + self.n * (self.n + 1) / 2
        return 4 * n_seen * self.n_heads * self.d

    def attend(self, split: int, tile: Any) -> Tensor:
        """The engine's kernel."""
        from saguaro.kernels import attention

        where = (self.pages, self.starts, self.lengths, PAGE_SIZE, self.n, LONGEST, self.d**-0.5)
        return attention.attend(self.q, self.memory, *where, split=split, _tile=tile)

    def by_torch(self) -> Callable[[], Tensor]:
        """The same by torch, with keys and values gathered before."""
        at = self.pages[0].long()[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=self.q.device)
        keys, values = self.memory[at.flatten()[: self.length]].transpose(0, 1).split(self.n_kv)
        q = self.q.transpose(0, 1)
        seen = torch.ones(self.n, self.length, dtype=torch.bool, device=q.device).tril(self.length - self.n)
        how: dict[str, Any] = {"is_causal": True} if self.n == self.length else {"attn_mask": seen}
        keys, values = keys.contiguous(), values.contiguous()

        def run() -> Tensor:
            out = F.scaled_dot_product_attention(q[None], keys[None], values[None], enable_gqa=True, **how)
            return out[0].transpose(0, 1).reshape(self.n, -1)

        return run


def main(args: Args) -> None:
    """Print a table."""
    if not torch.cuda.is_available():
        raise SystemExit("bench.prompt_attention needs a CUDA device")
    from saguaro.kernels import attention

    found = []
    for name, (n, length) in product(args.shapes, CASES):
        case = Case(SHAPES[name], n, length, torch.device("cuda"))
        expected, torch_ms = _measured(case.by_torch())
        assert expected is not None
        present = (split_of(LONGEST), None)
        ways: list[tuple[str, int, Any]] = [("present", *present)]
        ways += [(f"{m}x{k} {w} warps", LONGEST, attention.Tile(m, k, w, 3)) for m, k, w in TILES]
        print(f"\n{name}, {n} queries at the end of {length}: torch {_speed(torch_ms, case)}", flush=True)
        for label, split, tile in ways:
            out, ms = _measured(lambda split=split, tile=tile, case=case: case.attend(split, tile))  # type: ignore[misc]
            if out is None:
                print(f"  {label:>16} needs more than a multiprocessor has")
                continue
            error = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
            print(f"  {label:>16} {_speed(ms, case)}, error {error:.0e}", flush=True)
            found.append({"shape": name, "n": n, "length": length, "tile": label, "ms": ms, "torch_ms": torch_ms})
    if args.json is not None:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "found": found}, indent=1))


def _measured(call: Callable[[], Tensor]) -> tuple[Tensor | None, float]:
    """The result, and milliseconds per call; None if it needs more than the device has."""
    import triton

    try:
        out = call()
    except triton.runtime.errors.OutOfResources:
        return None, 0.0
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return out, 1e3 * (time.perf_counter() - began) / CALLS


def _speed(ms: float, case: Case) -> str:
    return f"{ms:8.3f} ms {case.flops / ms / 1e9:6.0f} TFLOP/s"


if __name__ == "__main__":
    main(tyro.cli(Args))
