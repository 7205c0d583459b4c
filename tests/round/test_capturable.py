"""Code that a GPU captures never asks the host for a value and never makes a tensor from host values.

On a CPU nothing is captured. Here every captured function, once its first call has allocated what it keeps, runs under
a mode that refuses the operations that cannot be captured. The kernels' plain twins are exempt: kernels replace them.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from saguaro import rng
from saguaro.algo import sampling
from saguaro.device.graphs import Graphs
from saguaro.draft.grow import TreeDrafter
from saguaro.kernels import rotary
from saguaro.kernels.bundle import Kernels, plain_kernels
from saguaro.methods import METHODS
from saguaro.model.transformer import Transformer
from tests.draft.trees import Deepening
from tests.round.dflashes import near_dflash
from tests.round.eagles import near_eagle
from tests.round.tabular import under
from tests.round.test_conformance import N_REQUESTS, TREES, new_rig, variant
from tests.target.test_round import new_model, new_requests

ASKS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
MAKES = (torch.tensor, torch.as_tensor, torch.from_numpy)  # from host values
DEPENDS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


class _Watch:
    """Whether captured code runs now, and what it did that cannot be captured."""

    def __init__(self) -> None:
        self.is_on, self.n_runs = False, 0
        self.seen: set[Hashable] = set()

    def refuse(self, name: str) -> None:
        if self.is_on:
            raise AssertionError(f"{name} inside captured code")

    @contextmanager
    def set_to(self, is_on: bool) -> Iterator[None]:
        before, self.is_on = self.is_on, is_on
        try:
            yield
        finally:
            self.is_on = before


class _Functions(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func in MAKES or (name in ASKS and getattr(Tensor, name, None) is func):
            self._watch.refuse(name)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        has_mask = name in ("aten::index", "aten::index_put_") and any(
            isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1]
        )
        if name in DEPENDS or has_mask:
            self._watch.refuse(f"{name}{' by a mask' if has_mask else ''}")
        return func(*args, **(kwargs or {}))


def _free(watch: _Watch, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in which anything may be done."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with watch.set_to(False):
            return function(*args, **kwargs)

    return call


def _noisy_all(scores: Tensor, seeds: Tensor, positions: Tensor, n: int) -> Tensor:
    """Scores plus noise of all tokens, as on a GPU."""
    return scores + rng.gumbel_all(seeds, positions, scores.shape[1])


def _kernels(watch: _Watch) -> Kernels:
    plain = plain_kernels()
    each = (plain.attend, plain.adjust, plain.limits, plain.choose, plain.rank)
    attend, adjust, limits, choose, rank = (_free(watch, one) for one in each)
    return replace(plain, attend=attend, adjust=adjust, limits=limits, choose=choose, rank=rank)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> _Watch:
    """Everything that is captured on a GPU is watched from its second call on."""
    found = _Watch()

    def run(self: Graphs, key: Hashable, function: Callable[[], None]) -> None:
        own = (id(self), key)
        is_known = own in found.seen
        found.seen.add(own)
        found.n_runs += is_known
        if not is_known:
            function()
            return
        with found.set_to(True), _Functions(found), _Operations(found):  # here only: they make everything slow
            function()

    monkeypatch.setattr(Graphs, "run", run)
    monkeypatch.setattr(rotary, "turn_and_store_plain", _free(found, rotary.turn_and_store_plain))
    monkeypatch.setattr(rng, "_lanes", _free(found, rng._lanes))  # of the CPU, as the next
    monkeypatch.setattr(sampling, "_noisy_pruned", _noisy_all)
    return found


@pytest.fixture(scope="module")
def target() -> Transformer:
    return new_model(seed=0)


@pytest.fixture(scope="module")
def draft(target: Transformer) -> Transformer:
    return target.without([1])


@pytest.mark.parametrize("method", [*(name for name, one in METHODS.items() if one.needs_model), *TREES])
def test_of_every_method(method: str, watch: _Watch, target: Transformer, draft: Transformer) -> None:
    parts, given = variant(method)
    rig = new_rig(parts, target, draft, **given, lookahead=3, budget=4, kernels=_kernels(watch))
    if parts.growth == "best" and isinstance(rig.side.drafter, TreeDrafter):
        rig.side.policy.depth = Deepening(rig.side.drafter, most=2)
    rig.run(new_requests(n=N_REQUESTS))
    assert watch.n_runs > 10


@pytest.mark.parametrize("growth", ["uniform", "geometric", "general"])
def test_of_rejection(growth: str, watch: _Watch, target: Transformer, draft: Transformer) -> None:
    parts = replace(under("rejection", "saguaro"), growth=growth)
    rig = new_rig(parts, target, draft, lookahead=3, budget=4, kernels=_kernels(watch))
    rig.run(new_requests(n=N_REQUESTS))
    assert watch.n_runs > 10


@pytest.mark.parametrize(("method", "verification"), [("swiftspec trees", "shared"), ("ssd-uniform", "rejection")])
@pytest.mark.parametrize("near", [near_eagle, near_dflash])
def test_of_drafts_that_read_features(
    near: Callable[[Transformer], Transformer], method: str, verification: str, watch: _Watch, target: Transformer
) -> None:
    parts, given = variant(method)
    parts = replace(parts, verification=verification)
    rig = new_rig(parts, target, near(target), **given, lookahead=3, budget=4, kernels=_kernels(watch))
    rig.run(new_requests(n=N_REQUESTS))
    assert watch.n_runs > 10


def test_what_cannot_be_captured_is_seen(watch: _Watch) -> None:
    x, graphs = torch.arange(3), Graphs(torch.device("cpu"))
    for name, mistake in {
        "item": x[0].item,
        "bool": lambda: bool(x[1] > 0),
        "list": x.tolist,
        "host values": lambda: torch.tensor([1, 2]),
        "mask": lambda: x[x > 0],
    }.items():
        graphs.run(name, lambda mistake=mistake: mistake())  # type: ignore[misc]
        with pytest.raises(AssertionError, match="inside captured code"):
            graphs.run(name, lambda mistake=mistake: mistake())  # type: ignore[misc]
