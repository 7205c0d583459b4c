"""What followed earlier in the text, through the public API: the tokens of ar, fewer rounds, and nothing of others."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.link.apart import Apart, Timeouts
from saguaro.measure.metrics import Summary
from saguaro.model.tiny import write_tiny
from tests.engine.driver import run
from tests.link.target import until

SIZES: dict[str, Any] = {"link": "inline", "lookahead": 4, "learnt_dir": "none"}
RECORD = list(range(30, 48))
PROMPTS: list[str | list[int]] = [RECORD * 3 + RECORD[:4], "the end of the end of the", [104, 105] * 8, "an"]


def sample(max_tokens: int = 24, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": max_tokens, "ignore_eos": True, **params})


COPIES = sample(temperature=0.0, logit_bias={101: 100.0, 110: 100.0})  # two tokens, so that it repeats itself
PARAMS = [sample(temperature=0.0), COPIES, sample(n=2, top_p=0.9), sample(logit_bias={101: 3.0}, min_p=0.01)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return _tokens(plain)


def _tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for result in run(llm.engine, PROMPTS, PARAMS) for output in result.outputs]


def _watch(llm: LLM) -> Summary:
    summary = Summary()
    llm.engine.round.observers.append(summary.add)
    return summary


@pytest.mark.parametrize(
    ("draft", "settings"),
    [
        ("suffix", {}),
        ("suffix", {"nodes": 10}),
        ("suffix", {"suffix_store": 1024}),
        ("suffix+drop:2", {"method": "sd"}),
        ("suffix+drop:2", {"method": "sd", "nodes": 10}),
        ("suffix+drop:2", {"method": "ssd", "prepare": "always"}),
        ("suffix+drop:2", {"method": "ssd", "prepare": "always", "nodes": 10}),
        ("suffix+drop:2", {"method": "ssd-uniform"}),
        ("suffix+drop:2", {"method": "pearl"}),
    ],
)
def test_the_tokens_are_those_of_ar(
    plain: LLM, expected: list[list[int]], draft: str, settings: dict[str, Any]
) -> None:
    drafted = plain.sibling(draft=draft, **{**SIZES, **settings})
    summary = _watch(drafted)
    for _ in range(2):
        assert _tokens(drafted) == expected
    assert summary.by_source["suffix"] > 0
    assert bool(summary.by_source["draft"] + summary.by_source["cache"]) == (draft != "suffix")
    assert summary.tokens_per_round is not None
    assert summary.tokens_per_round > 1.05


@pytest.mark.parametrize("draft", ["suffix", "suffix+drop:2"])
def test_rejection_at_temperature_0_gives_the_tokens_of_ar(plain: LLM, draft: str) -> None:
    greedy = [sample(temperature=0.0), COPIES]
    drafted = plain.sibling(draft=draft, method="sd", verification="rejection", nodes=8, **SIZES)
    found, wanted = (run(llm.engine, PROMPTS[:2], greedy) for llm in (drafted, plain))
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]


def _rounds(llm: LLM, prompt: list[int]) -> int:
    return llm.generate([prompt], sample(temperature=0.0, max_tokens=40))[0].outputs[0].n_rounds


@pytest.mark.parametrize("n_stored", [0, 4096])
def test_an_output_is_repeated_for_others_only_if_that_was_asked_for(plain: LLM, n_stored: int) -> None:
    """The second request is the first again: its prompt repeats nothing, its output all of the first's."""
    drafted = plain.sibling(draft="suffix", suffix_store=n_stored, **SIZES)
    prompt = [9, 17, 33]
    first = _rounds(drafted, prompt)
    second = _rounds(drafted, prompt)
    assert (second < first) == (n_stored > 0)


@pytest.fixture(scope="module", params=["suffix", "suffix+drop:2"])
def apart(plain: LLM, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A draft in a process of its own."""
    settings = {**SIZES, "link": "process", "method": "sd", "draft_timeout": 60.0, "suffix_store": 1024}
    with plain.sibling(draft=request.param, **settings) as llm:
        yield llm


def test_a_draft_process_that_is_killed_comes_back(apart: LLM, expected: list[list[int]]) -> None:
    link, summary = apart.engine.round.draft, _watch(apart)
    assert isinstance(link, Apart)
    link.patience = Timeouts(pauses=(0.0,))
    assert _tokens(apart) == expected
    assert summary.by_source["suffix"] > 0
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    assert _tokens(apart) == expected
    until(lambda: bool(apart.generate(PROMPTS[2], COPIES)) and link.n_starts > 1)
    before = summary.by_source["suffix"]
    until(lambda: bool(apart.generate(PROMPTS[2], COPIES)) and summary.by_source["suffix"] > before)
    assert _tokens(apart) == expected
