"""The shared parts of all endpoints: the engine's front, names, limits, and tokenization in separate threads."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel

from saguaro.config import SamplingParams
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, PromptTooLong, TimedOut, Unavailable
from saguaro.serve.front import Front
from saguaro.serve.http.body import SMALL, read_body
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.paced import Paced
from saguaro.serve.http.readers import Readers
from saguaro.serve.prometheus import Metrics
from saguaro.serve.tools.dialect import Conversation, Dialect
from saguaro.serve.tools.parsers import Parsers
from saguaro.serve.vetted import Uncompiled, VettedGrammars, VettedTemplates

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

READERS = 4  # threads for tokenization, so that a long prompt does not delay others


class Service:
    """A served model."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        limits: ServerLimits,
        parsers: Parsers | None = None,
        defaults: Mapping[str, Any] | None = None,  # defaults of request parameters
    ) -> None:
        self.engine, self.names, self.limits, self.defaults = engine, tuple(names), limits, dict(defaults or {})
        self._parsers = parsers or Parsers()
        self.metrics = Metrics(engine, self.names[0])
        self.read_metrics: Callable[[], Awaitable[bytes]] = self._own_metrics  # a cluster reads those of all replicas
        self.front = Front(engine, max_waiting=limits.max_waiting, watcher=self.metrics)
        self.created = int(time.time())
        self.max_model_len = engine.kv.longest
        self.tokenizer = engine.tokenizer.copy()  # the engine's thread has its own copy
        self.tokenizer.encode(" ")  # the first call may change settings, so it must happen before threads share them
        self._longest_word = max(len(text) for text in self.tokenizer.spelling.values())
        self.grammars, self.templates = VettedGrammars(engine.grammars), VettedTemplates()
        self.tokenizer.run_template = self.templates.quick
        self._compilers = Readers(1, "saguaro-grammars")  # one thread: first come, first served
        self._readers = Readers(READERS, "saguaro-tokens")
        # One thread for each process that renders, so that only renderings wait for renderings.
        self._renderers, self._slow_renderers = Readers(1, "saguaro-chats"), Readers(1, "saguaro-slow-chats")
        # One throttled thread: pydantic holds the GIL while it works, and rounds need it too.
        self._bodies, self._paced = Readers(1, "saguaro-bodies"), Paced()

    @cached_property
    def dialect(self) -> Dialect:
        """The model's dialect. Raises if there is no chat template."""
        return Dialect(self.tokenizer, self._parsers)

    async def start(self) -> None:
        """Start serving."""
        self.front.start()

    def warm(self) -> None:
        """Warm up the processes for grammars and templates."""
        self.templates.start()
        with contextlib.suppress(ConfigError):  # unsupported grammars are reported per request
            self.grammars.warm()

    async def drain(self) -> None:
        """Refuse new requests, wait for the open ones, and end those that take too long."""
        seconds = self.limits.drain_seconds
        self.front.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.front.idle()
        except TimeoutError:
            error = f"the server is ending, and the request was not done after {seconds:g} seconds more"
            self.front.end(Unavailable(error))

    async def close(self) -> None:
        """Shut down all parts."""
        self.grammars.worker.close()
        self.templates.close()
        await self.front.close()
        self._compilers.close()
        self._readers.close()
        self._renderers.close()
        self._slow_renderers.close()
        self._bodies.close()

    def check_model(self, name: str | None) -> None:
        """Refuse an unknown model name."""
        if name is not None and name not in self.names:
            message = f"the model {name[:200]!r} is not served here; this is {', '.join(map(repr, self.names))}"
            raise APIError(404, message, param="model", code="model_not_found")

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Run a function of the tokenizer in another thread. If it needs a grammar that is not compiled, run it again
        once the grammar is compiled or refused."""
        while True:
            try:
                return await self._readers.call(function, *args)
            except Uncompiled as e:
                await self._compilers.call(self.grammars.settle, e.structured)

    async def render(self, conversation: Conversation) -> str:
        """A conversation as text. A slow one does not delay others."""
        try:
            return await self._renderers.call(self.dialect.render, conversation)
        except TimedOut:
            return await self._slow_renderers.call(self.dialect.render, conversation, self.templates.slow)

    async def read_body(self, kind: type[B], raw: bytes) -> B:
        """Parse a body. Large ones are parsed in a throttled thread."""
        if len(raw) <= SMALL:
            return read_body(kind, raw)
        return await self._bodies.call(self._paced, read_body, kind, raw)

    def encode(self, prompt: str | list[int], params: SamplingParams, special: bool = True) -> list[int]:
        """A prompt's tokens, checked; with the special tokens around a text if wanted."""
        self.check_text(prompt)
        tokens = self.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        return self.check(tokens, params)

    def check(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """Truncate and check a prompt's tokens. Raises if it cannot be served. For `read`."""
        self.grammars.check(params.structured)
        tokens = self.engine.truncate(tokens, params)
        self.engine.check(tokens, params)
        return tokens

    def check_text(self, prompt: str | list[int]) -> None:
        """Refuse a prompt that is too long for any tokenization, before it is tokenized."""
        most = self.max_model_len * self._longest_word
        if isinstance(prompt, str) and len(prompt) > most:
            limit = f"max_model_len is {self.max_model_len}"
            raise PromptTooLong(
                f"the prompt has {len(prompt)} characters, at most {most} can fit ({limit}); shorten it"
            )

    async def _own_metrics(self) -> bytes:
        return self.metrics.text()
