"""The whole engine with a DFlash draft: in the target's thread, and in a process of its own that is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, Structured
from saguaro.errors import ConfigError, UnsupportedModel
from saguaro.link.apart import Timeouts
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_dflash import write_tiny_dflash
from tests.engine.driver import run
from tests.engine.test_eagle import PARAMS, PROMPTS, link_of, sample, tokens, watch
from tests.link.target import is_running, until

SETTINGS: dict[str, Any] = {"method": "ssd-uniform", "lookahead": 3, "budget": 4, "draft_timeout": 60.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_dflash(tmp_path_factory.mktemp("draft"), "z-lab", folder))


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1, max_batch_tokens=32, page_size=4)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(plain)


@pytest.fixture(scope="module")
def apart(plain: LLM, draft: str) -> Iterator[LLM]:
    """The draft is in a process of its own."""
    with plain.sibling(**{**SETTINGS, "method": "swiftspec", "budget": 8}, draft=draft, link="process") as llm:
        link_of(llm).patience = Timeouts(pauses=(0.0,))
        yield llm


@pytest.mark.parametrize(
    ("method", "layout", "given"),
    [
        ("sd", "llama", {}),
        ("sd", "z-lab", {"nodes": 6}),
        ("ssd-uniform", "z-lab", {}),
        ("ssd", "speculators", {}),
        ("ssd", "z-lab", {"nodes": 6}),
    ],
)
def test_in_the_targets_thread_the_tokens_are_those_of_ar(
    method: str, layout: str, given: dict[str, Any], plain: LLM, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    draft = str(write_tiny_dflash(tmp_path, layout, folder, seed=1))
    with plain.sibling(**{**SETTINGS, "method": method, **given}, draft=draft, link="inline") as llm:
        summary = watch(llm)
        for _ in range(2):  # the second time the prompts are in both prefix caches
            assert tokens(llm) == expected
    assert summary.by_source["draft"] > 0


def test_over_the_link_the_tokens_are_those_of_ar(apart: LLM, expected: list[list[int]]) -> None:
    link, summary = link_of(apart), watch(apart)
    for _ in range(2):
        assert tokens(apart) == expected
    assert (link.n_starts, link.n_deaths, link.n_late) == (1, 0, 0)
    assert summary.by_source["draft"] > 0
    assert summary.by_source["cache"] > 0


def test_a_draft_that_is_killed_comes_back_without_the_features_it_missed(
    apart: LLM, expected: list[list[int]]
) -> None:
    """The rows continue alone, and later ones are drafted for again."""
    link = link_of(apart)
    ids = [apart.engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(4):
        apart.engine.step()
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    while apart.engine.has_work:
        apart.engine.step()
    results = [apart.engine.result(name) for name in ids]
    assert [output.token_ids for result in results for output in result.outputs] == expected
    assert link.n_deaths == 1
    summary = watch(apart)
    until(lambda: bool(apart.generate("in an", sample())) and summary.by_source["draft"] > 0)
    assert link.pid is not None
    assert is_running(link.pid)


@pytest.mark.parametrize("method", ["ssd", "ssd-uniform"])
def test_beside_what_followed_earlier(method: str, plain: LLM, draft: str, expected: list[list[int]]) -> None:
    with plain.sibling(**{**SETTINGS, "method": method}, draft=f"suffix+{draft}", link="inline") as llm:
        assert tokens(llm) == expected


@pytest.mark.parametrize("method", ["sd", "ssd-uniform"])
def test_with_a_grammar_and_penalties(method: str, plain: LLM, draft: str) -> None:
    """The candidates of a position follow the first ones of those before it."""
    params = [
        sample(structured=Structured(regex="(the|end|of)( the| end| of)*")),
        sample(repetition_penalty=1.3, logit_bias={104: 3.0}),
    ]
    expected = [
        plain.generate(prompt, one)[0].outputs[0].token_ids for prompt, one in zip(PROMPTS, params, strict=False)
    ]
    with plain.sibling(**{**SETTINGS, "method": method}, draft=draft, link="inline") as llm:
        summary = watch(llm)
        results = run(llm.engine, PROMPTS[:2], params)
        assert [result.outputs[0].token_ids for result in results] == expected
    assert summary.by_source["draft"] > 0


def test_a_longer_lookahead_than_its_block_is_refused(plain: LLM, draft: str) -> None:
    with pytest.raises(
        ConfigError, match=r"lookahead is 8, and .* drafts at most 7 tokens in a block; lower lookahead"
    ):
        plain.sibling(**{**SETTINGS, "lookahead": 8}, draft=draft)


def test_a_draft_for_another_target_is_refused_before_it_is_loaded(plain: LLM, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "llama", num_hidden_layers=7)
    draft = str(write_tiny_dflash(tmp_path / "draft", "z-lab", other))
    for link in ("inline", "process"):
        with pytest.raises(UnsupportedModel, match="was made for a target of 7 layers"):
            plain.sibling(**SETTINGS, draft=draft, link=link)
