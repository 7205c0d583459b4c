"""Captured steps of a tiny model with the kernels themselves in them: every rule, as the host has it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from saguaro.kernels import adjust, limits, sample
from saguaro.kernels.bundle import plain_kernels
from tests.target import test_round
from tests.target.test_round import STYLES, chance, new_model, new_requests, new_rig, proposing, scripted, true_output
from tests.target.test_tree import Spy, Trees, hidden


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted; tests/gpu does the same")
@pytest.mark.parametrize("nodes", [3, 6], ids=["chains", "trees"])
def test_tokens_are_the_true_ones(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = replace(plain_kernels(), adjust=adjust.adjust, limits=limits.limits, choose=sample.choose)
    monkeypatch.setattr(test_round, "plain_kernels", lambda: kernels)
    model, requests = new_model(seed=0), new_requests(n=len(STYLES), max_tokens=8)
    truth = [true_output(model, request) for request in requests]
    texts = [[*request.prompt, *output] for request, output in zip(requests, truth, strict=True)]
    link = scripted(chance(texts), 3) if nodes == 3 else proposing(Trees(texts, hidden, has_chains=True), nodes)
    rig = new_rig(model, link, lookahead=nodes, captured=(3, nodes), max_rows=4)
    spy = Spy(rig, monkeypatch)
    assert rig.run(requests) == truth
    assert spy.n_eager == 0
    assert bool(spy.of_trees) == (nodes > 3)
