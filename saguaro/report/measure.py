"""Measures a cell: entries side by side, or the draft's ranks of the target's tokens."""

from collections.abc import Callable, Sequence
from typing import Any

from saguaro.algo.calibrate import Recorded
from saguaro.config import SamplingParams
from saguaro.draft.grow import TreeDrafter
from saguaro.draft.planner import FanOut
from saguaro.link.inline import Inline
from saguaro.llm import LLM
from saguaro.measure.candidate import Candidate
from saguaro.measure.decoding import decoding_rate
from saguaro.measure.interleaved import generate_by, run_in_turn, seeded
from saguaro.measure.played import played, predict
from saguaro.report.cell import RANKS, SIDE_BY_SIDE, Cell
from saguaro.report.engines import Engines
from saguaro.types import RoundEvent

SEED = 1  # the seeds of all requests are derived from it
N_WARM = 16  # tokens that every entry decodes before it is measured
ROOM = 4  # prompts whose ranks are recorded together

Measure = Callable[[Cell, Sequence[str], Engines], dict[str, Any]]


def measure(cell: Cell, texts: Sequence[str], engines: Engines) -> dict[str, Any]:
    """What a cell says is measured, for JSON."""
    return MEASURES[cell.kind](cell, texts, engines)


def side_by_side(cell: Cell, texts: Sequence[str], engines: Engines) -> dict[str, Any]:
    """Every group of prompts is decoded by every entry before the next group."""
    llms = engines.get([entry.settings for entry in cell.entries])
    prompts = engines.pair.encode(texts)
    params = SamplingParams(temperature=cell.temperature, max_tokens=cell.max_tokens, seed=SEED)
    for llm in llms:
        generate_by(llm)(prompts[: cell.batch], [_short(params)] * len(prompts[: cell.batch]))
    entrants = [_candidate(entry.name, llm, params) for entry, llm in zip(cell.entries, llms, strict=True)]
    rounds: dict[str, list[RoundEvent]] = {one.name: [] for one in entrants}
    for one, llm in zip(entrants, llms, strict=True):
        one.watch()
        llm.engine.round.observers.append(rounds[one.name].append)
    try:
        runs = {one.name: generate_by(llm) for one, llm in zip(entrants, llms, strict=True)}
        run_in_turn(entrants, runs, prompts, seeded(params, len(prompts)), cell.batch, lambda *_: None)
    finally:
        for one, llm in zip(entrants, llms, strict=True):
            one.unwatch()
            llm.engine.round.observers.remove(rounds[one.name].append)
    first = next((one for one in entrants if one.is_comparable), None)
    return {"entries": [_measured(one, first, rounds[one.name], cell.batch) for one in entrants]}


def _short(params: SamplingParams) -> SamplingParams:
    n = min(N_WARM, params.max_tokens or N_WARM)
    return SamplingParams(temperature=params.temperature, max_tokens=n, seed=SEED)


def _candidate(name: str, llm: LLM, params: SamplingParams) -> Candidate:
    method = llm.engine.method
    return Candidate(name, llm, params.temperature == 0 or not method.drafts or method.verification == "shared")


def _measured(one: Candidate, first: Candidate | None, rounds: list[RoundEvent], batch: int) -> dict[str, Any]:
    """The figures of an entry. tok_s: decoding alone; whole_tok_s: with prefill."""
    assert one.summary is not None
    assert one.llm is not None
    is_compared = one.is_comparable and first is not None and one is not first
    each = played(rounds) if batch == 1 else []
    return {
        "name": one.name,
        "tok_s": decoding_rate(rounds, batch),
        "whole_tok_s": one.tok_s,
        "seconds": one.seconds,
        "tokens": one.n_tokens,
        "compared_with": first.name if first is not None and is_compared else None,
        "compared": one.n_tokens if is_compared else 0,
        "differ": n_different(one.outputs, first.outputs) if first is not None and is_compared else 0,
        "played": predict(each) if each else None,
        "summary": one.summary.as_dict(),
        "prepares": one.llm.engine.preparation.when if one.llm.engine.method.prepares else "never",
    }


def n_different(own: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Tokens that are not those of the other outputs, by place; missing and surplus ones count.

    >>> n_different([[1, 2, 3], [4]], [[1, 9, 3, 5], [4]])
    2
    """
    pairs = list(zip(own, others, strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    return sum(max(len(one), len(other)) for one, other in pairs) - same


def ranks(cell: Cell, texts: Sequence[str], engines: Engines) -> dict[str, Any]:
    """How often the target's bonus token had which rank among the draft's candidates, after k accepted tokens.

    The cell has one entry, of a method that learns its fan-out, with the draft in this process.
    """
    (entry,) = cell.entries
    llm = engines.pair.build(entry.settings, min(ROOM, len(texts)))
    try:
        params = SamplingParams(temperature=cell.temperature, max_tokens=cell.max_tokens, seed=SEED)
        prompts = engines.pair.encode(texts)
        generate_by(llm)(prompts, seeded(params, len(prompts)))
        link = llm.engine.round.draft
        assert isinstance(link, Inline)
        assert isinstance(link.side.drafter, TreeDrafter)
        planner = link.side.drafter.planner
        assert isinstance(planner, FanOut)
        K, N = llm.engine.config.lookahead, llm.engine.config.budget
        kinds = {"primary": planner.recorded(True, K, N), "backup": planner.recorded(False, K, N)}
    finally:
        llm.close()
    return {"K": K, "N": N, **{name: _table(found) for name, found in kinds.items()}}


def _table(found: Recorded | None) -> list[list[int]] | None:
    """Rounds by k and rank: the last column counts bonus tokens that were no candidates."""
    if found is None:
        return None
    table = [[0] * (found.N + 1) for _ in range(found.K + 1)]
    for k, rank in zip(found.k.tolist(), found.rank.tolist(), strict=True):
        table[k][rank] += 1  # rank -1: the last
    return table


MEASURES: dict[str, Measure] = {SIDE_BY_SIDE: side_by_side, RANKS: ranks}
