"""How a model is divided among ranks: each holds some heads, some units of the MLP and some rows of the vocabulary.

Invariant: all ranks hold the same residual stream, bit for bit, and a token's numbers do not depend on the other tokens
of a step. Partial sums are therefore added in the order of the ranks, not in an order that a library chooses by size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.errors import ConfigError
from saguaro.model.spec import ModelSpec

UNIT = 128  # shares begin at multiples of it where possible: whole panels and tiles of a product


class Exchange(Protocol):
    """Exchanges tensors between ranks. All ranks call it equally often, with tensors of the same shape and dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, n] of this rank -> [N, T, n]: that of every rank."""


class Cut(NamedTuple):
    """A rank's part of a tensor: indices first : last of one dimension."""

    first: int
    last: int
    dim: int = 0

    @property
    def n(self) -> int:
        """Number of indices."""
        return self.last - self.first

    def times(self, n: int) -> "Cut":
        """The same part if every index stands for n.

        >>> Cut(1, 3).times(64)
        Cut(first=64, last=192, dim=0)
        """
        return Cut(self.first * n, self.last * n, self.dim)

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a whole tensor."""
        return tensor.narrow(self.dim, self.first, self.n)


Shares = tuple[Cut, ...]  # of every rank, in order and without gaps


@dataclass(frozen=True)
class Split:
    """One rank of N, and its way to the others."""

    rank: int
    size: int  # N
    exchange: Exchange

    def share(self, n: int) -> Cut:
        """This rank's share of n things."""
        return shares(n, self.size)[self.rank]

    def sum(self, x: Tensor) -> Tensor:  # [T, n]
        """The sum over all ranks, added in their order in float32."""
        first, *others = self.exchange(x).unbind(0)
        total = first.float()
        for each in others:
            total = total + each
        return total.to(x.dtype)

    def join(self, x: Tensor, widths: Sequence[int]) -> Tensor:  # [T, widths[rank]] -> [T, sum of widths]
        """The columns of all ranks, side by side."""
        most = max(widths)
        every = self.exchange(F.pad(x, (0, most - x.shape[1])) if x.shape[1] < most else x.contiguous())
        return torch.cat([part[:, :n] for part, n in zip(every.unbind(0), widths, strict=True)], 1)


def _no_others(x: Tensor) -> Tensor:
    return x[None]


ALONE = Split(0, 1, _no_others)


def shares(n: int, size: int) -> Shares:
    """Divide n things among ranks, in units that are large if they divide evenly.

    >>> [cut.n for cut in shares(1536, 2)], [cut.n for cut in shares(576, 2)], [cut.n for cut in shares(51, 2)]
    ([768, 768], [288, 288], [25, 26])
    """
    unit = math.gcd(n, UNIT)
    while unit > 1 and n // unit % size:
        unit //= 2
    bounds = [n // unit * rank // size * unit for rank in range(size + 1)]
    return tuple(Cut(first, last) for first, last in pairwise(bounds))


def head_shares(n_heads: int, n_kv_heads: int, size: int) -> Shares:
    """Divide query heads. A rank gets whole groups of heads that share a key head, or if there are more ranks than key
    heads, heads of one group.

    >>> [cut.n for cut in head_shares(9, 3, 2)], [cut.n for cut in head_shares(8, 2, 4)]
    ([3, 6], [2, 2, 2, 2])
    """
    group = n_heads // n_kv_heads
    if n_kv_heads >= size:
        bounds = [n_kv_heads * rank // size * group for rank in range(size + 1)]
    else:
        of = [rank * n_kv_heads // size for rank in range(size)]  # the key head of each rank
        among = [(of.index(kv), of.count(kv)) for kv in of]  # first rank of that key head, and number of its ranks
        each = zip(of, among, strict=True)
        bounds = [kv * group + group * (rank - first) // n for rank, (kv, (first, n)) in enumerate(each)]
        bounds.append(n_heads)
    return tuple(Cut(first, last) for first, last in pairwise(bounds))


class Heads(NamedTuple):
    """A rank's heads, and the number of query heads of every rank."""

    q: Cut
    kv: Cut  # key heads; one may be held by several ranks
    every: tuple[int, ...]


def heads_of(spec: ModelSpec, split: Split) -> Heads:
    """The heads of one rank.

    >>> from types import SimpleNamespace as Spec
    >>> heads_of(Spec(n_heads=8, n_kv_heads=2), Split(1, 4, _no_others))
    Heads(q=Cut(first=2, last=4, dim=0), kv=Cut(first=0, last=1, dim=0), every=(2, 2, 2, 2))
    """
    every, group = head_shares(spec.n_heads, spec.n_kv_heads, split.size), spec.n_heads // spec.n_kv_heads
    own = every[split.rank]
    return Heads(own, Cut(own.first // group, -(-own.last // group)), tuple(cut.n for cut in every))


def own_spec(spec: ModelSpec, split: Split) -> ModelSpec:
    """The spec with the heads of one rank: what attention and KV memory need."""
    if split.size == 1:
        return spec
    heads = heads_of(spec, split)
    return replace(spec, n_heads=heads.q.n, n_kv_heads=heads.kv.n)


def largest_share(spec: ModelSpec, size: int) -> ModelSpec:
    """The spec with the heads of the rank that has the most key heads."""
    each = (own_spec(spec, Split(rank, size, _no_others)) for rank in range(size))
    return max(each, key=lambda own: own.n_kv_heads)


def check_split(spec: ModelSpec, size: int) -> None:
    """Raise if a rank would be left without a part of the model."""
    each = {"heads": spec.n_heads, "units in its MLP": spec.intermediate, "tokens": spec.n_vocab}
    for name, n in (each | {"hidden units": spec.hidden}).items():
        if n < size:
            raise ConfigError(
                f"tensor_parallel_size is {size}; the model has {n} {name}, and each rank computes some of them: use "
                f"at most {n}"
            )
