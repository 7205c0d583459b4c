"""Shared noise within a captured step, for the rules that saguaro.target.step_rules lists.

What follows the logits: they are adjusted by each row's rules, the target's tokens are chosen, and compared with the
speculation. Of trees, the keys and values of accepted nodes are also moved right behind the text.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.algo.tree import accept_along, most_positions
from saguaro.algo.verification import accept
from saguaro.attention.paged import StepTrees, from_left
from saguaro.attention.step import Segment
from saguaro.device.graphs import as_float, bucket, float_bits
from saguaro.kernels.bundle import Kernels
from saguaro.kernels.row_rules import CHANGED, Texts
from saguaro.kv.memory import KVCache
from saguaro.runner.captured import CapturedSteps, Computed, Decided, Room
from saguaro.target.request import Request
from saguaro.target.rules import Decision
from saguaro.target.tables import RuleTables, room_for
from saguaro.types import Speculation

# A row's facts, then its rules (kernels.row_rules). DECIDES: 1 if the step's own decision counts, 0 if the host decides
# and nothing may be moved. A row that the host decides has no other facts.
SEED, TEMPERATURE, DECIDES, TOP_K, TOP_P, LOG_MIN_P, RULES = range(7)


def captured_steps(
    kernels: Kernels, cache: KVCache, *, n_known: int, longest: int, max_rows: int, depth: int, nodes: int
) -> CapturedSteps:
    """Steps that verify chains, and trees if there are more nodes than the depth."""
    n_changes = depth + 1  # a step accepts so many tokens at most
    n_positions = most_positions(bucket(max_rows), nodes, depth)
    room = room_for(max_rows, n_changes, n_positions)
    follow = Decider(kernels, cache, RuleTables(room, n_known, n_positions, cache.device), n_known)
    sizes = {"longest": longest, "max_rows": max_rows, "depth": depth, "nodes": nodes}
    n_facts, n_found = RULES + CHANGED + n_changes, 2 + depth if nodes > depth else 2
    return CapturedSteps(follow, cache, n_facts=n_facts, n_found=n_found, **sizes)


class Decider:
    """What follows the logits of a captured step."""

    def __init__(self, kernels: Kernels, cache: KVCache, tables: RuleTables, n_known: int) -> None:
        self._kernels, self._cache, self._tables, self._n_known = kernels, cache, tables, n_known

    @property
    def room(self) -> Room:
        """See Follow."""
        return self._tables.room

    def write(self, rows: Sequence[Segment], width: int) -> None:
        """See Follow."""
        self._tables.write(rows, width)

    def __call__(self, at: Computed) -> Decided:
        """Choose, accept, and of trees move. Found [R, 2]: n_accepted, and bonus or BROKEN; of trees [R, 2 + D]: then
        the path and -1."""
        size, width, grown = len(at.n), len(at.columns), at.trees
        chosen = self._choose(at)
        columns = from_left(at.n, at.columns)  # [R, N+1]
        targets = chosen.view(size, width).gather(1, columns)  # [R, N+1]: the target's tokens after the text, each node
        drafted = at.step.tokens.view(size, width).gather(1, columns[:, 1:])  # [R, N]
        n = at.n.clamp(min=0)
        if grown is None:
            return Decided(torch.stack(accept(targets, drafted, n), 1), columns)
        n_accepted, path, bonus = accept_along(targets, drafted, grown.parent, n, grown.paths, grown.depth)
        self._cache.move(*moves(path, at.facts[:, DECIDES], at.n, grown))
        taken = columns.gather(1, F.pad(path + 1, (1, 0)))  # -1 and what is before the path: the text's last token
        return Decided(torch.cat((n_accepted[:, None], bonus[:, None], path), 1), taken)

    def _choose(self, at: Computed) -> Tensor:  # [R * (N + 1)] int64
        """The target's token after every position. The kernels read a row's facts where its line has them."""
        facts, by = at.facts, self._kernels
        texts = Texts(at.n, at.step.tokens, None if at.trees is None else at.trees.paths)
        by.adjust(at.logits, facts[:, RULES:], texts, self._tables.on_device, self._n_known)
        heat, top_p, log_min_p = (as_float(facts[:, which]) for which in (TEMPERATURE, TOP_P, LOG_MIN_P))
        limits = by.limits(at.logits, heat, facts[:, TOP_K], top_p, log_min_p, self._n_known)
        return by.choose(at.logits, heat, facts[:, SEED], at.step.positions, self._n_known, limits, ahead=1)


def facts_of(request: Request) -> list[int]:
    """What a captured step that decides for a request knows of it, besides its rules."""
    p = request.params
    return [request.seed, float_bits(p.temperature), 1, p.top_k, float_bits(p.top_p), float_bits(_log(p.min_p))]


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


@lru_cache
def _log(value: float) -> float:
    """The logarithm in float32, as saguaro.algo.sampling has it."""
    return float(torch.tensor(value, dtype=torch.float32).log())
