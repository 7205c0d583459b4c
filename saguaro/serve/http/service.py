"""What every endpoint needs: the engine's front, names, limits, and words into tokens without holding anybody up."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel

from saguaro.config import SamplingParams
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, PromptTooLong
from saguaro.serve.front import Front
from saguaro.serve.http.body import SMALL, read_body
from saguaro.serve.http.errors import APIError
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.paced import Paced
from saguaro.serve.http.readers import Readers
from saguaro.serve.prometheus import Metrics
from saguaro.serve.tools.dialect import Dialect
from saguaro.serve.tools.parsers import Parsers
from saguaro.serve.vetted import Uncompiled, VettedGrammars, VettedTemplates

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

READERS = 4  # threads that read prompts, beside the event loop and the engine: a long one must not hold up the others


class Service:
    """A served model."""

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str],
        limits: ServerLimits,
        parsers: Parsers | None = None,
        defaults: Mapping[str, Any] | None = None,  # of requests' parameters, where they do not say
    ) -> None:
        self.engine, self.names, self.limits, self.defaults = engine, tuple(names), limits, dict(defaults or {})
        self._parsers = parsers or Parsers()
        self.metrics = Metrics(engine, self.names[0])
        self.front = Front(engine, max_waiting=limits.max_waiting, watcher=self.metrics)
        self.created = int(time.time())
        self.max_model_len = engine.kv.longest
        self.tokenizer = engine.tokenizer.copy()  # the engine's thread has its own
        self.tokenizer.encode(" ")  # the first call may change settings, which nobody else may see happen
        self._longest_word = max(len(text) for text in self.tokenizer.spelling.values())
        self.grammars, self.templates = VettedGrammars(engine.grammars), VettedTemplates()
        self.tokenizer.run_template = self.templates
        self._compilers = Readers(1, "saguaro-grammars")  # one: first come, first served
        self._readers = Readers(READERS, "saguaro-tokens")
        # One thread, and rests: pydantic holds the interpreter while it works, and rounds need it too.
        self._bodies, self._paced = Readers(1, "saguaro-bodies"), Paced()

    @cached_property
    def dialect(self) -> Dialect:
        """How the model is spoken with; raises where it has no chat template."""
        return Dialect(self.tokenizer, self._parsers)

    async def start(self) -> None:
        """Begin to serve."""
        self.front.start()

    def warm(self) -> None:
        """Get ready for grammars and templates, before they are asked for."""
        self.templates.worker.start()
        with contextlib.suppress(ConfigError):  # a model that cannot be held to a grammar says so when it is asked to
            self.grammars.warm()

    async def close(self) -> None:
        """End everything."""
        self.grammars.worker.close()
        self.templates.worker.close()
        await self.front.close()
        self._compilers.close()
        self._readers.close()
        self._bodies.close()

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not served."""
        if name is not None and name not in self.names:
            message = f"the model {name[:200]!r} is not served here; this is {', '.join(map(repr, self.names))}"
            raise APIError(404, message, param="model", code="model_not_found")

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call a function of the tokenizer beside everything else; once more when a grammar that it needs is there, or
        is known to be refused."""
        while True:
            try:
                return await self._readers.call(function, *args)
            except Uncompiled as e:
                await self._compilers.call(self.grammars.settle, e.structured)

    async def read_body(self, kind: type[B], raw: bytes) -> B:
        """The model of a body; large ones are read beside everything else, which they leave most of the time."""
        if len(raw) <= SMALL:
            return read_body(kind, raw)
        return await self._bodies.call(self._paced, read_body, kind, raw)

    def encode(self, prompt: str | list[int], params: SamplingParams, special: bool = True) -> list[int]:
        """A prompt's tokens, with the special ones around a text if wanted; it is known that they can be served."""
        self.check_text(prompt)
        tokens = self.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
        return self.check(tokens, params)

    def check(self, tokens: list[int], params: SamplingParams) -> list[int]:
        """The tokens that are served of a prompt; raises if none can be. For `read`."""
        self.grammars.check(params.structured)
        tokens = self.engine.truncate(tokens, params)
        self.engine.check(tokens, params)
        return tokens

    def check_text(self, prompt: str | list[int]) -> None:
        """Refuse what is too long whatever its tokens are, before time is spent on it."""
        most = self.max_model_len * self._longest_word
        if isinstance(prompt, str) and len(prompt) > most:
            limit = f"max_model_len is {self.max_model_len}"
            raise PromptTooLong(
                f"the prompt has {len(prompt)} characters, at most {most} can fit ({limit}); shorten it"
            )
