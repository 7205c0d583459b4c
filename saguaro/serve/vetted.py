"""Grammars and chat templates of a server: what might take for ever is tried in a process of its own first.

Invariant: this process compiles only grammars that another process compiled within the limits. Of the others it keeps a
sentence each.
"""

import threading
from collections import OrderedDict
from typing import Any

from saguaro.config import Structured
from saguaro.errors import ConfigError, RequestError
from saguaro.model.grammar import Grammars
from saguaro.serve.isolated import Budget, Exceeded, Isolated

GRAMMAR = Budget(core_seconds=1.0, seconds=10.0, memory_bytes=128 * 2**20, niceness=5)
TEMPLATE = Budget(core_seconds=1.0, seconds=10.0, memory_bytes=128 * 2**20)
MAX_REFUSED = 256  # refusals that are remembered


class Uncompiled(Exception):
    """A grammar has to be compiled first, which takes time."""

    def __init__(self, structured: Structured) -> None:
        super().__init__(structured.kind)
        self.structured = structured


class VettedGrammars:
    """An engine's grammars, each tried in a process of its own before this one compiles it."""

    def __init__(self, grammars: Grammars, limits: Budget = GRAMMAR) -> None:
        self._grammars = grammars
        self.worker = Isolated("saguaro.model.compiler:checker", lambda: grammars.setting, limits)
        self._refused: OrderedDict[int, str] = OrderedDict()  # by the hash of a grammar, the last used is the last
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Get ready for the first grammar; ConfigError where there can be none."""
        self.worker.start()
        self._grammars.warm()

    def check(self, structured: Structured | None) -> None:
        """Raise ConfigError where a grammar is known to be refused, and Uncompiled where nothing is known."""
        if structured is not None and not self._grammars.has(structured):
            self._recall(structured)
            raise Uncompiled(structured)

    def settle(self, structured: Structured) -> None:
        """Have `check` know; raises only what would not be so another time."""
        try:
            self.compile(structured)
        except ConfigError:
            if hash(structured) not in self._refused:
                raise

    def compile(self, structured: Structured) -> None:
        """Compile a grammar; ConfigError where it is wrong or takes too much."""
        if self._grammars.has(structured):
            return
        self._recall(structured)
        key = hash(structured)
        try:
            self.worker(structured.kind, structured.text)
        except ConfigError as e:
            self._refuse(key, str(e))
            raise
        except Exceeded as e:
            why = f"structured.{structured.kind} cannot be served: to compile it takes {e}; simplify it"
            if e.is_certain:
                self._refuse(key, why)
            raise ConfigError(why) from e
        self._grammars.compile(structured)

    def _recall(self, structured: Structured) -> None:
        key = hash(structured)
        with self._lock:
            if (why := self._refused.get(key)) is not None:
                self._refused.move_to_end(key)
                raise ConfigError(why)

    def _refuse(self, key: int, why: str) -> None:
        with self._lock:
            self._refused[key] = why
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)


class VettedTemplates:
    """Runs chat templates in a process of its own (saguaro.model.chat_template.Run)."""

    def __init__(self, limits: Budget = TEMPLATE) -> None:
        self.worker = Isolated("saguaro.model.chat_template:runner", dict, limits)

    def __call__(self, source: str, given: dict[str, Any]) -> str:
        """A template's text."""
        try:
            text: str = self.worker(source, given)
        except Exceeded as e:
            raise RequestError(f"it takes {e}; shorten the conversation, or serve another template") from e
        return text
