"""The whole engine with an EAGLE-3 draft: in the target's thread, and in a process of its own that is killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from saguaro import LLM, EngineConfig, SamplingParams
from saguaro.engine.assembly import Assembly
from saguaro.errors import ConfigError, CorruptModel, UnsupportedModel
from saguaro.link.apart import Apart, Timeouts
from saguaro.measure.metrics import Summary
from saguaro.model.tiny import write_tiny
from saguaro.model.tiny_eagle import write_tiny_eagle
from saguaro.types import Outcome
from tests.engine.driver import run
from tests.link.target import is_running, until

PROMPTS: list[str | list[int]] = ["the end of the other inner man", "in an other", [104, 105], "the end of the"]
SETTINGS: dict[str, Any] = {"method": "ssd-uniform", "lookahead": 3, "budget": 4, "draft_timeout": 60.0}


def sample(max_tokens: int = 16, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": max_tokens, "ignore_eos": True, **params})


PARAMS = [sample(), sample(temperature=0.0), sample(n=2, top_p=0.9), sample(speculation=False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def head(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_eagle(tmp_path_factory.mktemp("head"), "safeailab", folder))


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1, max_batch_tokens=32, page_size=4)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(plain)


@pytest.fixture(scope="module")
def apart(plain: LLM, head: str) -> Iterator[LLM]:
    """The draft is in a process of its own."""
    with plain.sibling(**{**SETTINGS, "method": "swiftspec", "budget": 8}, draft=head, link="process") as llm:
        link_of(llm).patience = Timeouts(pauses=(0.0,))
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for result in run(llm.engine, PROMPTS, PARAMS) for output in result.outputs]


def link_of(llm: LLM) -> Apart:
    link = llm.engine.round.draft
    assert isinstance(link, Apart)
    return link


def watch(llm: LLM) -> Summary:
    summary = Summary()
    llm.engine.round.observers.append(summary.add)
    return summary


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
    assert tokens(apart) == expected


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
