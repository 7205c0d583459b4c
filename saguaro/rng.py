"""Counter-based noise: the only randomness in the engine.

The noise of a token is a function of (request seed, position, token) only. It does not depend on the batch, the
method, the device or earlier calls. It is Philox4x32-10, so the bits are the same everywhere.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (token // 4, position, 0, DOMAIN)      one block covers four consecutive tokens
    lane    = token % 4

The uniform numbers are a function of (request seed, position, number), with their own DOMAIN and the number as the
counter's first word.
"""

import secrets
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[Any])  # 32-bit words in 64 bits: int64 on a device, uint64 on the host

DOMAIN = 0x5A6  # separates this use of a seed from others
COIN_DOMAIN = 0x5A7
IN_CACHE = 2**14  # blocks that are computed at a time on a CPU: they fit into the core's cache
_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85

# The range of gumbel(): u is between 2^-33 and 1 - 2^-24.
GUMBEL_MAX = 22.8739
GUMBEL_MIN = -2.8116


def fresh_seed() -> int:
    """A random seed below 2^53, which JSON represents exactly."""
    return secrets.randbits(53)


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th output of a request; output 0 has the request's own seed (splitmix64).

    >>> derive_seed(7, 0), derive_seed(7, 1) == derive_seed(7, 1), derive_seed(7, 1) != derive_seed(8, 1)
    (7, True, True)
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 11


def derive_seeds(seeds: Tensor, indices: Tensor) -> Tensor:  # [R] int64 each -> [R] int64
    """derive_seed for tensors; no index is 0.

    >>> derive_seeds(torch.tensor([7, 2**53 - 1]), torch.tensor([1, 2**45])).tolist() == [
    ...     derive_seed(7, 1), derive_seed(2**53 - 1, 2**45)]
    True
    """

    def shifted(z: Tensor, n: int) -> Tensor:  # without the sign
        return z.bitwise_right_shift(n).bitwise_and(2 ** (64 - n) - 1)

    z = seeds + indices * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return shifted(z ^ shifted(z, 31), 11)


def _signed(word: int) -> int:
    """The int64 with these 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def philox(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 on 64-bit arrays that hold 32-bit words; the arguments broadcast.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(int(x)) for x in philox(zero, zero, zero, zero, zero, zero)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    for _ in range(10):
        # The products wrap modulo 2^64; the mask after the arithmetic shift keeps the right 32 bits.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise of the given tokens: seeds, positions and tokens are [P] int64 -> [P] float32.

    >>> five, nine = torch.tensor([5, 5]), torch.tensor([9, 9])
    >>> some = gumbel(five, nine, torch.tensor([6, 1]))
    >>> bool((some == gumbel_all(five[:1], nine[:1], 8)[0, [6, 1]]).all())
    True
    """
    lanes = _lanes(seeds, positions, tokens >> 2)  # [P, 4]
    return _to_gumbel(lanes.gather(-1, (tokens & 3)[..., None])[..., 0])


def uniform(seeds: Tensor, positions: Tensor, numbers: Tensor) -> Tensor:
    """Numbers uniform in (0, 1), any of them at a position: all arguments are [P] int64 -> [P] float64.

    >>> bool((uniform(torch.tensor([5, 5]), torch.tensor([9, 9]), torch.tensor([0, 1])) < 1).all())
    True
    """
    lanes = _lanes(seeds, positions, numbers, COIN_DOMAIN)
    return (lanes[..., 0].double() + 0.5) * 2.0**-32


def gumbel_all(seeds: Tensor, positions: Tensor, n_vocab: int) -> Tensor:
    """Gumbel noise of every token: seeds [R], positions [R] -> [R, V] float32."""
    blocks = torch.arange((n_vocab + 3) // 4, device=seeds.device)[None]
    seeds, positions = seeds[:, None], positions[:, None]
    if seeds.device.type == "cpu":
        n = max(1, IN_CACHE // blocks.shape[1])
        parts = zip(seeds.split(n), positions.split(n), strict=True)
        lanes = torch.cat([_lanes(*part, blocks) for part in parts])
    else:
        lanes = _lanes(seeds, positions, blocks)  # [R, V/4, 4]
    return _to_gumbel(lanes.flatten(1)[:, :n_vocab])


def _lanes(seeds: Tensor, positions: Tensor, blocks: Tensor, domain: int = DOMAIN) -> Tensor:
    """The four words of each block, [..., 4] int64."""
    zero = torch.zeros_like(positions)
    words = (blocks, positions, zero, zero + domain, seeds & _LOW, (seeds >> 32) & _LOW)
    if blocks.device.type == "cpu":  # the same arithmetic in numpy, with a fifth of the overhead per operation
        lanes = philox(*(w.numpy().view(np.uint64) for w in words))
        return torch.from_numpy(np.stack(lanes, axis=-1).view(np.int64))
    return torch.stack(philox(*words), dim=-1)


def _to_gumbel(bits: Tensor) -> Tensor:
    """-log(-log(1 - u)), u in [2^-33, 1 - 2^-24]: finest where the noise is large, which decides the argmax."""
    u = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
