"""One request: its text, parameters and progress."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from saguaro.config import SamplingParams
from saguaro.kv.pages import PageTable
from saguaro.target.grammar import Grammar
from saguaro.types import FinishReason, TokenLogprobs


@dataclass(eq=False)
class Request:
    """A prompt being continued. `tokens` is the whole text; its first n_computed tokens have keys and values.

    tokens   |--------- prompt ---------|--- output ---|
             |--- n_computed ---|--- n_pending --------|
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None  # from params.structured, if it is enforced
    arrived: float = field(default_factory=time.perf_counter)
    number: int = -1  # order of arrival, set by the scheduler
    slot: int = -1  # while running
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of the prompt, if requested
    table: PageTable = field(default_factory=PageTable)
    n_computed: int = 0
    n_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    n_preempted: int = 0
    n_rounds: int = 0  # rounds in which it got tokens
    finish_reason: FinishReason | None = None
    failure: str | None = None  # error message, if the reason is "error"
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # the first token has no logprob

    @property
    def speculates(self) -> bool:
        """Whether tokens may be speculated."""
        return self.params.speculation and self.is_continued

    @property
    def is_continued(self) -> bool:
        """Whether tokens are generated. With max_tokens = 0 the prompt is only scored."""
        return self.params.max_tokens != 0

    @property
    def n_unscored(self) -> int:
        """Prompt tokens whose requested log-probabilities are not computed yet."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt) - len(self.prompt_logprobs)

    @property
    def reusable(self) -> list[int]:
        """The text that may be matched in the prefix cache, except for its last token.

        A prompt token is scored in the step that computes the token before it, so that one must not be cached.
        """
        return self.tokens[: len(self.prompt_logprobs)] if self.n_unscored else self.tokens

    @property
    def n_pending(self) -> int:
        """Known tokens that are not computed; exactly one while decoding."""
        return len(self.tokens) - self.n_computed

    @property
    def n_output(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the output."""
        own = frozenset(self.params.stop_token_ids)
        return own if self.params.ignore_eos and self.grammar is None else own | self.eos_ids

    @property
    def is_slow(self) -> bool:
        """Whether the grammar's masks take long."""
        return self.grammar is not None and self.grammar.is_slow

    @property
    def is_broken(self) -> bool:
        """Whether the output ended before the grammar was complete, because it reached a limit of the grammar."""
        ended = self.grammar is not None and self.n_output > 0 and self.tokens[-1] in self.eos_ids
        return ended and self.grammar is not None and not self.grammar.accepts(self.output[:-1])

    def finish(self, reason: FinishReason, failure: str | None = None) -> None:
        """End the request. A failure gives the reason for "error"."""
        self.finish_reason, self.failure = reason, failure
        self.finished_at = time.perf_counter()
