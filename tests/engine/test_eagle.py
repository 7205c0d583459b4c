"""The whole engine with an EAGLE-3 draft: in the target's thread, and in a process of its own that is killed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saguaro import LLM, EngineConfig
from saguaro.engine.assembly import Assembly
from saguaro.errors import ConfigError, CorruptModel, UnsupportedModel
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_eagle import write_tiny_eagle
from saguaro.types import Outcome
from tests.engine.driver import watch
from tests.engine.features import (
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
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_eagle(tmp_path_factory.mktemp("head"), "safeailab", folder))


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return new_plain(folder)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(plain)


@pytest.fixture(scope="module")
def apart(plain: LLM, head: str) -> Iterator[LLM]:
    with drafted_apart(plain, head) as llm:
        yield llm


@pytest.mark.parametrize("layout", ["speculators", "qwen3"])
@pytest.mark.parametrize("method", ["ssd", "swiftspec", "sd"])
def test_in_the_targets_thread_the_tokens_are_those_of_ar(
    method: str, layout: str, plain: LLM, folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    draft = str(write_tiny_eagle(tmp_path, layout, folder, seed=1))
    with plain.sibling(**{**SETTINGS, "method": method}, draft=draft, link="inline") as llm:
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


def test_nothing_is_returned_that_no_draft_reads(plain: LLM, head: str) -> None:
    found: dict[str, Outcome] = {}
    for draft in ("drop:2", head):
        with plain.sibling(**SETTINGS, draft=draft, link="inline") as llm:
            llm.engine.add("the end of the other", sample(4))
            llm.engine.step()
            found[draft] = llm.engine.round._outcome
    assert found["drop:2"].features is None
    features = found[head].features
    assert features is not None
    (only,) = features.rows()
    assert only[:2] == (0, 0)
    assert only[2].shape == (len(plain.engine.tokenizer.encode("the end of the other")), 3 * 64)
    assert only[2].dtype == torch.float32


def test_a_draft_for_another_target_is_refused_before_it_is_loaded(plain: LLM, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", "llama", num_hidden_layers=6, hidden_size=32)
    for link in ("inline", "process"):
        draft = str(write_tiny_eagle(tmp_path / link, "specforge", other, target_hidden_size=32))
        with pytest.raises(UnsupportedModel, match="made for a target of hidden size 32"):
            plain.sibling(**SETTINGS, draft=draft, link=link)
    draft = str(write_tiny_eagle(tmp_path / "unsaid", "specforge", other))
    with pytest.raises(CorruptModel, match="reads 96 numbers; 3 layers of a target of hidden size 64 give 192"):
        plain.sibling(**SETTINGS, draft=draft, link="process")


def test_it_needs_a_target_that_computes(plain: LLM, head: str) -> None:
    config = EngineConfig(draft=head, device="cpu")
    assembly = Assembly(plain.engine.loaded, plain.engine.tokenizer, config, None, plain.engine.round.verifier)
    with pytest.raises(ConfigError, match="a replayed target has none"):
        _ = assembly.reads


def test_a_target_on_a_gpu_is_read_too(plain: LLM, head: str) -> None:
    """The target only says that it is on one; nothing is computed."""
    elsewhere = plain.engine.loaded.model.without([])
    elsewhere.device = torch.device("cuda", 0)
    loaded = replace(plain.engine.loaded, model=elsewhere)
    assembly = Assembly(loaded, plain.engine.tokenizer, EngineConfig(draft=head))
    assert assembly.reads is not None
    assert assembly.reads.taps == (2, 3, 3)
