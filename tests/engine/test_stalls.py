"""Long prompts beside a stream, on a real engine: it gets tokens in every round, and the bound changes no output."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.draft.texts import DraftTexts
from saguaro.errors import ConfigError
from saguaro.link.inline import Inline
from saguaro.model.tiny import write_tiny
from saguaro.types import RoundEvent

PAGE = 16
AT_ONCE = 1e-6  # milliseconds: no time for prompts, so they get the least there is
EVER = 1e12
STREAM = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder, "llama", num_hidden_layers=4, max_position_embeddings=1024)


def new_llm(folder: Path, bound: float | None, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", max_inter_token_ms=bound, page_size=PAGE, kv_memory="32MiB", **settings)


def prompts(n: int, length: int) -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(256) for _ in range(length)] for _ in range(n)]


def play(llm: LLM, n: int, length: int) -> tuple[list[RoundEvent], dict[str, list[int]]]:
    """A stream, then long prompts beside it: the rounds until all of these are done, and everybody's tokens."""
    engine, tokens, rounds = llm.engine, dict[str, list[int]](), list[RoundEvent]()
    engine.add([1, 2, 3, 4], STREAM, "stream")
    for _ in range(4):
        engine.step()
    engine.round.observers.append(rounds.append)
    left = {engine.add(prompt, SHORT, f"long {i}") for i, prompt in enumerate(prompts(n, length))}
    while left:
        deltas = engine.step()
        assert any(delta.request_id == "stream" for delta in deltas), "a round without a token for the stream"
        for delta in deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                left.remove(delta.request_id)
    return rounds, tokens


@pytest.mark.parametrize("draft", [None, "drop:1,2"])
def test_prompts_give_way_to_a_stream_and_say_the_same(folder: Path, draft: str | None) -> None:
    with new_llm(folder, EVER, draft=draft) as free, new_llm(folder, AT_ONCE, draft=draft) as bound:
        at_once, expected = play(free, 2, 600)
        by_pages, given = play(bound, 2, 600)
    assert max(event.n_computed for event in at_once) > 400
    most_beside = 2 * (1 + 4) + PAGE  # the stream and the first prompt, once it is read
    assert max(event.n_computed for event in by_pages) <= most_beside
    assert len(by_pages) >= 2 * 600 // PAGE
    n_both = min(len(expected["stream"]), len(given["stream"]))
    assert given["stream"][:n_both] == expected["stream"][:n_both]
    assert all(given[name] == expected[name] for name in ("long 0", "long 1"))


def test_the_draft_reads_by_pages_too_while_a_stream_waits(folder: Path) -> None:
    with new_llm(folder, AT_ONCE, draft="drop:1,2", method="sd", link="inline") as llm:
        link = llm.engine.round.draft
        assert isinstance(link, Inline)
        drafter = link.side.drafter
        assert isinstance(drafter, DraftTexts)
        read: list[int] = []
        llm.engine.round.observers.append(
            lambda _: read.append(sum(trunk.n_computed for trunk in drafter.trunks.values()))
        )
        play(llm, 1, 600)
    steps = [after - before for before, after in pairwise(read)]
    assert max(steps) <= PAGE + 2 * 5  # a page of the prompt, and what is drafted after the stream


def test_the_default_bound_depends_on_the_device(folder: Path) -> None:
    with new_llm(folder, None) as llm:
        patience = llm.engine.scheduler.patience
        assert (patience.limit, patience.n_rounds) == (0.2, 2)
    with new_llm(folder, 75) as llm:
        patience = llm.engine.scheduler.patience
        assert (patience.limit, patience.n_rounds) == (0.075, 0)


@pytest.mark.parametrize("bound", [0, -1, float("inf"), float("nan")])
def test_a_bound_that_cannot_be_is_refused(folder: Path, bound: float) -> None:
    with pytest.raises(ConfigError, match=r"max_inter_token_ms is .*; it must be more than 0"):
        LLM(folder, max_inter_token_ms=bound)
