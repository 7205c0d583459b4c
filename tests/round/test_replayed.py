"""Captured functions are replayed, as a GPU does it: the operations of one call, on the same memory, without Python.

A value of the host that was built in, or a result that is looked for in the memory of another call, shows in what is
drafted: it must be what the functions say that run directly, round by round.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro import rng
from saguaro.algo import sampling
from saguaro.device.graphs import Graphs
from saguaro.draft.policy import learnt
from saguaro.kernels import rotary
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.model.transformer import Transformer
from saguaro.types import RoundEvent
from tests.clock import Clock
from tests.round.dflashes import near_dflash
from tests.round.eagles import calm_model, near_eagle
from tests.round.test_capturable import _noisy_all
from tests.round.test_conformance import N_REQUESTS, new_rig, variant
from tests.target.test_round import new_requests

PLAIN = ("greedy", "warm")


@dataclass(frozen=True)
class Operation:
    """An operation, or a kernel's twin, and the memory that it reads and writes."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    named: dict[str, Any]
    result: Any

    def again(self) -> None:
        """Compute it again, into the same memory."""
        result = self.function(*self.given, **self.named)
        for old, new in zip(tensors(self.result), tensors(result), strict=True):
            if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():  # else a view, or in place
                old.copy_(new)


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [one for each in result for one in tensors(each)] if isinstance(result, tuple | list) else []


@dataclass
class Tape:
    """What is being recorded; None: nothing is."""

    on: list[Operation] | None = None
    graphs: dict[Hashable, list[Operation]] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)
    n_replays: int = 0

    @contextmanager
    def set_to(self, on: list[Operation] | None) -> Iterator[None]:
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one operation: a kernel's twin may do anything."""

        def call(*given: Any, **named: Any) -> Any:
            onto = self.on
            with self.set_to(None):
                result = function(*given, **named)
            if onto is not None:
                onto.append(Operation(function, given, named, result))
            return result

        return call

    def run(self, graphs: Graphs, key: Hashable, function: Callable[[], None]) -> None:
        """Graphs.run: the first call runs directly, the second is recorded, any later one is a replay."""
        own = id(graphs), key
        if own in self.graphs:
            self.n_replays += 1
            for each in self.graphs[own]:
                each.again()
        elif own in self.seen:
            found: list[Operation] = []
            with self.set_to(found), Recorder(self):
                function()
            self.graphs[own] = found
        else:
            self.seen.add(own)
            function()


def _run(self: Graphs, tape: Tape, key: Hashable, function: Callable[[], None]) -> None:
    tape.run(self, key, function)


class Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._tape.on is not None:
            self._tape.on.append(Operation(func, args, kwargs or {}, result))
        return result


def recorded(tape: Tape) -> Kernels:
    plain = plain_kernels()
    attend, limits, choose, rank = map(tape.whole, (plain.attend, plain.limits, plain.choose, plain.rank))
    return replace(plain, attend=attend, limits=limits, choose=choose, rank=rank)


def told(
    method: str, verification: str, target: Transformer, draft: Transformer, kernels: Kernels
) -> tuple[list[list[int]], list[Any]]:
    """The outputs, and what was drafted for whom in every round."""
    parts, given = variant(method)
    events: list[RoundEvent] = []
    with patch.object(learnt, "clock", Clock()):
        parts = replace(parts, verification=verification)
        rig = new_rig(parts, target, draft, **given, lookahead=3, budget=4, max_rows=3, kernels=kernels)
        rig.round.observers.append(events.append)
        outputs = rig.run(new_requests(PLAIN, n=N_REQUESTS, max_tokens=12))
    return outputs, [(row.request, row.source, row.drafted, row.k) for event in events for row in event.rows]


@pytest.mark.parametrize(
    ("make", "method", "verification"),
    [
        (near_eagle, "ssd-uniform", "shared"),
        (near_eagle, "swiftspec trees", "shared"),
        (near_dflash, "ssd-uniform", "shared"),
        (near_dflash, "ssd-uniform", "rejection"),
        (lambda target: target.without([1]), "swiftspec trees", "shared"),
    ],
    ids=["eagle", "eagle trees", "dflash", "dflash rejection", "language model"],
)
def test_replays_say_what_direct_calls_do(
    make: Callable[[Transformer], Transformer], method: str, verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = calm_model(seed=0)
    draft, tape = make(target), Tape()
    monkeypatch.setattr(sampling, "_noisy_pruned", _noisy_all)
    expected = told(method, verification, target, draft, plain_kernels())
    monkeypatch.setattr(Graphs, "run", partialmethod(_run, tape))
    monkeypatch.setattr(rotary, "turn_and_store_plain", tape.whole(rotary.turn_and_store_plain))
    monkeypatch.setattr(rng, "_lanes", tape.whole(rng._lanes))
    assert told(method, verification, target, draft, recorded(tape)) == expected
    assert tape.n_replays > 30
