"""Shared noise within a captured step, for requests with a temperature, top-k, top-p and min-p.

What follows the logits: the target's tokens are chosen and compared with the speculation. Of trees, the keys and values
of accepted nodes are also moved right behind the text.
"""

import struct
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.algo.tree import accept_along
from saguaro.algo.verification import accept
from saguaro.attention.paged import StepTrees, from_left
from saguaro.device.graphs import as_float
from saguaro.kernels.bundle import Kernels
from saguaro.kv.memory import KVCache
from saguaro.runner.captured import CapturedSteps, Computed, Decided
from saguaro.target.request import Request
from saguaro.target.rules import Decision
from saguaro.types import Speculation

MOST_FLOAT = torch.finfo(torch.float32).max

# A row's facts. DECIDES: 1 if the step's own decision counts, 0 if the host decides and nothing may be moved.
SEED, TEMPERATURE, DECIDES, TOP_K, TOP_P, LOG_MIN_P = range(6)
N_FACTS = 6


def captured_steps(
    kernels: Kernels, cache: KVCache, *, n_known: int, longest: int, max_rows: int, depth: int, nodes: int
) -> CapturedSteps:
    """Steps that verify chains, and trees if there are more nodes than the depth."""
    sizes = {"longest": longest, "max_rows": max_rows, "depth": depth, "nodes": nodes}
    follow = partial(_decide, partial(_choose, kernels, n_known), cache)
    return CapturedSteps(follow, cache, n_facts=N_FACTS, n_found=2 + depth if nodes > depth else 2, **sizes)


def _choose(kernels: Kernels, n_known: int, at: Computed) -> Tensor:  # [R * (N + 1)] int64
    """The target's token after every position."""
    width = len(at.columns)
    heat, seeds = noise_of(at.facts[:, TEMPERATURE], at.facts[:, SEED], width)
    top_k, *floats = (each[:, None].expand(-1, width).flatten() for each in at.facts[:, TOP_K:].unbind(1))
    limits = kernels.limits(at.logits, heat, top_k, *map(as_float, floats), n_known)
    return kernels.choose(at.logits, heat, seeds, at.step.positions + 1, n_known, limits)


def _decide(choose: Callable[[Computed], Tensor], cache: KVCache, at: Computed) -> Decided:
    """Choose, accept, and of trees move. Found [R, 2]: n_accepted, and bonus or BROKEN; of trees [R, 2 + D]: then the
    path and -1."""
    size, width, grown = len(at.n), len(at.columns), at.trees
    chosen = choose(at)
    columns = from_left(at.n, at.columns)  # [R, N+1]
    targets = chosen.view(size, width).gather(1, columns)  # [R, N+1]: the target's tokens after the text and each node
    drafted = at.step.tokens.view(size, width).gather(1, columns[:, 1:])  # [R, N]
    n = at.n.clamp(min=0)
    if grown is None:
        return Decided(torch.stack(accept(targets, drafted, n), 1), columns)
    n_accepted, path, bonus = accept_along(targets, drafted, grown.parent, n, grown.paths, grown.depth)
    cache.move(*moves(path, at.facts[:, DECIDES], at.n, grown))
    taken = columns.gather(1, F.pad(path + 1, (1, 0)))  # -1 and what is before the path: the text's last token
    return Decided(torch.cat((n_accepted[:, None], bonus[:, None], path), 1), taken)


def facts_of(request: Request, decides: bool) -> list[int]:
    """What the captured step knows of a request."""
    p = request.params
    return [request.seed, float_bits(p.temperature), decides, p.top_k, float_bits(p.top_p), float_bits(_log(p.min_p))]


def decision_of(found: Tensor, spec: Speculation) -> Decision:  # [R, n_found]
    """The decision of a captured step. A path is as wide as the speculation, with -1 behind its nodes."""
    if spec.parent is None:
        return found[:, 0], found[:, 1], None
    return found[:, 0], found[:, 1], F.pad(found[:, 2:], (0, spec.parent.shape[1] + 2 - found.shape[1]), value=-1)


def moves(
    path: Tensor,  # [R, D] int64: accepted nodes, then -1
    decides: Tensor,  # [R] int64: 0: nothing is moved
    n: Tensor,  # [R] int64: nodes; -1: padding row
    grown: StepTrees,
) -> tuple[Tensor, Tensor]:  # sources [R * D], kv_index [R * D]
    """Where the keys and values of accepted nodes are, and their places right behind the text.

    An entry with nothing to move copies its row's root onto itself, which no other entry reads or writes. A padding row
    has no root, and copies the first row's, or the first place of all if every row is padding.

    >>> grown = StepTrees(*[torch.empty(0)] * 3, torch.tensor([[7], [3]]), torch.tensor([[8, 9, 10], [-1, -1, -1]]))
    >>> moves(torch.tensor([[1, 2], [-1, -1]]), torch.tensor([1, 0]), torch.tensor([3, -1]), grown)
    (tensor([ 9, 10,  7,  7]), tensor([8, 9, 7, 7]))
    """
    root = torch.where(n[:, None] < 0, grown.root[:1].clamp(min=0), grown.root)
    is_moved = (path >= 0) & (decides[:, None] > 0)
    sources = torch.where(is_moved, grown.kv_index.gather(1, path.clamp(min=0)), root)
    places = torch.where(is_moved, grown.kv_index[:, : path.shape[1]], root)
    return sources.flatten(), places.flatten()


def noise_of(temperature: Tensor, seeds: Tensor, n: int) -> tuple[Tensor, Tensor]:  # [R] as they travel -> [R * n]
    """Temperature and seed, repeated for each of a row's n positions."""
    return as_float(temperature)[:, None].expand(-1, n).flatten(), seeds[:, None].expand(-1, n).flatten()


@lru_cache
def float_bits(value: float) -> int:
    """The bits of a float32 as an int, to store it in an int64 line.

    >>> hex(float_bits(1.0))
    '0x3f800000'
    """
    return int.from_bytes(struct.pack("<f", min(value, MOST_FLOAT)), "little", signed=True)


@lru_cache
def _log(value: float) -> float:
    """The logarithm in float32, as saguaro.algo.sampling has it."""
    return float(torch.tensor(value, dtype=torch.float32).log())
