"""Grammars and chat templates of a server: tried in a separate process first, as they might take forever.

Invariant: this process compiles only grammars that the other process compiled within the limits. Of the others it
keeps only the error message.

Renderings are in two classes. Each gets QUICK_SECONDS first, in one process. Those that need more get the whole
budget in another process with a lower priority. So a template that loops takes QUICK_SECONDS from ordinary
renderings, and its remaining time only from other slow ones.
"""

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from saguaro.config import Structured
from saguaro.errors import ConfigError, RequestError
from saguaro.model.chat_template import Run
from saguaro.model.grammar import Grammars
from saguaro.serve.isolated import Budget, Exceeded, Isolated

GRAMMAR = Budget(core_seconds=1.0, seconds=10.0, memory_bytes=128 * 2**20, niceness=10)
TEMPLATE = Budget(core_seconds=1.0, seconds=10.0, memory_bytes=128 * 2**20, niceness=5)
QUICK_SECONDS = 0.05  # CPU time of a rendering before it counts as slow; an ordinary one takes some milliseconds
SLOW_NICENESS = 10
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
    """Runs chat templates in separate processes."""

    def __init__(self, limits: Budget = TEMPLATE) -> None:
        maker = "saguaro.model.chat_template:runner"
        self._quick = Isolated(maker, lambda: QUICK_SECONDS, limits)
        self._slow = Isolated(maker, lambda: None, replace(limits, niceness=SLOW_NICENESS))

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in (self._quick, self._slow) if worker.pid is not None]

    def start(self) -> None:
        """Start the process for ordinary renderings; the other one is started by the first slow rendering."""
        self._quick.start()

    def close(self) -> None:
        """End the processes, even during a rendering."""
        self._quick.close()
        self._slow.close()

    def quick(self, source: str, given: dict[str, Any]) -> str:
        """Render a template. Raises TimedOut if it takes more than QUICK_SECONDS; then use `slow`."""
        return _render(self._quick, source, given)

    def slow(self, source: str, given: dict[str, Any]) -> str:
        """Render a template with the whole budget."""
        return _render(self._slow, source, given)


def _render(worker: Run, source: str, given: dict[str, Any]) -> str:
    try:
        return worker(source, given)
    except Exceeded as e:
        raise RequestError(f"it takes {e}; shorten the conversation, or serve another template") from e
