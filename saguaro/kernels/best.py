"""Best tokens by noisy score on a CPU (cpu.c): `choose` and `rank` of saguaro.algo.sampling for plain requests.

The noise is rng's, bit for bit except for its logarithms, which may differ from torch's by an ulp or two. It is drawn
only for tokens that can still be among the best.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saguaro import rng
from saguaro.kernels.native import at, is_there, library, n_threads

Ranker = Callable[..., tuple[Tensor, Tensor]]  # `rank`


def ranker_for(device: torch.device) -> Ranker | None:
    """`rank` on a CPU with the native library; None elsewhere."""
    return rank if device.type == "cpu" and is_there() else None


def rank(
    logits: Tensor,  # [L, V] float32, rows contiguous
    temperature: Tensor,  # [L] float32, 0: greedy
    seeds: Tensor,  # [L] int64
    positions: Tensor,  # [L] int64, of the next token
    n_known: int,  # columns that are tokens; other columns are ignored
    n: int,
) -> tuple[Tensor, Tensor]:  # tokens [L, n] int64, scores [L, n] float32
    """The n best tokens of every row, best first, and their scores relative to the best logit.

    If a row has a NaN or +inf logit, all its scores are NaN and its tokens are undefined.
    """
    n_rows = len(logits)
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert 1 <= n <= n_known <= logits.shape[1], (n, n_known, logits.shape)
    temperature, seeds, positions = (each.contiguous() for each in (temperature, seeds, positions))
    tokens, scores = torch.empty(n_rows, n, dtype=torch.int64), torch.empty(n_rows, n)
    library().rank(
        n_threads(), logits.data_ptr(), logits.stride(0), n_rows, n_known, at(temperature), at(seeds), at(positions),
        rng.DOMAIN, n, at(tokens), at(scores),
    )  # fmt: skip
    return tokens, scores
