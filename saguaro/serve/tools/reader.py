"""Splits the growing text of one output into content, reasoning and tool calls.

Invariant: the events depend on the text alone, not on how it was split into pieces, and no text is lost. Text that
might begin a call or end the reasoning is held back until this is decided. A call is one as soon as its name is known;
if its arguments turn out invalid, they are reported as written.

    lead --> reasoning --> first --> body --> begun --> call --> between --> body
                            (bare calls)  |      |        |         |
                                          +------+        +> spoilt-+    no call: content
"""

import uuid
from collections.abc import Callable, Collection

from saguaro.serve.tools.call import CallScan, NamedCall, ObjectCall
from saguaro.serve.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Parsed,
    ReasoningDelta,
    gather,
)
from saguaro.serve.tools.formats import Format, Opener, Thinking

BARE = Opener("")


def new_call_id() -> str:
    """A new id in the usual format."""
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputReader:
    """Reads one output.

    >>> from saguaro.serve.tools.formats import HERMES
    >>> reader = OutputReader(HERMES, new_id=lambda: "c1")
    >>> reader.push('Well.\\n<tool_') + reader.push('call>{"name": "add", "arguments": {"a')
    [ContentDelta(text='Well.'), CallStart(index=0, id='c1', name='add'), CallArguments(index=0, text='{"a')]
    >>> reader.push('": 1}}</tool_call>') + reader.finish()
    [CallArguments(index=0, text='": 1}'), CallEnd(index=0)]
    """

    def __init__(
        self,
        format: Format | None = None,  # None: calls are not parsed
        thinking: Thinking | None = None,  # None: reasoning is not parsed
        *,
        is_thinking: bool = False,  # the prompt has already opened the reasoning
        names: Collection[str] = (),  # of the declared tools
        max_calls: int | None = None,  # further calls are dropped
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._openers = format.openers if format else ()
        self._is_bare, self._is_named = bool(format and format.is_bare), bool(format and format.is_named)
        self._thinking, self._names, self._new_id = thinking, names, new_id
        self._max_calls = max_calls
        self._held = ""  # not reported yet
        self._raw = ""  # the text of a possible call, taken from _held
        self._events: list[Event] = []
        self._n_calls = 0
        self._opener, self._is_list = BARE, False
        self._call: CallScan = NamedCall()
        self._is_started = False  # whether the call in _call was reported
        self._has_content = self._is_after_call = False
        self._state = self._first if thinking is None else self._lead
        if thinking is not None and is_thinking:
            self._state = self._reasoning_lead

    def push(self, text: str) -> list[Event]:
        """Add text. Returns the events that are certain now."""
        self._held += text
        return self._advance(is_end=False)

    def finish(self) -> list[Event]:
        """End the text. Returns the remaining events."""
        return self._advance(is_end=True)

    def _advance(self, is_end: bool) -> list[Event]:
        while True:
            state = self._state
            n_taken = state(self._held, is_end)
            self._held = self._held[n_taken:]
            if n_taken == 0 and self._state == state:
                break
        events, self._events = self._events, []
        return _joined(events)

    # Each state handler gets the unreported text and returns how many characters it has consumed.

    def _lead(self, text: str, is_end: bool) -> int:
        """Check whether reasoning begins."""
        assert self._thinking is not None
        inner, begin = text.lstrip(), self._thinking.begin
        if inner.startswith(begin):
            self._state = self._reasoning_lead
            return len(text) - len(inner) + len(begin)
        if is_end or not begin.startswith(inner):
            self._state = self._first
        return 0

    def _reasoning_lead(self, text: str, is_end: bool) -> int:
        n_space = len(text) - len(text.lstrip())
        if n_space < len(text):
            self._state = self._reasoning
        return n_space

    def _reasoning(self, text: str, is_end: bool) -> int:
        assert self._thinking is not None
        end = self._thinking.end
        at = text.find(end)
        if at >= 0:
            self._think(text[:at].rstrip())
            self._state = self._after_reasoning
            return at + len(end)
        n = len(text) if is_end else len(text[: len(text) - overlap(text, end)].rstrip())
        self._think(text[:n])
        return n

    def _after_reasoning(self, text: str, is_end: bool) -> int:
        n_space = len(text) - len(text.lstrip())
        if n_space < len(text):
            self._state = self._first
        return n_space

    def _first(self, text: str, is_end: bool) -> int:
        """The beginning of the answer: check for a bare call, or for an opener that is valid only here."""
        inner = text.lstrip()
        n_space = len(text) - len(inner)
        here = [one for one in self._openers if one.is_first]
        if not is_end and not inner and (here or self._is_bare):
            return 0
        if not is_end and any(len(inner) < len(one.begin) and one.begin.startswith(inner) for one in here):
            return 0
        found = next((one for one in here if inner.startswith(one.begin)), None)
        if found is None and self._is_bare and inner[:1] in ("{", "["):
            found = BARE
        if found is None:
            self._state = self._body
            return 0
        return self._begin(found, text[: n_space + len(found.begin)])

    def _body(self, text: str, is_end: bool) -> int:
        """Content, up to an opener."""
        openers = [one for one in self._openers if not one.is_first]
        found = [(at, one) for one in openers if (at := text.find(one.begin)) >= 0]
        if found:
            at, opener = min(found, key=lambda pair: pair[0])
            n_content = len(text[:at].rstrip())
            self._say(text[:n_content])
            return n_content + self._begin(opener, text[n_content : at + len(opener.begin)])
        if self._is_after_call:
            is_space = not text.strip()
            if is_space:
                return len(text) if is_end else 0
        n_held = max((overlap(text, one.begin) for one in openers), default=0)
        n = len(text) if is_end or not openers else len(text[: len(text) - n_held].rstrip())
        self._say(text[:n])
        return n

    def _begin(self, opener: Opener, raw: str) -> int:
        self._opener, self._raw, self._is_list, self._state = opener, raw, False, self._begun
        return len(raw)

    def _begun(self, text: str, is_end: bool) -> int:
        """After an opener or a separator: check whether a call follows."""
        n_taken = 0
        for c in text:
            if c == "[" and not self._is_list:
                self._is_list = True
            elif not c.isspace():
                break
            n_taken += 1
        self._raw += text[:n_taken]
        if n_taken < len(text):
            self._start(text[n_taken])
        elif is_end:
            self._fail()
        return n_taken

    def _start(self, c: str) -> None:
        is_bare = self._opener.is_first or self._opener == BARE
        if c == "{":
            self._call = ObjectCall(self._names if is_bare else None, is_bare)
        elif self._is_named and not self._is_list and (c.isalnum() or c == "_"):
            self._call = NamedCall()
        else:
            self._fail()
            return
        self._state, self._is_started = self._in_call, False

    def _in_call(self, text: str, is_end: bool) -> int:
        n_taken = self._call.feed(text)
        self._raw += "" if self._is_started else text[:n_taken]
        self._tell()
        if self._call.is_done:
            self._end()
        elif n_taken < len(text):
            self._state = self._spoilt
            if not self._is_started:
                self._fail()
        elif is_end and not self._is_started:
            self._fail()
        return n_taken

    def _tell(self) -> None:
        if self._call.name is None:
            return
        if not self._is_started:
            self._add(CallStart(self._n_calls, self._new_id(), self._call.name))
            self._is_started, self._raw, self._is_after_call = True, "", True
        self._argue(self._call.take())

    def _end(self) -> None:
        self._add(CallEnd(self._n_calls))
        self._n_calls += 1
        self._state = self._between

    def _spoilt(self, text: str, is_end: bool) -> int:
        """Invalid arguments, up to the expected end of the call."""
        marks = [self._opener.end] if self._opener.end else [one.begin for one in self._openers if not one.is_first]
        at = min((at for mark in marks if (at := text.find(mark)) >= 0), default=-1)
        if at >= 0:
            self._argue(text[:at])
            self._end()
            return at
        n = len(text) if is_end else len(text) - max((overlap(text, mark) for mark in marks), default=0)
        self._argue(text[:n])
        if is_end and n == len(text):
            self._end()
        return n

    def _between(self, text: str, is_end: bool) -> int:
        """After a call: the end, or another call."""
        inner = text.lstrip()
        n_space = len(text) - len(inner)
        if self._is_list and inner.startswith("]"):
            self._is_list = False
            return n_space + 1
        rest = inner[1:].lstrip() if inner[:1] in (",", ";") else inner
        n_before, end = len(text) - len(rest), self._opener.end
        if end and rest.startswith(end):
            self._state = self._body
            return n_before + len(end)
        if end.startswith(rest):
            if not is_end:
                return 0
            self._state = self._body
            return len(text)  # cut off within the end marker
        if rest.startswith("{"):
            self._raw = text[:n_before]
            self._start("{")
            return n_before
        self._state = self._body
        return 0

    def _fail(self) -> None:
        """Not a call: report it as content."""
        raw, self._raw, self._state = self._raw, "", self._body
        self._say(raw)

    def _say(self, text: str) -> None:
        if text and self._is_after_call and not self._has_content:
            text = text.lstrip()
        if text:
            self._has_content = True
            self._is_after_call = False
            self._events.append(ContentDelta(text))

    def _think(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def _argue(self, text: str) -> None:
        if text:
            self._add(CallArguments(self._n_calls, text))

    def _add(self, event: CallStart | CallArguments | CallEnd) -> None:
        if self._max_calls is None or event.index < self._max_calls:
            self._events.append(event)


def parse(text: str, reader: OutputReader) -> Parsed:
    """Parse a whole output with a new reader."""
    return gather([*reader.push(text), *reader.finish()])


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of mark that text ends with.

    >>> overlap("so <tool", "<tool_call>"), overlap("so", "<tool_call>")
    (5, 0)
    """
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _joined(events: list[Event]) -> list[Event]:
    """Merge adjacent events of the same kind."""
    joined: list[Event] = []
    for event in events:
        match (joined[-1] if joined else None, event):
            case (ContentDelta(before), ContentDelta(text)):
                joined[-1] = ContentDelta(before + text)
            case (ReasoningDelta(before), ReasoningDelta(text)):
                joined[-1] = ReasoningDelta(before + text)
            case (CallArguments(index, before), CallArguments(_, text)):
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined
