"""Log-probabilities of prompts, however the prompt is computed, against transformers; prompts that are only scored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saguaro import LLM, SamplingParams
from saguaro.engine import assembly
from saguaro.errors import ConfigError
from saguaro.kernels import native
from saguaro.kernels.bundle import plain_kernels
from saguaro.model.tiny import tiny_model, write_tiny
from saguaro.target import verifier
from saguaro.target.request import Request

PROMPT = [(7 * at * at + 3 * at) % 200 for at in range(90)]
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("scored"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def reference() -> Tensor:  # [90, V]
    """What comes after each token of the prompt, by transformers."""
    model = tiny_model("llama", num_hidden_layers=4)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, :, :264].log_softmax(-1)  # type: ignore[no-any-return]


def tiny(folder: Path, **settings: Any) -> LLM:
    drafted = {"draft": "drop:2", "method": "ssd-uniform", "link": "inline", "lookahead": 3, "budget": 4}
    return LLM(folder, device="cpu", dtype="float32", **{"kv_memory": "2MiB", **drafted, **settings})


@pytest.fixture(params=[512, 32], ids=["whole", "chunks"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with tiny(folder, max_batch_tokens=request.param, max_batch_rows=8) as found:
        yield found


def check(found: Any, reference: Tensor, n_top: int = 3) -> None:
    assert found is not None
    assert found[0] is None
    assert len(found) == len(PROMPT)
    for at, one in enumerate(found[1:], 1):
        law = reference[at - 1]
        assert one.token == PROMPT[at]
        assert one.logprob == pytest.approx(float(law[PROMPT[at]]), abs=1e-4)
        assert one.rank == int((law > law[PROMPT[at]]).sum()) + 1
        assert [logprob for _, logprob in one.top] == pytest.approx(law.topk(n_top).values.tolist(), abs=1e-4)
        assert [token for token, _ in one.top] == law.topk(n_top).indices.tolist()


def test_a_prompt_is_scored_as_transformers_scores_it(llm: LLM, reference: Tensor) -> None:
    (result,) = llm.generate(PROMPT, SCORED)
    check(result.prompt_logprobs, reference)
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert plain.prompt_logprobs is None
    assert plain.token_ids == result.token_ids


def test_a_cached_prompt_is_scored_all_the_same(llm: LLM, reference: Tensor) -> None:
    plain = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(PROMPT, plain)
    (cached,) = llm.generate(PROMPT, plain)
    assert cached.outputs[0].timings.n_cached >= 80
    (result,) = llm.generate(PROMPT, SCORED)
    check(result.prompt_logprobs, reference)
    assert result.outputs[0].timings.n_cached == 0


def test_logits_are_held_in_parts(llm: LLM, reference: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "SCORED_BYTES", 4 * 264 * 7)
    rows: list[int] = []
    logits = llm.engine.loaded.model.logits

    def counted(hidden: Tensor, by: Any) -> Tensor:
        rows.append(len(hidden))
        return logits(hidden, by)

    monkeypatch.setattr(llm.engine.loaded.model, "logits", counted)
    (result,) = llm.generate(PROMPT, SCORED)
    check(result.prompt_logprobs, reference)
    assert max(rows) == 7


def test_beside_others_and_with_several_outputs(llm: LLM, reference: Tensor) -> None:
    others = [PROMPT[at:] for at in range(3)]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 3
    alone = [result.token_ids for result in llm.generate(others, params)]
    several = SamplingParams(seed=5, max_tokens=4, n=2, prompt_logprobs=3)
    results = llm.generate([*others, PROMPT], [*params, several])
    assert [result.token_ids for result in results[:3]] == alone
    check(results[3].prompt_logprobs, reference)
    assert [result.prompt_logprobs for result in results[:3]] == [None] * 3


def test_after_a_preemption_every_token_is_scored_once(
    folder: Path, reference: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscored: list[int] = []
    with tiny(folder, kv_memory="144KiB", max_batch_tokens=10, max_batch_rows=4) as llm:  # 9 pages: 3 and 6 at first
        scheduler = llm.engine.scheduler
        preempt = scheduler._preempt

        def noted(request: Request) -> None:
            unscored.append(request.n_unscored)
            preempt(request)

        monkeypatch.setattr(scheduler, "_preempt", noted)
        old = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        results = llm.generate([PROMPT[:40], PROMPT], [old, SCORED])
        assert 0 < unscored[0] < len(PROMPT) - 1  # in the middle of the prompt
        check(results[1].prompt_logprobs, reference)


def test_a_prompt_alone_is_scored_and_nothing_is_generated(llm: LLM, reference: Tensor) -> None:
    (result,) = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=3, n=2))
    check(result.prompt_logprobs, reference)
    for output in result.outputs:
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    longest = llm.engine.kv.longest
    (full,) = llm.generate([PROMPT[at % 90] for at in range(longest)], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert full.prompt_logprobs is not None
    assert len(full.prompt_logprobs) == longest
    assert full.prompt_logprobs[1] is not None
    assert full.prompt_logprobs[1].top == ()
    with pytest.raises(ConfigError, match="max_tokens is 0; it must be at least 1"):
        SamplingParams(max_tokens=0)


def test_a_stream_tells_them_first(llm: LLM, reference: Tensor) -> None:
    deltas = list(llm.stream(PROMPT, SCORED))
    check(deltas[0].prompt_logprobs, reference)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_steps_as_a_gpu_captures_them(folder: Path, reference: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a device, with the kernels' plain twins: prompts are computed outside of captured steps."""
    monkeypatch.setattr(native, "is_there", lambda: False)  # weights stay the tensors that the twins read
    monkeypatch.setattr(assembly, "kernels_for", lambda device: plain_kernels())
    monkeypatch.setattr(assembly.Assembly, "_warm", lambda *parts: None)  # nothing to capture
    with tiny(folder, max_batch_tokens=32, max_batch_rows=8) as llm:
        assert llm.engine.round.verifier.runs_ahead
        plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        results = llm.generate([PROMPT[5:], PROMPT], [plain, SCORED])
        check(results[1].prompt_logprobs, reference)


def test_a_token_that_no_text_has_is_scored_last(folder: Path) -> None:
    with tiny(folder) as llm:
        (result,) = llm.generate([5, 280, 6], SCORED)  # the head has 288 rows, the tokenizer 264 tokens
    assert result.prompt_logprobs is not None
    _, beyond, last = result.prompt_logprobs
    assert beyond is not None
    assert (beyond.logprob, beyond.rank) == (float("-inf"), 265)
    assert last is not None
    assert last.logprob > float("-inf")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told(folder: Path, value: float) -> None:
    with tiny(folder) as llm:
        llm.engine.loaded.model.norm.weight[3] = value
        for params in (SamplingParams(max_tokens=0, prompt_logprobs=1), SCORED):
            (result,) = llm.generate(PROMPT, params)
            assert result.outputs[0].finish_reason == "error"
            assert "logits are not finite" in str(result.outputs[0].stop_reason)
