"""The whole engine with a DFlash draft: in the target's thread, and in a process of its own that is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, Structured
from saguaro.errors import ConfigError, UnsupportedModel
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_dflash import write_tiny_dflash
from tests.engine.driver import run, watch
from tests.engine.features import (
    PROMPTS,
    SETTINGS,
    check_killed,
    check_over_the_link,
    drafted_apart,
    new_plain,
    sample,
    tokens,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_dflash(tmp_path_factory.mktemp("draft"), "z-lab", folder))


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return new_plain(folder)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(plain)


@pytest.fixture(scope="module")
def apart(plain: LLM, draft: str) -> Iterator[LLM]:
    with drafted_apart(plain, draft) as llm:
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
    check_over_the_link(apart, expected)


def test_a_draft_that_is_killed_comes_back_without_the_features_it_missed(
    apart: LLM, expected: list[list[int]]
) -> None:
    check_killed(apart, expected)


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
