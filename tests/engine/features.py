"""Whole engines with drafts that read features of their target: what their tests share, and what every such draft must
do in a process of its own."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saguaro import LLM, SamplingParams
from saguaro.link.apart import Timeouts
from tests.engine import driver
from tests.engine.driver import link_of, resting, run, watch
from tests.link.target import is_running, until


def sample(max_tokens: int = 16, **params: Any) -> SamplingParams:
    """Short outputs."""
    return driver.sample(max_tokens, **params)


PROMPTS: list[str | list[int]] = ["the end of the other inner man", "in an other", [104, 105], "the end of the"]
PARAMS = [sample(), sample(temperature=0.0), sample(n=2, top_p=0.9), sample(speculation=False)]
SETTINGS: dict[str, Any] = {  # what missed is always drafted, whatever that takes
    "method": "ssd-uniform",
    "lookahead": 3,
    "budget": 4,
    "draft_timeout": 60.0,
    "fallback": "draft",
}


def new_plain(folder: Path) -> LLM:
    """Without a draft."""
    return LLM(folder, device="cpu", kv_memory="2MiB", threads=1, max_batch_tokens=32, page_size=4)


def tokens(llm: LLM) -> list[list[int]]:
    """The outputs of all prompts together."""
    return [output.token_ids for result in run(llm.engine, PROMPTS, PARAMS) for output in result.outputs]


@contextlib.contextmanager
def drafted_apart(plain: LLM, draft: str) -> Iterator[LLM]:
    """The draft is in a process of its own."""
    settings = {**SETTINGS, "method": "swiftspec", "budget": 8}
    with plain.sibling(**settings, draft=draft, link="process") as llm:
        link_of(llm).patience = Timeouts(pauses=(0.0,))
        yield llm


def check_over_the_link(apart: LLM, expected: list[list[int]]) -> None:
    """The tokens are those of ar, and rounds are saved."""
    link, summary = link_of(apart), watch(apart)
    with resting(apart):
        for _ in range(2):  # the second time the prompts are in both prefix caches
            assert tokens(apart) == expected
    assert (link.n_starts, link.n_deaths, link.n_late) == (1, 0, 0)
    assert summary.by_source["draft"] > 0
    assert summary.by_source["cache"] > 0


def check_killed(apart: LLM, expected: list[list[int]]) -> None:
    """Rows of a draft that is killed continue alone, and later ones are drafted for again."""
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
