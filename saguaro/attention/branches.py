"""Attention of branches that fork from one text, in plain torch.

A branch sees its trunk up to the fork and its own tokens. All forks of a row lie in the tokens in flight, so all
branches see every key before the first fork without a mask, and only a few keys must be masked:

    positions   0 ---------------- base ---- fork ------------- end
    trunk       |-- seen by all ---|-- seen before the fork ----|
    own                            t c c c    the branch's own tokens, from its fork on

The trunk is read once from its pages for all branches of a row. One softmax runs over both parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro.attention.sdpa import Span
from saguaro.kv.memory import KVCache
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import KVWrite


@dataclass(frozen=True)
class Fork:
    """The branches of one row, consecutive in the step."""

    pages: Sequence[int]  # of the trunk
    forks: Sequence[int]  # position of each branch's first own token


@dataclass(frozen=True)
class _Group:
    start: int
    stop: int
    trunk: Span
    base: int  # all branches see the keys before it
    hidden: Tensor | None  # [m, 1, end - base] additive; None if every branch forks at the end


class BranchAttention:
    """Attention backend for branches. Each branch has its own keys and values until one branch is adopted."""

    def __init__(self, trunk: KVCache, spec: ModelSpec, n_branches: int, n_own: int) -> None:
        self._trunk = trunk
        shape = (spec.n_layers, n_branches, n_own, 2 * spec.n_kv_heads, spec.head_dim)
        # Untouched memory costs nothing on a CPU, as in KVCache.
        self.own = torch.empty(shape, device=trunk.device, dtype=trunk.dtype)
        self._groups: list[_Group] = []
        self._step = 0

    def plan(self, rows: Sequence[Fork]) -> None:
        """Set the branches of the next steps."""
        self._groups, self._step = [], 0
        start = 0
        for row in rows:
            forks = torch.tensor(row.forks)
            base, end = int(forks.min()), int(forks.max())
            hidden = None
            if base < end:
                is_hidden = torch.arange(base, end)[None] >= forks[:, None]
                hidden = torch.zeros(is_hidden.shape, dtype=self._trunk.dtype).masked_fill_(is_hidden, float("-inf"))
                hidden = hidden[:, None].to(self._trunk.device)
            stop = start + len(row.forks)
            self._groups.append(_Group(start, stop, Span.of(row.pages, end, self._trunk), base, hidden))
            start = stop

    def advance(self, step: int) -> None:
        """Set the index of the own token that the next step computes for every branch, counted from 0."""
        self._step = step

    def place(self, layer: int) -> KVWrite:
        """See AttentionBackend: after the own tokens of each branch."""
        n = self._groups[-1].stop
        own = self.own[layer, :n]
        kv_index = torch.arange(n, device=own.device) * own.shape[1] + self._step
        return KVWrite(own.flatten(0, 1), kv_index)

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [R, H, d] -> [R, H * d]."""
        own = self.own[layer, : len(q), : self._step + 1]
        outs = [self._attend(layer, q[g.start : g.stop], own[g.start : g.stop], g) for g in self._groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(self, layer: int, q: Tensor, own: Tensor, group: _Group) -> Tensor:
        """q [m, H, d], own [m, n, 2 * H_kv, d] -> [m, H * d]."""
        m, n_heads, d = q.shape
        keys, values = self._trunk.keys[layer], self._trunk.values[layer]
        keys, values = group.trunk.gather(keys)[0], group.trunk.gather(values)[0]  # [H_kv, L, d]
        n_kv, length = keys.shape[:2]
        g = n_heads // n_kv
        own_keys, own_values = own.chunk(2, 2)  # [m, n, H_kv, d]
        q = q.view(m, n_kv, g, d) * d**-0.5
        by_head = q.transpose(0, 1).reshape(n_kv, m * g, d)
        on_trunk = torch.bmm(by_head, keys.transpose(1, 2)).view(n_kv, m, g, length)
        if group.hidden is not None:
            on_trunk[..., group.base :] += group.hidden
        on_own = torch.matmul(q, own_keys.permute(0, 2, 3, 1)).transpose(0, 1)  # [H_kv, m, g, n]
        weights = torch.cat((on_trunk, on_own), -1).softmax(-1)
        out = torch.bmm(weights[..., :length].reshape(n_kv, m * g, length), values).view(n_kv, m, g, d).transpose(0, 1)
        out = out + torch.matmul(weights[..., length:].transpose(0, 1), own_values.transpose(1, 2))
        return out.reshape(m, n_heads * d)
