"""The events of one output: content, reasoning, and tool calls with growing arguments.

content, reasoning ...  CallStart(0) CallArguments(0) ... CallEnd(0)  CallStart(1) ... CallEnd(1)  content ...
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning that comes before the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins: its name is known, its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call's arguments are complete. A call that was cut off by the end of the output has no such event."""

    index: int


Event = ContentDelta | ReasoningDelta | CallStart | CallArguments | CallEnd


@dataclass
class Call:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""  # JSON text, as the model wrote it
    is_complete: bool = False


@dataclass
class Parsed:
    """A parsed output."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls and all are complete."""
        return bool(self.calls) and all(call.is_complete for call in self.calls)

    def add(self, event: Event) -> None:
        """Apply an event.

        >>> parsed = Parsed()
        >>> for event in (ContentDelta("Well. "), CallStart(0, "c1", "add"), CallArguments(0, "{}"), CallEnd(0)):
        ...     parsed.add(event)
        >>> parsed
        Parsed(content='Well. ', reasoning=None, calls=[Call(id='c1', name='add', arguments='{}', is_complete=True)])
        """
        match event:
            case ContentDelta(text):
                self.content = (self.content or "") + text
            case ReasoningDelta(text):
                self.reasoning = (self.reasoning or "") + text
            case CallStart(_, id, name):
                self.calls.append(Call(id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallEnd(index):
                self.calls[index].is_complete = True


def gather(events: Iterable[Event]) -> Parsed:
    """Build the output from its events."""
    parsed = Parsed()
    for event in events:
        parsed.add(event)
    return parsed
