"""Run an engine to the end and look at its books on the way."""

from collections.abc import Sequence

from saguaro import EngineConfig, SamplingParams
from saguaro.engine.engine import Engine
from saguaro.engine.results import Delta, Result


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
