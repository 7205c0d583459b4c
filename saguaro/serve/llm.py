"""The Python API.

from saguaro import LLM, SamplingParams

llm = LLM()                                   # the default model, fetched once
for result in llm.generate(["The saguaro is"], SamplingParams(temperature=0.7)):
    print(result.outputs[0].text)
"""

import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from saguaro.config import EngineConfig, SamplingParams, build
from saguaro.errors import ConfigError, RequestError, SaguaroError, UnknownRequest
from saguaro.model import default
from saguaro.model.load import locate
from saguaro.model.tokenizer import Message
from saguaro.serve.engine import Engine, build_engine
from saguaro.serve.results import Delta, Result

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
        progress: default.Progress | None = None,
        **settings: Any,
    ) -> None:
        """Load a model: a folder, a .gguf file, a Hub id, or None for SmolLM2-135M-Instruct."""
        config = build(EngineConfig, **settings)
        name = str(model) if model is not None else default.NAME
        if model is None:
            path = default.fetch_default(Path(cache_dir or default_cache()), progress or (lambda *_: None))
        else:
            path = locate(name, revision)
        self.engine: Engine = build_engine(name, path, config, locate(str(tokenizer)) if tokenizer else None)
        self._lock = threading.RLock()
        self._inbox: dict[str, deque[Delta]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Continue prompts, all together; one result each, in order."""
        many = as_prompts(prompts)
        return self._run(many, _per_prompt(params, len(many)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
    ) -> list[Result]:
        """Answer one conversation, or several; one result each, in order."""
        if not messages:
            raise ConfigError("messages is empty; give at least one message")
        several = messages if not isinstance(messages[0], dict) else [messages]
        tokens = [self.engine.tokenizer.encode_chat(conversation) for conversation in several]  # type: ignore[arg-type]
        return self._run(tokens, _per_prompt(params, len(tokens)))

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Generator[Delta]:
        """Continue one prompt, or answer one conversation, piece by piece. Closing the iterator ends the request."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            prompt = self.engine.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        with self._lock:
            request_id = self.engine.add(prompt, params)  # type: ignore[arg-type]
            self._inbox[request_id] = deque()
        return self._follow(request_id, (params or SamplingParams()).n)

    def close(self) -> None:
        """Give back everything the engine holds."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finished(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[tuple[int, Result]]:
        """Run prompts together; (index, result) of each as soon as it finishes. Closing the iterator ends the rest."""
        ids: list[str] = []
        try:
            with self._lock:
                for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                    try:
                        ids.append(self.engine.add(prompt, own))
                    except SaguaroError as e:
                        raise type(e)(f"prompt {index}: {e}") from e
                    self._inbox[ids[-1]] = deque()
            left = {index: own.n for index, own in enumerate(params)}
            while left:
                for index in list(left):
                    left[index] -= sum(delta.finish_reason is not None for delta in self._drain(ids[index]))
                    if not left[index]:
                        del left[index]
                        with self._lock:
                            result = self.engine.result(ids[index])
                        yield index, result
                if left:
                    self._pump()
        finally:
            for request_id in ids:
                self._forget(request_id)

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Result]:
        results = dict(self.finished(prompts, params))
        return [results[index] for index in range(len(prompts))]

    def _follow(self, request_id: str, n_outputs: int) -> Generator[Delta]:
        try:
            while n_outputs:
                for delta in self._drain(request_id):
                    n_outputs -= delta.finish_reason is not None
                    yield delta
                if n_outputs:
                    self._pump()
        finally:
            self._forget(request_id)

    def _pump(self) -> None:
        """Play a round for everybody; deltas go to whoever follows them."""
        with self._lock:
            for delta in self.engine.step():
                if delta.request_id in self._inbox:
                    self._inbox[delta.request_id].append(delta)

    def _drain(self, request_id: str) -> list[Delta]:
        with self._lock:
            inbox = self._inbox[request_id]
            deltas = list(inbox)
            inbox.clear()
        return deltas

    def _forget(self, request_id: str) -> None:
        """Abort what is unfinished and drop the result."""
        with self._lock:
            self._inbox.pop(request_id, None)
            with suppress(UnknownRequest):
                self.engine.abort(request_id)
                self.engine.result(request_id)


def default_cache() -> Path:
    """Where downloaded models are kept: $SAGUARO_CACHE, or `saguaro` in the user's cache folder."""
    if "SAGUARO_CACHE" in os.environ:
        return Path(os.environ["SAGUARO_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saguaro"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one.

    >>> as_prompts("hello"), as_prompts([1, 2]), as_prompts(["a", [3]])
    (['hello'], [[1, 2]], ['a', [3]])
    """
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, n: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise RequestError(f"{len(params)} sampling parameters for {n} prompts; give one, or one for each")
    return params
