"""While a step runs on the library's threads, torch's own operations take none of the cores."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.kernels import native
from saguaro.target import sampler, verifier
from saguaro.target.sampler import Context, Sampler
from saguaro.types import TokenLogprobs
from tests.engine.driver import run, sibling


def test_sampling_on_the_host_does_not_wake_torchs_threads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int, int]] = set()
    shape, logprobs = Sampler.shape, sampler.logprobs

    def watched_shape(self: Sampler, logits: Tensor, places: Sequence[Context]) -> Tensor:
        seen.add(("shape", torch.get_num_threads(), native.n_threads()))
        return shape(self, logits, places)

    def watched_logprobs(logits: Tensor, tokens: Tensor, n_top: int) -> tuple[TokenLogprobs, ...]:
        seen.add(("logprobs", torch.get_num_threads(), native.n_threads()))
        return logprobs(logits, tokens, n_top)

    monkeypatch.setattr(Sampler, "shape", watched_shape)
    monkeypatch.setattr(verifier, "logprobs", watched_logprobs)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = sibling(llm.engine, method="sd", draft="drop:28")
        run(engine, ["The saguaro is"], SamplingParams(temperature=0.7, top_p=0.9, logprobs=1, max_tokens=4, seed=1))
        assert seen == {("shape", 1, 2), ("logprobs", 1, 2)}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
