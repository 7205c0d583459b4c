"""What a draft reads of the target: the features of a round's text and accepted tokens, from eager and captured steps.

The expected values are those of a plain forward pass over the text of each request.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from saguaro.model.transformer import Taps, Transformer
from saguaro.runner.captured import Followed
from saguaro.target.request import Request
from saguaro.target.scheduler import Batch
from saguaro.target.verifier import Pending, Verifier
from saguaro.types import Outcome, Speculation
from tests.target.test_round import (
    SPEC,
    Rig,
    Written,
    chance,
    new_requests,
    new_rig,
    proposing,
    scripted,
)
from tests.target.test_tree import SIMPLE, Trees, hidden, simple_texts, simple_truth  # noqa: F401 (fixtures)

TAPS = (0, 2, 1, 2)  # layer 2 is the end of the last one
ATTENDED = 1e-3  # the kernels' twins compute attention in float32; values are up to 30


class Reader:
    """Keeps the features that every round returns, with the text that they are of."""

    def __init__(self, rig: Rig) -> None:
        self.found: list[tuple[str, int, Tensor]] = []  # request, position of the first token, values
        self.n_followed = self.n_decided_later = 0
        verifier = rig.round.verifier
        assert isinstance(verifier, Verifier)
        launch = verifier.launch

        def watched(batch: Batch, spec: Speculation) -> Pending:
            pending = launch(batch, spec)
            is_followed = isinstance(pending.decided, Followed)
            self.n_followed += is_followed
            self.n_decided_later += not is_followed and all(row.n_tokens == 1 for row in batch.rows)
            names = {row.request.slot: row.request.id for row in batch.rows}
            outcome = pending.outcome

            def told() -> Outcome:
                found = outcome()
                assert found.features is not None
                self.found += [(names[slot], start, values) for slot, start, values in found.features.rows()]
                return found

            object.__setattr__(pending, "outcome", told)
            return pending

        verifier.launch = watched  # type: ignore[method-assign]

    def check(self, model: Transformer, requests: Sequence[Request]) -> None:
        """Every token of every text was told once, in order, but the last; all values are those of the text."""
        texts = {request.id: request.tokens for request in requests}
        expected = {name: whole(model, text) for name, text in texts.items()}
        ends = dict.fromkeys(texts, 0)
        for name, start, values in self.found:
            assert start == ends[name]
            ends[name] += len(values)
            known = expected[name][start : ends[name]]  # a request may end before its last accepted tokens
            assert torch.allclose(values[: len(known)], known, atol=ATTENDED)
        for name, end in ends.items():
            assert end >= len(texts[name]) - 1


@torch.inference_mode()
def whole(model: Transformer, text: Sequence[int]) -> Tensor:
    """The features of a text's tokens."""
    into = torch.empty(len(text), len(TAPS) * SPEC.hidden, dtype=torch.float64)
    model(torch.tensor(text), torch.arange(len(text)), Written(len(text)), None, Taps(TAPS, into))
    return into


@pytest.mark.parametrize("captured", [None, (4, 4), (4, 9)], ids=["eager", "chains", "trees"])
def test_of_chains(
    captured: tuple[int, int] | None,
    model: Transformer,
    simple_truth: list[list[int]],  # noqa: F811
    simple_texts: list[list[int]],  # noqa: F811
) -> None:
    """In batches that are padded, of rows that begin and end at different times."""
    link = scripted(chance(simple_texts), 4)
    rig = new_rig(model, link, lookahead=4, captured=captured, max_rows=5, caching=False, taps=TAPS)
    reader, requests = Reader(rig), new_requests(SIMPLE)
    for at, request in enumerate(requests):
        object.__setattr__(request.params, "max_tokens", 3 + at % 14)
    assert rig.run(requests) == [output[: 3 + at % 14] for at, output in enumerate(simple_truth)]
    reader.check(model, requests)
    assert (reader.n_followed > 5) == (captured is not None)


@pytest.mark.parametrize("captured", [None, (5, 8)], ids=["eager", "captured"])
def test_of_trees(
    captured: tuple[int, int] | None,
    model: Transformer,
    simple_truth: list[list[int]],  # noqa: F811
    simple_texts: list[list[int]],  # noqa: F811
) -> None:
    """Of the nodes on the accepted path alone; every third speculation is a chain."""
    link = proposing(Trees(simple_texts, hidden, has_chains=True), 5)
    rig = new_rig(model, link, lookahead=5, captured=captured, max_rows=3, caching=False, taps=TAPS)
    reader, requests = Reader(rig), new_requests(SIMPLE)
    assert rig.run(requests) == simple_truth
    reader.check(model, requests)
    assert (reader.n_followed > 10) == (captured is not None)


@pytest.mark.parametrize("nodes", [4, 9])
def test_of_requests_that_the_host_decides(
    nodes: int, model: Transformer, truth: list[list[int]], texts: list[list[int]]
) -> None:
    """Their steps are captured, too, and the features are gathered after the decision."""
    link = scripted(chance(texts), 4)
    rig = new_rig(model, link, lookahead=4, captured=(4, nodes), max_rows=3, caching=False, taps=TAPS)
    reader, requests = Reader(rig), new_requests()
    for request in requests:  # of logits that a step adjusts, the host takes them
        object.__setattr__(request.params, "logprobs", 1)
    assert rig.run(requests) == truth
    reader.check(model, requests)
    assert reader.n_decided_later > 10


def test_nothing_is_kept_without_taps(model: Transformer) -> None:
    rig = new_rig(model, captured=(3, 5))
    verifier = rig.round.verifier
    assert isinstance(verifier, Verifier)
    launch = verifier.launch
    kept: list[object] = []

    def watched(batch: Batch, spec: Speculation) -> Pending:
        pending = launch(batch, spec)
        kept.append(pending.outcome().features)
        if isinstance(pending.decided, Followed):
            kept.append(pending.decided.features)
        return pending

    verifier.launch = watched  # type: ignore[method-assign]
    rig.run(new_requests(SIMPLE, n=2, max_tokens=3))
    assert len(kept) > 3
    assert all(each is None for each in kept)
