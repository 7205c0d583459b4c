"""Run an engine to the end and look at its books on the way."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from saguaro import LLM, EngineConfig, SamplingParams
from saguaro.engine.engine import Engine
from saguaro.engine.results import Delta, Result
from saguaro.link.apart import Apart
from saguaro.measure.metrics import Summary
from saguaro.runner.captured import Followed
from saguaro.target.scheduler import Batch
from saguaro.types import Speculation
from tests.link.target import rest


def sibling(engine: Engine, **settings: object) -> Engine:
    """Another engine on the same weights."""
    return Engine(engine.loaded, engine.tokenizer, EngineConfig(**settings))  # type: ignore[arg-type]


def run(
    engine: Engine, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Result]:
    """All prompts together; the page pool is checked after every step, and every output ends exactly once."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
        engine.pool.check(engine.scheduler.tables())
    ended = [(delta.request_id, delta.index) for delta in deltas if delta.finish_reason is not None]
    assert sorted(ended) == sorted((name, index) for name, own in zip(ids, each, strict=True) for index in range(own.n))
    results = [engine.result(name) for name in ids]
    for result in results:
        for output in result.outputs:
            mine = [d for d in deltas if (d.request_id, d.index) == (result.request_id, output.index)]
            assert "".join(delta.text for delta in mine) == output.text
            assert [token for delta in mine for token in delta.token_ids] == output.token_ids
    return results


def deciders(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[SamplingParams], bool]]:
    """Of each batch in which no prompt is read, the parameters, and whether the captured step decided."""
    verifier, found = llm.engine.round.verifier, list[tuple[list[SamplingParams], bool]]()
    launch = verifier.launch

    def spied(batch: Batch, spec: Speculation) -> Any:
        pending: Any = launch(batch, spec)
        if all(row.samples and row.n_tokens == 1 for row in batch.rows):
            found.append(([row.request.params for row in batch.rows], isinstance(pending.decided, Followed)))
        return pending

    monkeypatch.setattr(verifier, "launch", spied)
    return found


def sample(max_tokens: int = 24, **params: Any) -> SamplingParams:
    """So many tokens, drawn with a seed; others replace any of it."""
    return SamplingParams(**{"temperature": 1.0, "seed": 7, "max_tokens": max_tokens, "ignore_eos": True, **params})


def link_of(llm: LLM) -> Apart:
    """The link to a draft elsewhere."""
    link = llm.engine.round.draft
    assert isinstance(link, Apart)
    return link


def watch(llm: LLM) -> Summary:
    """What happens from now on."""
    summary = Summary()
    llm.engine.round.observers.append(summary.add)
    return summary


@contextlib.contextmanager
def resting(llm: LLM) -> Iterator[None]:
    """The draft prepares all it can in every round, however busy this machine is."""
    observers, link = llm.engine.round.observers, link_of(llm)

    def wait(_: object) -> None:
        rest(link)

    observers.append(wait)
    yield
    observers.remove(wait)
