"""Grammars and chat templates of a server: tried in a separate process first, as they might take forever.

Invariant: this process compiles only grammars that the other process compiled within the limits. Of the others it
keeps only the error message.
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
MAX_REFUSED = 256  # error messages that are kept


class Uncompiled(Exception):
    """The grammar is not compiled yet, which takes time."""

    def __init__(self, structured: Structured) -> None:
        super().__init__(structured.kind)
        self.structured = structured


class VettedGrammars:
    """An engine's grammars. Each is tried in a separate process before this one compiles it."""

    def __init__(self, grammars: Grammars, limits: Budget = GRAMMAR) -> None:
        self._grammars = grammars
        self.worker = Isolated("saguaro.model.compiler:checker", lambda: grammars.setting, limits)
        self._refused: OrderedDict[int, str] = OrderedDict()  # by the hash of a grammar, in order of use
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Prepare for the first grammar. Raises ConfigError if grammars are not supported."""
        self.worker.start()
        self._grammars.warm()

    def check(self, structured: Structured | None) -> None:
        """Raise ConfigError for a grammar that was refused, and Uncompiled for an unknown one."""
        if structured is not None and not self._grammars.has(structured):
            self._recall(structured)
            raise Uncompiled(structured)

    def settle(self, structured: Structured) -> None:
        """Compile the grammar, so that `check` has a result. Raises only errors that may not recur."""
        try:
            self.compile(structured)
        except ConfigError:
            if hash(structured) not in self._refused:
                raise

    def compile(self, structured: Structured) -> None:
        """Compile a grammar. Raises ConfigError if it is invalid or exceeds a limit."""
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
    """Runs chat templates in a separate process (saguaro.model.chat_template.Run)."""

    def __init__(self, limits: Budget = TEMPLATE) -> None:
        self.worker = Isolated("saguaro.model.chat_template:runner", dict, limits)

    def __call__(self, source: str, given: dict[str, Any]) -> str:
        """Render a template."""
        try:
            text: str = self.worker(source, given)
        except Exceeded as e:
            raise RequestError(f"it takes {e}; shorten the conversation, or serve another template") from e
        return text
