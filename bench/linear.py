"""Why weights are [in, out] on a CPU: time of all matrix products of one step of SmolLM2-135M, by rows and layout.

    python -m bench.linear --threads 2

`linear` is torch's F.linear on [out, in] weights; `mm` is x @ W on [in, out] weights; `onednn` is oneDNN's packed
format. The last column tells whether a row's result is bitwise independent of the number of rows.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

SHAPES = [(960, 576, 30), (576, 576, 30), (3072, 576, 30), (576, 1536, 30), (49152, 576, 1)]  # out, in, times


@dataclass(frozen=True)
class Args:
    """What to measure."""

    threads: int = 2
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = 5


@torch.inference_mode()
def main(args: Args) -> None:
    """Print one table."""
    torch.set_num_threads(args.threads)
    weights = [torch.randn(n_out, n_in) for n_out, n_in, times in SHAPES for _ in range(times)]
    turned = [weight.t().contiguous() for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 8) for weight in weights]
    kinds: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "linear": [lambda x, w=w: F.linear(x, w) for w in weights],  # type: ignore[misc]
        "mm": [lambda x, w=w: torch.mm(x, w) for w in turned],  # type: ignore[misc]
        "onednn": [
            lambda x, w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # type: ignore[misc]
            for w in packed
        ],
    }
    print(f"{'ms':>8} " + " ".join(f"{n:>6} rows" for n in args.rows) + "  same bits")
    for name, products in kinds.items():
        times = [_measure(products, weights, n, args.repeats) for n in args.rows]
        same = all(_is_invariant(product, w.shape[1], args.rows) for product, w in zip(products, weights, strict=True))
        print(f"{name:>8} " + " ".join(f"{ms:11.1f}" for ms in times) + f"  {'yes' if same else 'no'}")


def _measure(products: list[Callable[[Tensor], Tensor]], weights: list[Tensor], n: int, repeats: int) -> float:
    inputs = {width: torch.randn(n, width) for width in {w.shape[1] for w in weights}}
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for product, weight in zip(products, weights, strict=True):
            product(inputs[weight.shape[1]])
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def _is_invariant(product: Callable[[Tensor], Tensor], width: int, rows: tuple[int, ...]) -> bool:
    x = torch.randn(max(rows), width)
    first = product(x[:1])[0]
    return all(torch.equal(first, product(x[:n])[0]) for n in rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
