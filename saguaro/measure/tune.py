"""Measures each placement of the draft at several batch sizes, in turn.

At each batch size every engine first learns for half of the time, and is measured in the other half. While it learns,
it asks its draft in every round.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from saguaro import rng
from saguaro.config import SamplingParams
from saguaro.engine.placement import Placement
from saguaro.llm import LLM
from saguaro.measure.candidate import Candidate
from saguaro.measure.interleaved import Generate, generate_by, rotated
from saguaro.measure.metrics import Summary
from saguaro.types import Progress

RARE = 0.1  # share of rounds below which something is not what an engine does


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run."""

    batches: Sequence[int]
    seconds: float  # per batch size and placement
    prompts: Sequence[list[int]]  # used again from the first on
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One placement at one batch size."""

    placement: Placement
    batch: int
    tok_s: float
    tokens_per_round: float | None = None
    acceptance: float | None = None
    prepared: float = 0.0  # share of rounds
    sources: Mapping[str, float] | None = None  # of speculations, shares of row-rounds

    def __str__(self) -> str:
        """
        >>> print(Measured(placement=Placement(), batch=2, tok_s=99.6, sources={"draft": 0.9}, tokens_per_round=2.25))
        batch 2: drafts just in time, 2.25 tokens per round, 100 tok/s
        """
        rounds = f", {self.tokens_per_round:.2f} tokens per round" if self.tokens_per_round is not None else ""
        return f"batch {self.batch}: {self.habit}{rounds}, {self.tok_s:.0f} tok/s"

    @property
    def habit(self) -> str:
        """What the engine did in most rounds."""
        shares = self.sources or {}
        if shares.get("draft", 0.0) + shares.get("cache", 0.0) < RARE:
            repeats = shares.get("ngram", 0.0) + shares.get("suffix", 0.0)
            return "repeats from the text" if repeats >= RARE else "drafts nothing"
        return "prepares" if self.prepared >= 0.5 else "drafts just in time"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "habit": self.habit}


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4 ... up to the largest.

    >>> batch_sizes(6), batch_sizes(1)
    ([1, 2, 4, 6], [1])
    """
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]


def measure_placements(engines: Mapping[Placement, LLM], plan: Plan, progress: Progress) -> list[Measured]:
    """Run every placement at every batch size."""
    runs = {str(place): generate_by(llm) for place, llm in engines.items()}
    found = []
    for batch in plan.batches:
        group = _Group(plan, batch, runs, progress)
        with _asking(engines.values()):
            group.run([Candidate(str(place), llm, True) for place, llm in engines.items()])
        each = {place: Candidate(str(place), llm, True) for place, llm in engines.items()}
        for one in each.values():
            one.watch()
        group.run(list(each.values()))
        for place, one in each.items():
            one.unwatch()
            found.append(measured(place, batch, one))
        progress(group.stage, 1000, 1000)
    return found


@contextmanager
def _asking(engines: Collection[LLM]) -> Iterator[None]:
    """In this context every round asks the draft, whether that pays or not: what it takes is to be learnt."""
    for llm in engines:
        llm.engine.round.asks.is_forced = True
    try:
        yield
    finally:
        for llm in engines:
            llm.engine.round.asks.is_forced = False


def measured(place: Placement, batch: int, one: Candidate) -> Measured:
    """The figures of a candidate."""
    summary = one.summary or Summary()
    n = max(1, summary.n_row_rounds)
    return Measured(
        placement=place,
        batch=batch,
        tok_s=one.tok_s,
        tokens_per_round=summary.tokens_per_round,
        acceptance=summary.acceptance,
        prepared=summary.prepared.value or 0.0,
        sources={name: times / n for name, times in summary.by_source.items() if times},
    )


class _Group:
    """One batch size: turns are taken until each candidate has had its time."""

    def __init__(self, plan: Plan, batch: int, runs: Mapping[str, Generate], progress: Progress) -> None:
        self._plan, self._batch, self._runs, self._progress = plan, batch, runs, progress
        self.stage = f"batch of {batch}"
        self._turns, self._done_s = count(), 0.0

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Half of the time for each, and at least one turn."""
        half_s = self._plan.seconds / 2
        while not all(one.runs and one.seconds >= half_s for one in candidates):
            turn = next(self._turns)
            prompts, params = self._prompts(turn)
            for one in rotated(candidates, turn):
                one.run(self._runs[one.name], prompts, params)
                self._tell(one.runs[-1].seconds, len(candidates))

    def _prompts(self, turn: int) -> tuple[list[list[int]], list[SamplingParams]]:
        plan, first = self._plan, turn * self._batch
        chosen = [plan.prompts[(first + index) % len(plan.prompts)] for index in range(self._batch)]
        seeds = (rng.derive_seed(plan.params.seed or 0, first + index) for index in range(self._batch))
        return chosen, [replace(plan.params, seed=seed) for seed in seeds]

    def _tell(self, seconds: float, n: int) -> None:
        self._done_s += seconds
        self._progress(self.stage, min(999, round(1000 * self._done_s / (n * self._plan.seconds))), 1000)
