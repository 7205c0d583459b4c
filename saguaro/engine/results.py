"""The results of a request. The names are those of vLLM: result.outputs[0].text."""

from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.errors import RequestError
from saguaro.target.request import Request
from saguaro.types import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """The part of one output that a round added. Only the last delta of an output has a finish reason."""

    request_id: str
    index: int  # which of the n outputs
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended the output, or the error message
    n_accepted: int = 0  # how many of the first tokens were speculated and accepted
    source: str = "empty"  # origin of the speculation (saguaro.types.SOURCES)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # in an output's first delta, if requested


@dataclass(frozen=True)
class Timings:
    """The timings of one output."""

    ttft_ms: float  # from arrival to the first token
    total_ms: float  # from arrival to the last token
    decode_tok_s: float  # tokens after the first, per second
    n_cached: int  # prompt tokens found in the prefix cache


@dataclass(frozen=True)
class Completion:
    """One finished output."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int  # the same seed, prompt and parameters give the same output
    logprobs: list[TokenLogprobs] | None
    timings: Timings
    n_rounds: int  # rounds that gave it tokens; fewer than tokens if speculation helped


@dataclass(frozen=True)
class Result:
    """A prompt and its outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one entry per token, None for the first; if requested

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
    """Raise if an output ended with an error."""
    failure = failure_of(ended)
    if failure is not None:
        raise RequestError(failure)
