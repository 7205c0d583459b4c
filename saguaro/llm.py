"""The Python API.

from saguaro import LLM, SamplingParams

llm = LLM()                                   # the default model, downloaded once
for result in llm.generate(["The saguaro is"], SamplingParams(temperature=0.7)):
    print(result.outputs[0].text)
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from saguaro.config import EngineConfig, SamplingParams, build
from saguaro.engine.engine import Engine, build_engine
from saguaro.engine.results import Delta, Result
from saguaro.errors import ConfigError, RequestError, SaguaroError
from saguaro.model import default
from saguaro.model.chat_template import Message
from saguaro.model.generation import generation_defaults
from saguaro.model.load import locate
from saguaro.types import Progress

Prompt = str | Sequence[int]  # text, or token ids


class LLM:
    """A model that generates text. Keywords are the fields of EngineConfig."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        generation_config: str = "auto",
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        """Load a model: a folder, a .gguf file, a Hub id, or None for SmolLM2-135M-Instruct and its draft.

        chat_template, jinja2 text or a file name, replaces the model's. generation_config is the source of
        get_default_sampling_params: auto, the model's generation_config.json; vllm, none; or a folder with such a file.
        """
        config = build(EngineConfig, **settings)
        config = replace(
            config, draft=default.draft_for(model, config.draft), learnt_dir=learnt_folder(config, cache_dir)
        )
        name = str(model) if model is not None else default.NAME
        if model is None:
            path = default.fetch_default(Path(cache_dir or default_cache()), progress or (lambda *_: None))
        else:
            path = locate(name, revision)
        words = locate(str(tokenizer), tokenizer_only=True) if tokenizer else None
        self._defaults = generation_defaults(generation_config, path)
        self._serve(build_engine(name, path, config, words, progress or (lambda *_: None), chat_template))

    def sibling(self, **settings: Any) -> "LLM":
        """Another LLM with the same weights and tokenizer, changed settings and its own KV memory."""
        for fixed in ("device", "dtype", "threads", "tensor_parallel_size"):
            if settings.get(fixed, getattr(self.engine.config, fixed)) != getattr(self.engine.config, fixed):
                raise ConfigError(f"{fixed} is {settings[fixed]!r}; a sibling shares its weights: make a new LLM")
        config = build(EngineConfig, **{**asdict(self.engine.config), **settings})
        if config.draft == default.WITH_DEFAULT:
            name = self.engine.loaded.name
            config = replace(config, draft=default.draft_for(None if name == default.NAME else name, config.draft))
        engine = Engine(self.engine.loaded, self.engine.tokenizer, config, ranks=self.engine.ranks)
        return LLM.around(engine, self._defaults)

    @classmethod
    def around(cls, engine: Engine, defaults: Mapping[str, Any] | None = None) -> "LLM":
        """An LLM of an engine that was built elsewhere. defaults: recommended fields of SamplingParams."""
        llm = cls.__new__(cls)
        llm._defaults = dict(defaults or {})
        llm._serve(engine)
        return llm

    def _serve(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._inboxes: dict[str, deque[Delta]] = {}
        self.gone: deque[str] = deque()  # abandoned requests; a finalizer only appends here
        self._is_closed = False

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters, with the recommendations of the model's generation_config.json."""
        return build(SamplingParams, **self._defaults)

    @property
    def recommended(self) -> Mapping[str, Any]:
        """The recommendations of generation_config.json, as fields of SamplingParams."""
        return self._defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continue prompts in one batch. Returns one result per prompt, in order."""
        many = as_prompts(prompts)
        return self._run(many, self._per_prompt(params, len(many)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Answer one or several conversations. Returns one result per conversation, in order."""
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        tokens = [self.engine.tokenizer.encode_chat(conversation) for conversation in several]  # type: ignore[arg-type]
        return self._run(tokens, self._per_prompt(params, len(tokens)))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> "Stream":
        """Continue one prompt, or answer one conversation, as a stream of deltas."""
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            prompt = self.engine.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        params, inbox = params or self.get_default_sampling_params(), deque[Delta]()
        request_id = self._add(prompt, params, inbox)  # type: ignore[arg-type]
        return Stream(self, request_id, inbox, params.n)

    def as_finished(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[tuple[int, Result]]:
        """Run prompts together and yield (index, result) as each finishes. Closing the iterator ends the rest."""
        inbox, ids = deque[Delta](), dict[str, int]()
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                try:
                    ids[self._add(prompt, own, inbox)] = index
                except SaguaroError as e:
                    raise type(e)(f"prompt {index}: {e}") from e
            left = {index: own.n for index, own in enumerate(params)}
            while left:
                while inbox:
                    delta = inbox.popleft()
                    index = ids[delta.request_id]
                    left[index] -= delta.finish_reason is not None
                    if left[index] == 0:
                        del left[index]
                        with self._lock:
                            result = self.engine.result(delta.request_id)
                        yield index, result
                if left:
                    self.pump(inbox)
        finally:
            self.gone.extend(ids)
            self.sweep()

    def close(self) -> None:
        """Close the link to the draft. The LLM cannot be used afterwards."""
        self._is_closed = True
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Result]:
        results = dict(self.as_finished(prompts, params))
        return [results[index] for index in range(len(prompts))]

    def _per_prompt(self, params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * n
        if len(params) != n:
            raise RequestError(f"{len(params)} sampling parameters for {n} prompts; give one, or one for each")
        return params

    def _add(self, prompt: Prompt, params: SamplingParams, inbox: "deque[Delta]") -> str:
        if self._is_closed:
            raise RequestError("this LLM is closed; make a new one")
        self.engine.check_structured(params)  # may take a second; done outside the lock, so rounds continue
        with self._lock:
            request_id = self.engine.add(prompt, params)
            self._inboxes[request_id] = inbox
        return request_id

    def pump(self, inbox: "deque[Delta]") -> None:
        """Run a round for all requests, unless this inbox was filled while the caller waited for the lock."""
        with self._lock:
            self._end_gone()
            if inbox:
                return
            assert self.engine.has_work, "a stream waits for a delta that will not come"
            try:
                deltas = self.engine.step()
            except BaseException:
                self._deliver(self.engine.take())
                raise
            self._deliver(deltas)

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.request_id in self._inboxes:
                self._inboxes[delta.request_id].append(delta)

    def sweep(self) -> None:
        """End abandoned requests: now if no round is running, else before the next round."""
        if self._lock.acquire(blocking=False):
            try:
                self._end_gone()
            finally:
                self._lock.release()

    def _end_gone(self) -> None:
        while self.gone:
            request_id = self.gone.popleft()
            self._inboxes.pop(request_id, None)
            self.engine.discard(request_id)


class Stream(Iterator[Delta]):
    """The deltas of one request: iterate, or run round by round. Closing or dropping the stream ends the request."""

    def __init__(self, llm: LLM, request_id: str, inbox: "deque[Delta]", n_outputs: int) -> None:
        self._llm, self._inbox, self._n_open = llm, inbox, n_outputs
        # A dropped stream may be collected at any time, even during a round, so the finalizer only appends to a list.
        self._end = weakref.finalize(self, llm.gone.append, request_id)

    @property
    def is_done(self) -> bool:
        """Whether all deltas were returned."""
        return self._n_open == 0

    def __next__(self) -> Delta:
        """Return the next delta, running rounds if needed."""
        while not self.is_done:
            for delta in self.ready():
                return delta
            self.pump()
        raise StopIteration

    def ready(self) -> Iterator[Delta]:
        """The deltas that are available now."""
        while self._inbox and not self.is_done:
            delta = self._inbox.popleft()
            self._n_open -= delta.finish_reason is not None
            if self.is_done:
                self.close()
            yield delta

    def pump(self) -> None:
        """Run a round, unless a delta is available. A long prompt takes several rounds."""
        if not self.is_done and not self._inbox:
            self._llm.pump(self._inbox)

    def close(self) -> None:
        """End the request, if it is still running."""
        self._n_open = 0
        self._end()
        self._llm.sweep()


def learnt_folder(config: EngineConfig, cache_dir: str | os.PathLike[str] | None) -> str:
    """Where what is learnt is kept: the configured folder, $SAGUARO_LEARNT, or `learnt` in the cache; or none."""
    if config.learnt_dir != "auto":
        return config.learnt_dir
    return os.environ.get("SAGUARO_LEARNT") or str(Path(cache_dir or default_cache()).absolute() / "learnt")


def default_cache() -> Path:
    """The folder of downloaded models: $SAGUARO_CACHE, or `saguaro` in the user's cache folder."""
    if "SAGUARO_CACHE" in os.environ:
        return Path(os.environ["SAGUARO_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saguaro"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Normalize to a list of prompts.

    >>> as_prompts("hello"), as_prompts([1, 2]), as_prompts(["a", [3]])
    (['hello'], [[1, 2]], ['a', [3]])
    """
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
