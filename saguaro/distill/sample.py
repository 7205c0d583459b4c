"""Sample the target: write its continuations of prompts into a corpus.

Prompt, temperature and seed of text i are functions of i. Texts are sampled shard by shard, and only the texts of one
shard run together, so an interrupted and resumed run gives the same texts as an uninterrupted one.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, cast

from saguaro import rng
from saguaro.config import SamplingParams
from saguaro.distill.corpus import Corpus, Text
from saguaro.errors import CapacityError, ConfigError, CorpusError, EmptyPrompt, PromptTooLong
from saguaro.model.tokenizer import Tokenizer
from saguaro.types import Progress

STAGE = "sampling the target"


class Said(Protocol):
    """The part of saguaro.engine.results.Result that this module uses."""

    @property
    def token_ids(self) -> list[int]:
        """The continuation."""


class Serving(Protocol):
    """The part of saguaro.engine.engine.Engine that this module uses."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    def check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Raise if the prompt cannot be served."""


class Target(Protocol):
    """The part of saguaro.LLM that this module uses."""

    @property
    def engine(self) -> Serving:
        """The engine."""

    def as_finished(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Iterator[tuple[int, Said]]:
        """Run prompts together; yield (index, result) of each as soon as it finishes."""


@dataclass(frozen=True)
class Sampled:
    """Statistics of a sampling run."""

    n_texts: int
    n_tokens: int  # of the continuations
    n_skipped: int  # prompts that were empty or left no room for max_tokens
    seconds: float

    @property
    def tok_s(self) -> float:
        """Continuation tokens per second."""
        return self.n_tokens / self.seconds if self.n_texts else 0.0


def sample(
    llm: Target,
    prompts: Sequence[str],
    corpus: Corpus,
    *,
    n_texts: int,
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int = 0,
    chat: bool = True,
    n_shard: int = 64,  # texts sampled and written together; several times the engine's rows, to keep these busy
    progress: Progress = lambda *_: None,
) -> Sampled:
    """Add texts until the corpus has n_texts; progress counts them. Prompts that do not fit are skipped."""
    if not temperatures:
        raise ConfigError("temperatures is empty; give at least one, 0 for greedy")
    kinds = [SamplingParams(max_tokens=max_tokens, temperature=value, seed=seed) for value in temperatures]
    if n_texts < 1:
        raise ConfigError(f"n_texts is {n_texts}; it must be at least 1")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or more, so that a run can be continued with the same texts")
    tokens, n_skipped = encode(llm.engine, prompts, kinds[0], n_texts, chat)
    plan = Plan(tokens, max_tokens, tuple(temperatures), seed)
    n_before, n_tokens_before, began = len(corpus), corpus.n_tokens, time.perf_counter()
    extend(llm, plan, corpus, n_texts, n_shard, lambda done, total: progress(STAGE, done, total))
    seconds = time.perf_counter() - began
    return Sampled(len(corpus) - n_before, corpus.n_tokens - n_tokens_before, n_skipped, seconds)


def extend(
    llm: Target, plan: "Plan", corpus: Corpus, n_texts: int, n_shard: int, progress: Callable[[int, int], None]
) -> None:
    """Add the plan's next texts until the corpus has n_texts."""
    if n_shard < 1:
        raise ConfigError(f"n_shard is {n_shard}; it must be at least 1")
    _check_origin(corpus, plan, n_texts)
    progress(min(len(corpus), n_texts), n_texts)
    while len(corpus) < n_texts:
        first = len(corpus)
        last = min(n_texts, (first // n_shard + 1) * n_shard)  # where an uninterrupted run would end a shard
        corpus.append(_continue(llm, plan, range(first, last), lambda done: progress(done, n_texts)))


@dataclass(frozen=True)
class Plan:
    """Prompt and parameters of text i.

    >>> plan = Plan([[5], [6]], max_tokens=8, temperatures=(0.0, 1.0), seed=3)
    >>> [plan.prompt(i)[0] for i in range(6)], [plan.temperature(i) for i in range(6)]
    ([5, 6, 5, 6, 5, 6], [0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    """

    prompts: Sequence[list[int]]
    max_tokens: int
    temperatures: tuple[float, ...]
    seed: int

    def prompt(self, i: int) -> list[int]:
        """Prompts are cycled."""
        return self.prompts[i % len(self.prompts)]

    def temperature(self, i: int) -> float:
        """Temperatures are cycled, with another start in each pass over the prompts; a prompt is greedy only once."""
        cycle, index = divmod(i, len(self.prompts))
        choice = self.temperatures
        if cycle >= len(choice):
            choice = tuple(value for value in choice if value > 0) or choice
        return choice[(index + cycle) % len(choice)]

    def params(self, i: int) -> SamplingParams:
        """The sampling parameters of text i."""
        own = rng.derive_seed(self.seed, i)
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature(i), seed=own)


def encode(
    engine: Serving, prompts: Sequence[str], params: SamplingParams, n: int, chat: bool
) -> tuple[list[list[int]], int]:
    """The tokens of the first n prompts that can be served, and the number of skipped ones before them."""
    tokenizer = engine.tokenizer
    found: list[list[int]] = []
    n_skipped, why = 0, "there are none"
    for prompt in prompts:
        tokens = tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        try:
            engine.check(tokens, params)
        except (EmptyPrompt, PromptTooLong, CapacityError) as e:
            n_skipped, why = n_skipped + 1, str(e)
            continue
        found.append(tokens)
        if len(found) == n:
            break
    if not found:
        raise ConfigError(f"none of {len(prompts)} prompts can be continued by max_tokens, {params.max_tokens}: {why}")
    return found, n_skipped


def _check_origin(corpus: Corpus, plan: Plan, n_texts: int) -> None:
    """Check that existing texts come from these prompts."""
    for i, text in enumerate(corpus):
        if i < n_texts and text.prompt != plan.prompt(i):
            raise CorpusError(
                f"text {i} in {corpus.folder} is of another prompt than the one given; give the prompts, the order "
                "and the chat template it was begun with, or another folder"
            )


def _continue(llm: Target, plan: Plan, indices: range, done: Callable[[int], None]) -> list[Text]:
    """Sample the texts of these indices together."""
    prompts = [plan.prompt(i) for i in indices]
    running = llm.as_finished(prompts, [plan.params(i) for i in indices])
    outputs: dict[int, list[int]] = {}
    # Closed even if `done` raises: the rest of a shard must not run together with the next.
    with closing(cast(Generator[tuple[int, Said], None, None], running)):
        for place, result in running:
            outputs[place] = result.token_ids
            done(indices.start + len(outputs))
    return [Text([*prompt, *outputs[place]], len(prompt)) for place, prompt in enumerate(prompts)]
