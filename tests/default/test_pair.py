"""The default pair: what `saguaro chat` starts with when nothing is said."""

import pytest

from saguaro import LLM, SamplingParams
from saguaro.measure.metrics import Summary
from saguaro.measure.prompts import OURS
from saguaro.model.default import DRAFT

pytestmark = pytest.mark.network


def test_the_draft_is_small() -> None:
    """It comes with the package."""
    assert {path.name for path in DRAFT.iterdir()} == {"config.json", "model.safetensors", "token_map.safetensors"}
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= 24e6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_speculates_and_changes_no_token(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=32) for seed in range(6)]
    prompts = [[{"role": "user", "content": text}] for text in OURS[:6]]
    with LLM(device="cpu", prepare="always", max_model_len=512) as pair, pair.sibling(method="ar") as plain:
        assert (pair.engine.method.name, pair.engine.config.draft) == ("ssd", str(DRAFT))
        summary = Summary()
        pair.engine.round.observers.append(summary.add)
        wanted, found = (llm.chat(prompts, params) for llm in (plain, pair))
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert summary.tokens_per_round is not None
        assert summary.tokens_per_round > 1.3  # far less, and the weights are not those that were trained
        assert summary.hit_rate is not None
        assert summary.hit_rate > 0.2


def test_a_model_of_ones_own_has_no_draft(llm: LLM) -> None:
    assert llm.engine.config.draft is None
    assert llm.engine.method.name == "ar"
