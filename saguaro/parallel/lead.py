"""Rank 0's runner: every step runs on all ranks."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from saguaro.attention.step import Segment
from saguaro.parallel.orders import Order, encode_rows
from saguaro.parallel.ranks import Ranks
from saguaro.runner.captured import Followed
from saguaro.runner.runner import Ran, Runner


class LeadRunner:
    """A runner with the same methods as its own part of it: the same logits, whole."""

    def __init__(self, own: Runner, ranks: Ranks, number: int) -> None:
        """number: of the runners that the other ranks have opened for this one."""
        self._own, self.ranks, self._number = own, ranks, number
        self.page_size, self.captures, self.device = own.page_size, own.captures, own.device
        self.room = None if own.room is None else replace(own.room, masks=0)  # masks do not travel
        self._dropped = weakref.finalize(self, ranks.drop, number)

    def threads(self) -> AbstractContextManager[None]:
        """See Runner."""
        return self._own.threads()

    def takes(self, rows: Sequence[Segment]) -> bool:
        """See Runner."""
        return self._own.takes(rows)

    def run(self, rows: Sequence[Segment], is_followed: bool) -> Followed | Ran:
        """See Runner."""
        with self.ranks.together(Order.STEP, self._number, encode_rows(rows, is_followed)):
            return self._own.run(rows, is_followed)

    def last_logits(self, rows: Sequence[Segment]) -> Tensor:
        """See Runner: every rank joins the logits of a captured step."""
        return self._own.last_logits(rows)

    def warm(self, size: int) -> None:
        """See Runner."""
        with self.ranks.together(Order.WARM, self._number, [size]):
            self._own.warm(size)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [L, D] -> [L, V]
        """See Runner."""
        with self.ranks.together(Order.SCORE, self._number, [len(hidden)]):
            return self._own.logits(self.ranks.split.exchange(hidden)[0])

    def move(self, sources: Tensor, kv_index: Tensor) -> None:  # [T], [T]
        """See Runner."""
        with self.ranks.together(Order.MOVE, self._number, [*sources.tolist(), *kv_index.tolist()]):
            self._own.move(sources, kv_index)

    def close(self) -> None:
        """Close the runners of all ranks."""
        if self._dropped.detach() is not None:
            self.ranks.leave(self._number)
