"""An output as a sequence of blocks: reasoning, text and calls. Each ends before the next begins.

Chat completions report reasoning, content and calls in parallel; the Responses and Messages APIs report them in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from saguaro.serve.tools.events import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an output."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""  # of the called function
    text: str = ""  # for a call: its arguments as JSON
    is_complete: bool = True  # False for a call that was cut off by the end of the output


@dataclass(frozen=True)
class Opened:
    """A block begins."""

    block: Block


@dataclass(frozen=True)
class Grew:
    """A block got more text."""

    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    """A block has ended."""

    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """The blocks of one output, as it grows.

    >>> blocks = Blocks()
    >>> changes = blocks.add([ContentDelta("Well."), CallStart(0, "c1", "now"), CallArguments(0, "{}"), CallEnd(0)])
    >>> [type(change).__name__ for change in changes + blocks.finish()]
    ['Opened', 'Grew', 'Closed', 'Opened', 'Grew', 'Closed']
    >>> [(block.kind, block.text) for block in blocks.found]
    [('text', 'Well.'), ('call', '{}')]
    """

    def __init__(self) -> None:
        self.found: list[Block] = []
        self._is_open = False

    def add(self, events: Iterable[Event]) -> list[Change]:
        """The changes that these events cause."""
        return [change for event in events for change in self._add(event)]

    def finish(self) -> list[Change]:
        """End the output. Returns the last changes."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Closed(self.found[-1])]

    def _add(self, event: Event) -> list[Change]:
        match event:
            case ContentDelta(text):
                return [*self._reach("text"), self._grow(text)]
            case ReasoningDelta(text):
                return [*self._reach("reasoning"), self._grow(text)]
            case CallStart(_, id, name):
                return [*self.finish(), self._open(Block(len(self.found), "call", id, name, is_complete=False))]
            case CallArguments(_, text):
                return [self._grow(text)]
            case CallEnd():
                self.found[-1].is_complete = True
                return self.finish()

    def _reach(self, kind: Kind) -> list[Change]:
        if self._is_open and self.found[-1].kind == kind:
            return []
        return [*self.finish(), self._open(Block(len(self.found), kind))]

    def _open(self, block: Block) -> Opened:
        self.found.append(block)
        self._is_open = True
        return Opened(block)

    def _grow(self, text: str) -> Grew:
        self.found[-1].text += text
        return Grew(self.found[-1], text)
