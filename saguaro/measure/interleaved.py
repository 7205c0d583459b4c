"""Runs engines in turn on the same prompts and noise, so that other load on the machine affects all of them alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from saguaro import rng
from saguaro.config import SamplingParams
from saguaro.engine.results import raise_failure
from saguaro.llm import LLM
from saguaro.measure.candidate import Candidate
from saguaro.types import Progress

Generate = Callable[[Sequence[list[int]], Sequence[SamplingParams]], list[list[int]]]


def generate_by(llm: LLM) -> Generate:
    """A function that generates with this engine and returns the output tokens."""

    def generate(prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        results = llm.generate(prompts, params)
        for result in results:
            raise_failure(result.outputs[0])
        return [result.token_ids for result in results]

    return generate


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of each prompt, each with a seed derived from the common one."""
    seed = params.seed if params.seed is not None else rng.fresh_seed()
    return [replace(params, seed=rng.derive_seed(seed, index)) for index in range(n)]


def rotated(entrants: Sequence[Candidate], n: int) -> list[Candidate]:
    """The order of the n-th turn: each starts with another entry.

    >>> [each.name for each in rotated([Candidate(name, None, True) for name in "xyz"], 4)]
    ['y', 'z', 'x']
    """
    first = n % len(entrants)
    return [*entrants[first:], *entrants[:first]]


def run_in_turn(
    entrants: Sequence[Candidate],
    runs: Mapping[str, Generate],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    batch: int,
    progress: Progress,
) -> None:
    """Run every group of prompts with every entry before the next group."""
    starts = range(0, len(prompts), batch)
    for n_done, at in enumerate(starts):
        progress("measuring", n_done, len(starts))
        for entrant in rotated(entrants, n_done):
            entrant.run(runs[entrant.name], prompts[at : at + batch], params[at : at + batch])
    progress("measuring", len(starts), len(starts))
