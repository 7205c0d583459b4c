"""What a caller gets back. The names are those of vLLM: result.outputs[0].text."""

from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.errors import RequestError
from saguaro.target.request import Request
from saguaro.types import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """What one round added to one output. The last delta of an output, and only that, has a finish reason."""

    request_id: str
    index: int  # which of the n outputs
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it, or why it ended with "error"
    n_accepted: int = 0  # of these tokens, counted from the first, speculated and accepted
    source: str = "empty"  # where the speculation came from (saguaro.types.SOURCES)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # with an output's first delta, where they are wanted


@dataclass(frozen=True)
class Timings:
    """Where the time of one output went."""

    ttft_ms: float  # from arrival to the first token
    total_ms: float  # from arrival to the last
    decode_tok_s: float  # tokens after the first, per second after the first
    n_cached: int  # prompt tokens whose keys and values were there already


@dataclass(frozen=True)
class Completion:
    """One finished output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int  # the same seed, prompt and parameters give the same output again
    logprobs: list[TokenLogprobs] | None
    timings: Timings
    n_rounds: int  # rounds that gave it tokens: as many as tokens, less what speculation saved


@dataclass(frozen=True)
class Result:
    """A prompt and its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # a token each, None for the first; where they are wanted

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids


def timings_of(request: Request) -> Timings:
    """The timings of a finished request."""
    assert request.finished_at is not None
    first = request.first_token_at or request.finished_at
    decode_s = request.finished_at - first
    return Timings(
        ttft_ms=(first - request.arrived) * 1e3,
        total_ms=(request.finished_at - request.arrived) * 1e3,
        decode_tok_s=(request.n_output - 1) / decode_s if decode_s > 0 and request.n_output > 1 else 0.0,
        n_cached=request.n_cached,
    )


def failure_of(ended: Delta | Completion) -> str | None:
    """Why an output ended with an error; None if it did not."""
    if ended.finish_reason != "error":
        return None
    return ended.stop_reason if isinstance(ended.stop_reason, str) else "the engine could not go on with this request"


def raise_failure(ended: Delta | Completion) -> None:
    """Raise if an output ended with an error, where that is the end of everything."""
    failure = failure_of(ended)
    if failure is not None:
        raise RequestError(failure)
