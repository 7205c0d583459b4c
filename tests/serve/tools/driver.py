"""Readers for tests, whose call ids count up."""

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

from saguaro.serve.tools.events import Event, Parsed, gather
from saguaro.serve.tools.formats import Format
from saguaro.serve.tools.reader import OutputReader

NAMES = ("get_weather", "add", "now")


def reader(format: Format | None, names: Collection[str] = NAMES, **options: Any) -> OutputReader:
    """A reader of calls of these tools."""
    numbers = count()
    return OutputReader(format, names=names, new_id=lambda: f"c{next(numbers)}", **options)


def events(pieces: Sequence[str], format: Format | None, **options: Any) -> list[Event]:
    """What a reader tells of a text that comes in pieces."""
    one = reader(format, **options)
    return [event for piece in pieces for event in one.push(piece)] + one.finish()


def read(text: str, format: Format | None, **options: Any) -> Parsed:
    """A whole text."""
    return gather(events([text], format, **options))


def calls(parsed: Parsed) -> list[tuple[str, str]]:
    """Names and arguments."""
    return [(call.name, call.arguments) for call in parsed.calls]
