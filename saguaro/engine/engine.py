"""The engine: accepts requests and returns deltas, one step at a time.

It connects the parts: a loaded model, KV memory, scheduler, verifier, link. Every request that `add` accepts gets
exactly one delta with a finish reason.
"""

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from saguaro import rng
from saguaro.config import EngineConfig, SamplingParams
from saguaro.engine.advice import check_machine
from saguaro.engine.assembly import Assembly, choose_method, find_device
from saguaro.engine.results import Completion, Delta, Result, timings_of
from saguaro.errors import ConfigError, UnknownRequest
from saguaro.kernels.formats import computed_in, find_format, packed_kind, ready
from saguaro.model.chat_template import read_template
from saguaro.model.load import Loaded, load
from saguaro.model.tokenizer import TextStream, Tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.parallel.ranks import Ranks
from saguaro.round import Verifies
from saguaro.target.request import Request
from saguaro.target.scheduler import Commit
from saguaro.types import FinishReason, Progress, TokenLogprobs

TOO_COMPLEX = "the grammar became too complex or too ambiguous for this text; simplify it"
CONTEXT = 4  # prompt tokens that may affect the text of the first output token


@dataclass
class _Output:
    """One of a request's n outputs, in progress."""

    request: Request
    index: int
    stream: TextStream
    stop_reason: str | int | None = None


@dataclass
class _Job:
    """A prompt and its n outputs."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[_Output]


class Engine:
    """A model that serves requests."""

    def __init__(
        self,
        loaded: Loaded,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        draft: Transformer | None = None,  # a draft in this process, instead of the configured one
        verifier: Verifies | None = None,  # instead of the target's own, which then needs no weights
        ranks: Ranks | None = None,  # that hold the other parts of the target; None: it is whole
        progress: Progress = lambda *_: None,
    ) -> None:
        parts = Assembly(loaded, tokenizer, config, draft, verifier, ranks).build(progress)
        self.loaded, self.tokenizer, self.config = loaded, tokenizer, config
        self.method, self.kv, self.n_known = parts.method, parts.kv, parts.n_known
        self.pool, self.scheduler, self.round = parts.pool, parts.scheduler, parts.round
        self.preparation = parts.preparation  # whether outcomes are prepared, and why
        self.placed = parts.placed  # where the draft runs, and why
        self.learnt, self.tuned = parts.learnt, parts.tuned  # files of what is learnt, and of what was tuned
        self.ranks, self._lead = ranks, parts.lead
        self.memory = parts.memory  # bytes of each part
        self.startup = parts.seconds  # seconds to build each part
        self.eos_ids, self.grammars = parts.eos_ids, parts.grammars
        self._jobs: dict[str, _Job] = {}
        self._by_request: dict[Request, tuple[_Job, _Output]] = {}
        self._ready: list[Delta] = []  # deltas not taken yet
        self._n_added = 0

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_work or bool(self._ready)

    def explain(self, is_any_prepared: bool) -> str | None:
        """Why the draft is not asked, or why nothing was prepared; None if it is, and something was."""
        return self.round.asks.why_not or self.preparation.explain(is_any_prepared)

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt (text or token ids) and return its id. Raises if it can never be served."""
        params = params or SamplingParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else as_tokens(prompt)
        tokens = self.truncate(tokens, params)
        self.check(tokens, params)
        request_id = request_id if request_id is not None else f"request-{self._n_added}"
        if request_id in self._jobs:
            raise ConfigError(f"request id {request_id!r} is in use; choose another")
        seed = params.seed if params.seed is not None else rng.fresh_seed()
        job = _Job(request_id, prompt if isinstance(prompt, str) else None, tokens, [])
        for index in range(params.n):
            request = Request(
                id=f"{request_id}/{index}",
                prompt=tokens,
                params=params,
                seed=rng.derive_seed(seed, index),
                eos_ids=self.eos_ids,
                grammar=self.grammars.start(params.structured) if params.structured is not None else None,
            )
            self.scheduler.add(request)  # accepts all outputs of a prompt or none: they have equal sizes
            stream = TextStream(
                self.tokenizer,
                params.stop,
                tokens[-CONTEXT:],
                special=not params.skip_special_tokens,
                keeps_stop=params.include_stop_str_in_output,
            )
            output = _Output(request, index, stream)
            job.outputs.append(output)
            self._by_request[request] = (job, output)
        self._jobs[request_id] = job
        self._n_added += 1
        return request_id

    def truncate(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """Apply truncate_prompt_tokens to a prompt."""
        n = params.truncate_prompt_tokens
        if n == -1:
            n = max(1, self.kv.longest - (1 if params.max_tokens is None else params.max_tokens))
        return tokens if n is None else tokens[-n:]

    def check(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Raise if this prompt can never be served with these parameters."""
        n_vocab = self.loaded.model.spec.n_vocab
        named = [
            ("prompt", tokens),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ]
        for name, ids in named:
            for token in ids:
                if not 0 <= token < n_vocab:
                    raise ConfigError(f"{name} names token {token!r}; ids go from 0 to {n_vocab - 1}")
        for token in params.allowed_token_ids:
            if not 0 <= token < self.n_known:
                raise ConfigError(f"allowed_token_ids names token {token!r}; the model says 0 to {self.n_known - 1}")
        self.scheduler.check(len(tokens), params.max_tokens)
        self.check_structured(params)

    def check_structured(self, params: SamplingParams) -> None:
        """Raise if the constraint cannot be compiled. The result is cached, so add() does not wait for it. May be
        called from a thread that does not run rounds."""
        if params.structured is not None:
            self.grammars.compile(params.structured)

    def step(self) -> list[Delta]:
        """Run one round and return its deltas. If it fails, every running request ends with "error" and this raises."""
        try:
            commits = self.round.play()
        except Exception:
            for request in list(self.scheduler.running):
                self._fail(request)
            raise
        broken: BaseException | None = None
        for commit in commits:
            try:
                self._ready.append(self._delta(commit))
            except BaseException as e:  # other tokens are committed, so their deltas must still be made
                self._fail(commit.request)
                broken = e
        if broken is not None:
            raise broken
        return self.take()

    def take(self) -> list[Delta]:
        """Take the deltas that are ready. After a failed step: those made before the failure."""
        deltas, self._ready = self._ready, []
        return deltas

    def abort(self, request_id: str) -> None:
        """End all outputs of a request. Their last deltas are returned by the next step."""
        job = self._jobs.get(request_id)
        if job is None:
            raise UnknownRequest(f"request {request_id!r} is not running; it may have finished")
        for output in job.outputs:
            if output.request.finish_reason is None:
                self.scheduler.abort(output.request)
                self._ready.append(self._last_delta(job, output, "", []))

    def discard(self, request_id: str) -> None:
        """End a request and drop its deltas and result. Unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        for output in job.outputs if job else []:
            self.scheduler.abort(output.request)
            del self._by_request[output.request]
        if job:
            self._ready = [delta for delta in self._ready if delta.request_id != request_id]

    def result(self, request_id: str) -> Result:
        """Take the result of a request whose outputs have all finished."""
        job = self._jobs.get(request_id)
        if job is None:
            raise UnknownRequest(f"request {request_id!r} is not known; its result was taken, or it never was")
        if any(output.request.finish_reason is None for output in job.outputs):
            raise UnknownRequest(f"request {request_id!r} has not finished; step until it has")
        outputs, scored = [_completion(output) for output in job.outputs], _prompt_logprobs(job.outputs[0].request)
        result = Result(job.id, job.prompt, job.prompt_token_ids, outputs, scored)
        self.discard(request_id)
        return result

    def check_ranks(self) -> None:
        """Raise if a rank of the target has ended."""
        if self.ranks is not None:
            self.ranks.check()

    def close(self) -> None:
        """Close the link to the draft. After the last engine on a divided target, its other ranks end."""
        self.round.draft.close()
        if self._lead is not None:
            self._lead.close()

    def _delta(self, commit: Commit) -> Delta:
        request = commit.request
        job, output = self._by_request[request]
        tokens, logprobs = list(commit.tokens), list(commit.logprobs)
        scored = _prompt_logprobs(request) if request.n_output == len(tokens) else None
        text = [token for token in tokens if token not in request.stop_ids]  # the last token may have no text
        if len(text) < len(tokens):
            output.stop_reason = tokens[-1]
            if request.params.include_stop_str_in_output:
                text = tokens
        if request.failure is not None:
            output.stop_reason = request.failure
        elif request.is_broken:
            request.finish_reason, output.stop_reason = "error", TOO_COMPLEX
        if not request.params.stop:
            pieces = [output.stream.push(*text)] if text else []
        else:
            pieces = []
            for count, token in enumerate(text, 1):
                n_output = request.n_output - len(tokens) + count
                pieces.append(output.stream.push(token, may_stop=n_output >= request.params.min_tokens))
                if output.stream.stopped_by is not None:
                    self._stop_at(output, len(tokens) - count)
                    tokens, logprobs = tokens[:count], logprobs[:count]
                    break
        new = "".join(pieces)
        if request.finish_reason is not None:
            delta = self._last_delta(job, output, new, tokens, logprobs)
        else:
            delta = Delta(job.id, output.index, new, tokens, logprobs)
        n_accepted = min(commit.k, len(tokens))
        return replace(delta, n_accepted=n_accepted, source=commit.source, prompt_logprobs=scored)

    def _fail(self, request: Request) -> None:
        """End a request with "error"."""
        job, output = self._by_request[request]
        self.scheduler.abort(request, "error")
        request.finish_reason = "error"
        self._ready.append(Delta(job.id, output.index, "", [], [], "error"))

    def _stop_at(self, output: _Output, n_beyond: int) -> None:
        """Cut the output at a stop string, n_beyond tokens before its end."""
        request = output.request
        if n_beyond:
            del request.tokens[-n_beyond:]
            del request.logprobs[request.n_output :]
        if request.finish_reason is None:
            self.scheduler.abort(request, "stop")
        request.finish_reason = "stop"
        output.stop_reason = output.stream.stopped_by

    def _last_delta(
        self, job: _Job, output: _Output, text: str, tokens: list[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Delta:
        text += output.stream.finish()
        if output.stream.stopped_by is not None and output.stop_reason is None:
            output.request.finish_reason = "stop"
            output.stop_reason = output.stream.stopped_by
        reason: FinishReason | None = output.request.finish_reason
        return Delta(job.id, output.index, text, tokens, list(logprobs), reason, output.stop_reason)


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    return None if request.params.prompt_logprobs is None else request.prompt_logprobs


def _completion(output: _Output) -> Completion:
    request = output.request
    assert request.finish_reason is not None
    return Completion(
        index=output.index,
        text=output.stream.text,
        token_ids=request.output,
        finish_reason=request.finish_reason,
        stop_reason=output.stop_reason,
        seed=request.seed,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        timings=timings_of(request),
        n_rounds=request.n_rounds,
    )


def as_tokens(prompt: Sequence[int]) -> list[int]:
    """Token ids of any integer type as a list of int.

    >>> as_tokens((3, 4))
    [3, 4]
    """
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as e:
        raise ConfigError(f"the prompt is {prompt!r}; it must be text or a list of token ids ({e})") from e


def build_engine(
    name: str,
    path: Path,
    config: EngineConfig,
    tokenizer: Path | None = None,
    progress: Progress = lambda *_: None,
    chat_template: str | None = None,
) -> Engine:
    """Load a model from a folder or .gguf file and build an engine around it."""
    choose_method(config)
    template = None if chat_template is None else read_template(chat_template)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = find_device("device", config.device)
    if config.draft_device != "auto":
        find_device("draft_device", config.draft_device)  # refused before anything is loaded
    began = time.perf_counter()
    check_machine(device, progress)
    dtype = find_format(config.dtype, device)
    ranks = None
    if config.tensor_parallel_size == 1:
        loaded = load(name, path, device, computed_in(dtype), packed_kind(dtype, device), progress)
        ready(loaded.model, dtype, progress)
    else:
        progress("starting ranks", 0, 1)
        ranks = Ranks(config.tensor_parallel_size, device)
        progress("starting ranks", 1, 1)
        loaded = ranks.load(name, path, dtype, progress)
    filled = time.perf_counter()
    words = load_tokenizer(tokenizer or path, loaded.model.spec.n_vocab, template)
    read = time.perf_counter()
    engine = Engine(loaded, words, config, ranks=ranks, progress=progress)
    engine.startup = {"weights": filled - began, "tokenizer": read - filled, **engine.startup}
    return engine
