"""The rules of requests on a CUDA device: the CPU's tokens, whether the captured step decides or the host. Skipped
without one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.model.tiny import write_tiny
from saguaro.target.step_rules import StepRules
from tests.engine.driver import deciders

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
PROMPTS = ["the end", "in an inn there was another man", "x" * 100, "a"]
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "8MiB", "max_batch_rows": 4, "max_batch_tokens": 64}
BIAS = {token: 4.0 - token % 9 for token in range(0, 256, 2)}
STYLES: dict[str, dict[str, Any]] = {
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.4, "top_k": 40},
    "bias": {"temperature": 0.7, "logit_bias": BIAS},
    "all": {
        "repetition_penalty": 0.8,
        "presence_penalty": 1.1,
        "frequency_penalty": 0.3,
        "logit_bias": BIAS,
        "min_p": 0.01,
    },
    "allowed": {"allowed_token_ids": tuple(range(97, 123)), "presence_penalty": 0.2},
    "long": {"min_tokens": 20, "stop_token_ids": tuple(range(97, 117))},
    "structured": {"structured": {"json": True}},
}
MANNERS: dict[str, dict[str, Any]] = {
    "ar": {"method": "ar"},
    "chains": {"method": "ssd", "draft": "drop:1", "lookahead": 3, "nodes": 3, "width": 1},
    "trees": {"method": "ssd", "draft": "drop:1", "lookahead": 3, "nodes": 9, "width": 3},
}


@pytest.mark.parametrize("style", STYLES)
def test_tokens_are_the_cpus(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plain request, by every shape of step, in the step and outside of it."""
    folder = write_tiny(tmp_path, "llama")
    params = [SamplingParams(**{"seed": i, "max_tokens": 40, **STYLES[style]}) for i in range(3)]
    params.append(SamplingParams(seed=3, max_tokens=40))
    with LLM(folder, device="cpu", **SETTINGS) as llm:
        wanted = [result.token_ids for result in llm.generate(PROMPTS, params)]
    for manner in MANNERS.values():
        with LLM(folder, device=DEVICE, **SETTINGS, **manner) as llm:
            for is_host in (False, True):
                with monkeypatch.context() as patch:
                    if is_host:
                        patch.setattr(StepRules, "take", lambda *given: False)
                    decided = deciders(llm, patch)
                    assert [result.token_ids for result in llm.generate(PROMPTS, params)] == wanted
                    assert {is_in_step for _, is_in_step in decided} == {not is_host}
