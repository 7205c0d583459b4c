"""Structured output: every method writes ar's tokens under a grammar, and the text is what was asked for."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from saguaro import LLM, SamplingParams, Structured
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.rows import DraftRows
from saguaro.engine import assembly
from saguaro.engine.results import Completion, Result
from saguaro.errors import ConfigError
from saguaro.kernels import native
from saguaro.kernels.bundle import plain_kernels
from saguaro.link.inline import Inline
from saguaro.measure.metrics import Summary
from saguaro.methods import METHODS
from saguaro.model import compiler
from saguaro.model.tiny import EOS_ID, write_tiny
from tests.engine.driver import deciders, run

SHARED = [name for name, method in METHODS.items() if method.drafts and method.verification == "shared"]
SIZES: dict[str, Any] = {"link": "inline", "lookahead": 3, "budget": 4}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["in", "the", "an"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WORDS = r"(the|in|an)( (the|in|an|er)){2,6}"
CHOICE = ("the end", "the inn", "an end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB")


def sample(max_tokens: int | None = 100, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": max_tokens, **params})


def each() -> tuple[list[str | list[int]], list[SamplingParams]]:
    """All kinds of wishes, greedy and sampled, among requests that have none."""
    asked: list[tuple[str | list[int], SamplingParams]] = [
        ("the end", sample(structured={"json": PERSON})),
        ("in an other", sample(temperature=0.0, structured={"json": PERSON})),
        ("an", sample(12, ignore_eos=True)),
        ("the", sample(seed=9, n=2, structured={"json": PERSON}, top_p=0.9)),
        ([104, 105], sample(structured={"regex": WORDS}, presence_penalty=0.5, logit_bias={101: 2.0})),
        ("x", sample(temperature=0.0, structured={"choice": CHOICE})),
        ("y", sample(structured={"choice": CHOICE}, logprobs=2)),
        ("z", sample(60, structured={"grammar": 'root ::= "(" root ")" | "in" | root "+" root'})),
        ("the", sample(30, temperature=0.0, structured={"json": True}, ignore_eos=True)),
        ("the end", sample(10, structured={"json": PERSON})),
        ("an", sample(structured={"json": PERSON}, speculation=False)),
    ]
    prompts, params = zip(*asked, strict=True)
    return list(prompts), list(params)


@pytest.fixture(scope="module")
def expected(tiny: LLM) -> list[Result]:
    """What ar says, one at a time."""
    return [run(tiny.engine, [prompt], params)[0] for prompt, params in zip(*each(), strict=True)]


def outputs(results: Sequence[Result]) -> list[Completion]:
    return [output for result in results for output in result.outputs]


def facts(results: Sequence[Result]) -> list[tuple[list[int], str, str, object]]:
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in outputs(results)]


def test_what_ar_says_is_what_was_asked_for(expected: list[Result]) -> None:
    for at in (0, 1, 3, 10):
        for output in expected[at].outputs:
            assert (output.finish_reason, output.stop_reason) == ("stop", EOS_ID)
            jsonschema.validate(json.loads(output.text), PERSON)
    assert re.fullmatch(WORDS, expected[4].text)
    assert {expected[5].text, expected[6].text} <= set(CHOICE)
    assert outputs([expected[9]])[0].finish_reason == "length"
    assert len({output.text for at in (0, 1, 3, 10) for output in expected[at].outputs}) >= 4


@pytest.mark.parametrize("method", [*SHARED, "saguaro"])
def test_every_method_gives_the_tokens_of_ar(tiny: LLM, expected: list[Result], method: str) -> None:
    """Requests with and without a grammar in one batch."""
    drafted = tiny.sibling(method=method, draft="drop:2", verification="shared", **SIZES)
    assert facts(run(drafted.engine, *each())) == facts(expected)


def test_a_draft_that_keeps_to_the_grammar_is_accepted_more(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens_per_round() -> float:
        drafted, summary = tiny.sibling(method="ssd", draft="drop:2", prepare="always", **SIZES), Summary()
        drafted.engine.round.observers.append(summary.add)
        run(drafted.engine, ["the end"] * 4, [sample(seed=i, structured={"json": PERSON}) for i in range(4)])
        return summary.tokens_per_round or 0.0

    guided = tokens_per_round()
    monkeypatch.setattr("saguaro.round.DraftRows", lambda start: DraftRows())  # without the grammar
    assert guided > 1.3 * tokens_per_round()


def test_a_draft_in_a_process_of_its_own(tiny: LLM, expected: list[Result]) -> None:
    settings = {**SIZES, "link": "process", "draft_timeout": 60.0}
    with tiny.sibling(method="ssd", draft="drop:2", prepare="always", **settings) as drafted:
        summary = Summary()
        drafted.engine.round.observers.append(summary.add)
        assert facts(run(drafted.engine, *each())) == facts(expected)
        assert (summary.tokens_per_round or 0.0) > 1.2


@pytest.mark.parametrize("method", ["ar", "sd", "ssd"])
def test_steps_as_a_gpu_captures_them(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifier and drafter of a device, with the kernels' plain twins: the draft knows no grammar there."""
    monkeypatch.setattr(native, "is_there", lambda: False)  # weights stay the tensors that the twins read
    tiny = LLM(folder, device="cpu", dtype="float32", kv_memory="2MiB")
    expected = run(tiny.engine, *each())
    monkeypatch.setattr(assembly, "kernels_for", lambda device: plain_kernels())
    monkeypatch.setattr(assembly.Assembly, "_warm", lambda *parts: None)  # nothing to capture
    captured = tiny.sibling(method=method, draft="drop:2", prepare="always", **SIZES)
    assert captured.engine.round.verifier.runs_ahead
    decides = deciders(captured, monkeypatch)
    assert facts(run(captured.engine, *each())) == facts(expected)
    assert all(is_in_step or any(p.logprobs is not None for p in batch) for batch, is_in_step in decides)
    assert sum(is_in_step and any(p.structured is not None for p in batch) for batch, is_in_step in decides) > 5
    link = captured.engine.round.draft
    assert method == "ar" or (isinstance(link, Inline) and isinstance(link.side.drafter, TreeDrafter))


@pytest.mark.parametrize("method", ["sd", "ssd"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption(tiny: LLM, method: str, prefix_caching: bool) -> None:
    """Four requests in memory for two."""
    settings = {**SIZES, "kv_memory": "128KiB", "prefix_caching": prefix_caching, "page_size": 4, "max_model_len": 120}
    drafted = tiny.sibling(method=method, draft="drop:2", **settings)
    params = [sample(seed=i, structured={"json": PERSON}) for i in range(4)]
    found = run(drafted.engine, ["the end", "in", "an", "x"], params)
    assert drafted.engine.scheduler.n_preemptions > 0
    assert facts(found) == facts(run(tiny.engine, ["the end", "in", "an", "x"], params))


# Ends


def test_the_end_is_forced_whatever_ignore_eos_and_min_tokens_say(tiny: LLM) -> None:
    for params in ({"ignore_eos": True}, {"min_tokens": 90}, {"min_tokens": 90, "ignore_eos": True}):
        (result,) = run(tiny.engine, ["the"], sample(structured={"choice": ["abc"]}, **params))
        (output,) = result.outputs
        assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", EOS_ID)
        assert output.token_ids == [*b"abc", EOS_ID]


def test_min_tokens_puts_off_the_end_while_the_grammar_can_go_on(tiny: LLM) -> None:
    for seed in range(3):
        (result,) = run(tiny.engine, ["the"], sample(seed=seed, min_tokens=20, structured={"regex": "[ab]{0,25}"}))
        assert 20 <= len(result.text) <= 25
        assert result.outputs[0].finish_reason == "stop"


def test_stop_strings_and_tokens_still_end_it(tiny: LLM) -> None:
    (result,) = run(tiny.engine, ["the"], sample(structured={"choice": ["ab: cd"]}, stop=(": ",)))
    assert (result.text, result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("ab", "stop", ": ")
    (result,) = run(tiny.engine, ["the"], sample(structured={"choice": ["abcd"]}, stop_token_ids=(ord("c"),)))
    assert (result.text, result.outputs[0].stop_reason) == ("ab", ord("c"))


def test_max_tokens_may_cut_it(tiny: LLM) -> None:
    (result,) = run(tiny.engine, ["the"], sample(3, structured={"choice": ["abcdef"]}))
    assert (result.text, result.outputs[0].finish_reason) == ("abc", "length")


# What goes wrong


def test_a_grammar_that_cannot_be_is_refused_before_it_is_accepted(tiny: LLM) -> None:
    other = tiny.engine.add("the end", sample(5, ignore_eos=True))
    for wish in ({"regex": "[a"}, {"json": {"type": "strin"}}, {"grammar": "start: foo"}):
        with pytest.raises(ConfigError, match="cannot be served"):
            tiny.engine.add("the", sample(structured=wish))
        with pytest.raises(ConfigError, match="cannot be served"):
            tiny.generate("the", sample(structured=wish))
    while tiny.engine.has_work:
        tiny.engine.step()
    assert len(tiny.engine.result(other).token_ids) == 5


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compiler.LIMITS["grammar"], "max_lexer_states", 30)
    llm = LLM(folder, device="cpu", kv_memory="2MiB")
    wish = Structured(grammar='start: "ab" rest\nrest: /[xyz]*[xy].{20}/')
    broken, fine = run(llm.engine, ["the", "an"], [sample(structured=wish), sample(8, ignore_eos=True)])
    (output,) = broken.outputs
    assert output.finish_reason == "error"
    assert "too complex" in str(output.stop_reason)
    assert output.text.startswith("ab")
    assert len(fine.token_ids) == 8


# The default model


@pytest.mark.network
def test_the_default_model_fills_in_a_schema(llm: LLM) -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "name": {"type": "string", "maxLength": 30}}}  # type: ignore[dict-item]
    asked = [
        [{"role": "user", "content": text}]
        for text in ("Describe a person as JSON.", "Who was Ada Lovelace? Answer in JSON.")
    ]
    params = [sample(96, temperature=t, seed=3, structured={"json": schema}) for t in (0.0, 1.0)]
    plain = llm.chat(asked, params)
    for result in plain:
        assert result.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(result.text), schema)
    with llm.sibling(method="ssd", draft="drop:14", prepare="always", link="inline") as drafted:
        assert facts(drafted.chat(asked, params)) == facts(plain)
