"""The whole engine with its draft in a process of its own, which is killed, stopped, refused or left behind."""

import gc
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saguaro import LLM
from saguaro.engine.results import Result
from saguaro.errors import DraftError
from saguaro.link.apart import Apart, Timeouts
from saguaro.model.tiny import write_tiny
from tests.engine.driver import link_of, resting, run, sample, watch
from tests.link.target import is_running, until

PROMPTS: list[str | list[int]] = ["the end", "in an other", [104, 105], "an"]
SETTINGS: dict[str, Any] = {
    "method": "ssd-uniform",
    "draft": "drop:2",
    "link": "process",
    "lookahead": 3,
    "budget": 4,
    "draft_timeout": 60.0,
}


PARAMS = [sample(), sample(temperature=0.0), sample(n=2, top_p=0.9), sample(logit_bias={101: 2.0}, min_p=0.01)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1)


@pytest.fixture(scope="module")
def drafted(plain: LLM) -> Iterator[LLM]:
    """One engine for the tests that leave its draft alive, or let it come back. What missed is always drafted."""
    with plain.sibling(**SETTINGS, fallback="draft") as llm:
        link_of(llm).patience = Timeouts(pauses=(0.0,))
        yield llm
        pid = pid_of(llm)
        assert is_running(pid)
    assert not is_running(pid)
    llm.close()  # once more does no harm


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return tokens(run(plain.engine, PROMPTS, PARAMS))


def tokens(results: list[Result]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


def pid_of(llm: LLM) -> int:
    pid = link_of(llm).pid
    assert pid is not None
    return pid


def come_back(llm: LLM) -> None:
    """Generate until the draft is of use again."""
    summary = watch(llm)
    until(lambda: bool(llm.generate("the", sample(max_tokens=12))) and summary.by_source["cache"] > 0)


# In step


def test_the_tokens_are_those_of_ar_and_rounds_are_saved(drafted: LLM, expected: list[list[int]]) -> None:
    link, summary = link_of(drafted), watch(drafted)
    with resting(drafted):
        for _ in range(2):
            assert tokens(run(drafted.engine, PROMPTS, PARAMS)) == expected
    assert (link.n_starts, link.n_deaths, link.n_late) == (1, 0, 0)
    assert summary.by_source["cache"] > 0
    assert summary.by_source["draft"] > 0
    assert summary.tokens_per_round is not None
    assert summary.tokens_per_round > 1.1


def test_rows_that_are_not_speculated_keep_the_others_in_step(drafted: LLM, plain: LLM) -> None:
    """They come first, last and in between, and their slots are used by others after them."""
    link, summary = link_of(drafted), watch(drafted)
    before = (link.n_starts, link.n_deaths, link.n_late)
    lengths = [5, 24, 12, 24, 3, 24, 17, 9]
    params = [sample(n, seed=at, speculation=at % 3 != 0) for at, n in enumerate(lengths)]
    prompts = PROMPTS * 2
    with resting(drafted):
        assert tokens(run(drafted.engine, prompts, params)) == tokens(run(plain.engine, prompts, params))
    assert (link.n_starts, link.n_deaths, link.n_late) == before
    assert summary.by_source["cache"] > 0
    assert tokens(run(drafted.engine, ["an"], sample(speculation=False))) == tokens(
        run(plain.engine, ["an"], sample(speculation=False))
    )


def test_rows_that_are_not_prepared_for_are_drafted_just_in_time(drafted: LLM, expected: list[list[int]]) -> None:
    summary = watch(drafted)
    unprepared = [replace(params, prepare=False) for params in PARAMS]
    assert tokens(run(drafted.engine, PROMPTS, unprepared)) == expected
    assert summary.by_source["cache"] == 0
    assert summary.by_source["draft"] > 0
    assert summary.hit_rate is None, "what nobody prepared for is no miss"


def test_streams_that_end_early_leave_the_draft_in_step(drafted: LLM, plain: LLM) -> None:
    link = link_of(drafted)
    before = (link.n_starts, link.n_deaths, link.n_late)
    expected = plain.generate("the end", sample(40))[0].token_ids
    kept = drafted.stream("the end", sample(40))
    found: list[int] = []
    for n_read in range(4):
        other = drafted.stream("an", sample(40))
        for _ in range(n_read):
            next(other)
        other.close()
        found += next(kept).token_ids
    assert found + [token for delta in kept for token in delta.token_ids] == expected
    assert (link.n_starts, link.n_deaths, link.n_late) == before


def test_two_drafts_at_once_and_none_is_left_behind(
    drafted: LLM, plain: LLM, tmp_path: Path, expected: list[list[int]]
) -> None:
    draft = write_tiny(tmp_path, "qwen3", seed=5)
    other = plain.sibling(**{**SETTINGS, "method": "saguaro", "draft": str(draft), "saguaro_c": 0.5})
    pid = pid_of(other)
    assert pid != pid_of(drafted)
    greedy = sample(temperature=0.0)
    alone = plain.generate("the end", greedy)[0].token_ids
    streams = [other.stream("the end", greedy), drafted.stream("the end", greedy)]
    found: list[list[int]] = [[], []]
    while not all(stream.is_done for stream in streams):
        for at, stream in enumerate(streams):
            found[at] += next(stream).token_ids if not stream.is_done else []
    assert found == [alone, alone]
    assert (link_of(other).n_deaths, link_of(other).n_late) == (0, 0)
    assert is_running(pid)
    del other, streams, stream
    gc.collect()
    until(lambda: not is_running(pid))
    assert tokens(run(drafted.engine, PROMPTS, PARAMS)) == expected


# Out of step


def test_a_draft_that_is_stopped_does_not_stop_the_target(drafted: LLM, expected: list[list[int]]) -> None:
    link, pid = link_of(drafted), pid_of(drafted)
    n_late, n_deaths = link.n_late, link.n_deaths
    link.timeout = 0.2
    ids = [drafted.engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(4):
        drafted.engine.step()
    try:
        os.kill(pid, signal.SIGSTOP)
        while drafted.engine.has_work:
            drafted.engine.step()
    finally:
        os.kill(pid, signal.SIGCONT)
        link.timeout = 60.0
    assert tokens([drafted.engine.result(name) for name in ids]) == expected
    assert link.n_late > n_late
    assert tokens(run(drafted.engine, PROMPTS, PARAMS)) == expected
    come_back(drafted)
    assert (pid_of(drafted), link.n_deaths) == (pid, n_deaths), "it was late, and not lost"


def test_a_draft_that_is_killed_again_and_again(drafted: LLM, expected: list[list[int]]) -> None:
    """At any moment: in a round, between two, while it loads."""
    link, chance = link_of(drafted), random.Random(3)
    n_kills, n_deaths = 0, link.n_deaths
    for attempt in range(3):
        if attempt != 1:  # the second is killed as soon as there is one, while it loads
            come_back(drafted)
        moment = chance.randrange(1, 12)
        ids = [drafted.engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        step = 0
        while drafted.engine.has_work:
            if step >= moment and n_kills == attempt and link.pid is not None and is_running(link.pid):
                os.kill(link.pid, signal.SIGKILL)
                n_kills += 1
            drafted.engine.step()
            drafted.engine.pool.check(drafted.engine.scheduler.tables())
            step += 1
        assert tokens([drafted.engine.result(name) for name in ids]) == expected
        while n_kills == attempt:  # it was not there to be killed
            drafted.generate("an", sample(max_tokens=2))
            if link.pid is not None and is_running(link.pid):
                os.kill(link.pid, signal.SIGKILL)
                n_kills += 1
    come_back(drafted)
    assert link.n_deaths - n_deaths == n_kills == 3
    assert tokens(run(drafted.engine, PROMPTS, PARAMS)) == expected


# Not at all


def test_a_draft_that_cannot_be_loaded_says_why_at_once(plain: LLM, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path, "llama", vocab_size=200)
    with pytest.raises(DraftError) as e:
        plain.sibling(**{**SETTINGS, "draft": str(draft)})
    text = str(e.value)
    assert text.startswith(f"the draft {str(draft)!r} could not be started: ")
    assert "knows 200 tokens, the target" in text
    assert "says 264; a draft must have the target's vocabulary" in text


def test_texts_and_biases_that_name_padding_do_not_end_the_draft(plain: LLM) -> None:
    """Ids that pad the head can be written in a prompt, though nobody ever says them."""
    with plain.sibling(**SETTINGS) as llm:
        link = llm.engine.round.draft
        assert isinstance(link, Apart)
        for prompt, params in (([104, 270, 105], sample()), ([104, 105], sample(logit_bias={287: 1.0}))):
            assert llm.generate([prompt], params)[0].token_ids == plain.generate([prompt], params)[0].token_ids
        assert (link.n_deaths, link.n_late) == (0, 0), link.failure
