"""Captured verification and drafting on a CUDA device: every method gives the tokens of `ar`. Skipped without one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from saguaro import LLM, SamplingParams
from saguaro.draft.grow import TreeDrafter
from saguaro.errors import CapacityError
from saguaro.link.inline import Inline
from saguaro.methods import METHODS
from saguaro.model.tiny import write_tiny
from saguaro.target.scheduler import NOT_FINITE
from saguaro.types import RoundEvent
from tests.round.test_unprepared import Moody

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = ["the end", "in an inn there was another man", "x" * 100, "a", "one two three four five"]
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "kv_memory": "8MiB",
    "max_batch_rows": 4,
    "max_batch_tokens": 64,
    "max_model_len": 256,
}
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.0},
    "restricted": {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
    "least": {"temperature": 1.3, "min_p": 0.1, "logprobs": 2},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
    "structured": {"temperature": 1.0, "structured": {"json": True}},
}


def params(style: str) -> list[SamplingParams]:
    """Two prompts are of this style, the others plain."""
    own, plain = STYLES[style], STYLES["warm"]
    return [
        SamplingParams(seed=i, max_tokens=40, ignore_eos=True, **(own if i % 2 else plain)) for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("style", STYLES)
def test_every_method_gives_the_tokens_of_ar(family: str, style: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    with LLM(folder, method="ar", **SETTINGS) as plain:
        assert plain.engine.round.verifier.runs_ahead
        wanted = [result.token_ids for result in plain.generate(PROMPTS, params(style))]
    for method in (name for name, each in METHODS.items() if each.needs_model and each.verification == "shared"):
        with LLM(folder, method=method, draft="drop:1", lookahead=3, budget=4, prepare="always", **SETTINGS) as llm:
            assert isinstance(llm.engine.round.draft, Inline)
            assert isinstance(llm.engine.round.draft.side.drafter, TreeDrafter)
            events: list[RoundEvent] = []
            llm.engine.round.observers.append(events.append)
            assert [result.token_ids for result in llm.generate(PROMPTS, params(style))] == wanted
            sources = {row.source for event in events for row in event.rows}
            assert ("draft" in sources) == (METHODS[method].fallback != "empty")
            assert ("cache" in sources) == METHODS[method].prepares


@pytest.mark.parametrize("fan_out", ["auto", "uniform", "general", "3,2,2,4"])
def test_rejection_is_captured_too(fan_out: str, tmp_path: Path) -> None:
    """Greedy outputs are equal under both rules."""
    folder = write_tiny(tmp_path, "llama")
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, method="ar", **SETTINGS) as plain:
        wanted = [result.token_ids for result in plain.generate(PROMPTS, greedy)]
    with LLM(folder, method="saguaro", draft="drop:1", lookahead=3, fan_out=fan_out, **SETTINGS) as llm:
        events: list[RoundEvent] = []
        llm.engine.round.observers.append(events.append)
        assert [result.token_ids for result in llm.generate(PROMPTS, greedy)] == wanted
    assert "cache" in {row.source for event in events for row in event.rows}


def test_memory_that_is_not_there_is_an_error_that_says_what_to_lower(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", max_position_embeddings=2**24)
    with pytest.raises(CapacityError, match=r"the memory of cuda:0 is full: .*lower kv_memory"):
        LLM(folder, device="cuda", kv_memory="600GiB", max_batch_rows=256)


def test_what_was_taken_is_told(tmp_path: Path) -> None:
    with LLM(write_tiny(tmp_path, "llama"), draft="drop:1", **SETTINGS) as llm:
        assert llm.engine.memory["keys and values"] == llm.engine.kv.n_bytes
        assert llm.engine.memory["draft weights"] == 0  # they are the target's
        assert {"weights", "draft keys and values", "graphs and workspace"} <= set(llm.engine.memory)
        assert llm.engine.startup["graphs"] > 0


@pytest.mark.parametrize("n_rows", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("is_moody", [False, True])
@pytest.mark.parametrize("has_trees", [False, True])
def test_a_draft_that_is_the_target_is_always_right(
    n_rows: int, is_moody: bool, has_trees: bool, tmp_path: Path
) -> None:
    """Whatever is adopted, extended or drafted anew: a wrong key somewhere would show in what is accepted.

    Also where a preparation is left out now and then, and in a batch that has less prepared for each.
    """
    folder = write_tiny(tmp_path, "llama", max_position_embeddings=2048)
    prompts = [f"the end of the world {i} " * (6 + 3 * (i % 8)) for i in range(n_rows)]
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    settings = {
        **SETTINGS,
        "kv_memory": "64MiB",
        "max_batch_rows": n_rows,
        "max_batch_tokens": 256,
        "max_model_len": 1024,
    }
    shape: dict[str, Any] = {"nodes": 12, "width": 3} if has_trees else {"nodes": 4, "width": 1}
    with LLM(folder, method="ssd", draft=str(folder), lookahead=4, prepare="always", **shape, **settings) as llm:
        if is_moody:
            assert isinstance(llm.engine.round.draft, Inline)
            llm.engine.round.draft.side.policy.prepare = Moody(seed=n_rows)
        events: list[RoundEvent] = []
        llm.engine.round.observers.append(events.append)
        llm.generate(prompts, greedy)
    rows = [row for event in events for row in event.rows]
    assert all(row.k == row.length or (has_trees and row.k > 0) for row in rows)  # of trees, one path can be right
    assert sum(row.source == "cache" for row in rows) > (0.0 if is_moody else 0.5) * len(rows)


@pytest.mark.parametrize("method", ["ar", "ssd"])
def test_logits_that_are_not_finite_end_one_row(method: str, tmp_path: Path) -> None:
    """The embedding of q is NaN."""
    folder = write_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][ord("q")] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    own = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias={ord("q"): -100.0})
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    with LLM(folder, method=method, draft="drop:1", lookahead=3, budget=4, prepare="always", **SETTINGS) as llm:
        for style in (own, plain):
            results = [result.outputs[0] for result in llm.generate(["the end", "aqua", "a q", "in an inn"], style)]
            for output, is_bad in zip(results, (False, True, True, False), strict=True):
                has_said = ord("q") in output.token_ids[:19]  # the last is not read any more
                is_broken = (output.finish_reason, output.stop_reason) == ("error", NOT_FINITE)
                assert is_broken == (is_bad or has_said)


@pytest.mark.parametrize("method", ["ar", "ssd"])
def test_prompts_are_scored_as_on_a_cpu(method: str, tmp_path: Path) -> None:
    """Every other prompt is scored, in parts, beside rows that decode in captured steps."""
    folder = write_tiny(tmp_path, "llama")
    scored = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    styles = [scored if at % 2 else plain for at in range(len(PROMPTS))]
    with LLM(folder, method="ar", **{**SETTINGS, "device": "cpu"}) as on_cpu:
        wanted = on_cpu.generate(PROMPTS, styles)
    drafted: dict[str, Any] = {} if method == "ar" else {"draft": "drop:1", "lookahead": 3, "prepare": "always"}
    with LLM(folder, method=method, **drafted, **SETTINGS) as llm:
        found = llm.generate(PROMPTS, styles)
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.token_ids == other.token_ids
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None) == (at % 2 == 0)
        for mine, its in zip((one.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:], strict=True):
            assert mine is not None
            assert its is not None
            assert (mine.token, mine.rank) == (its.token, its.rank)
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert [value for _, value in mine.top] == pytest.approx([value for _, value in its.top], abs=1e-4)
