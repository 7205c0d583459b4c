"""What an experiment is: a name, the cells that it needs, and what it says about them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saguaro.report.cell import Cell, Entry, Profile
from saguaro.report.page import Section
from saguaro.report.store import Finished

Found = Mapping[str, Finished]  # finished cells, by name; of all experiments of the report
Figures = dict[str, Any]  # of one entry (saguaro.report.measure)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment. `section` is called if a cell is finished, and must do with any of them."""

    name: str
    title: str
    about: str  # for the list, in a line
    cells: Callable[[Profile], list[Cell]]
    section: Callable[[Profile, Found], Section]


def entries(found: Found, cell: Cell) -> dict[str, Figures]:
    """The figures of a cell's entries, by name; empty if it is not finished."""
    if cell.name not in found:
        return {}
    return {one["name"]: one for one in found[cell.name]["measured"]["entries"]}


def finished(found: Found, cells: Sequence[Cell]) -> Iterator[tuple[Cell, dict[str, Figures]]]:
    """The finished ones of these cells, with their entries."""
    return ((cell, entries(found, cell)) for cell in cells if cell.name in found)


def of_summary(figures: Figures | None, name: str) -> float | None:
    """A statistic of an entry's rounds; None if there is none."""
    value = figures["summary"][name] if figures else None
    return None if value is None else float(value)


def speed(figures: Figures | None) -> float | None:
    """Tokens per second of an entry."""
    return None if not figures or figures["tok_s"] is None else float(figures["tok_s"])


def slowdown(figures: Figures, other: Figures) -> float | None:
    """How much longer the rest of a round takes, besides waiting for the draft, than with another entry."""
    if figures["played"] is None or other["played"] is None:
        return None
    return ratio(figures["played"]["verify_ms"], other["played"]["verify_ms"])


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, if both are known."""
    return None if a is None or not b else a / b


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; without one, a dash.

    >>> number(0.456), number(None), number(12.3, 0)
    ('0.46', '-', '12')
    """
    return "-" if value is None else f"{value:,.{digits}f}"


def spread(values: Sequence[float | None], digits: int = 2) -> str:
    """The range of numbers, for a text.

    >>> spread([0.5, 0.25, None]), spread([1.0]), spread([])
    ('0.25 to 0.50', '1.00', 'no value')
    """
    known = sorted(value for value in values if value is not None)
    if not known:
        return "no value"
    low, high = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def some(temperature: float) -> str:
    """A temperature in words.

    >>> some(0.0), some(0.7)
    ('greedy', 'temperature 0.7')
    """
    return f"temperature {temperature:g}" if temperature else "greedy"


def rounds_of(figures: Figures | None) -> int:
    """Row-rounds that the rates of an entry rest on."""
    return int(figures["summary"]["row_rounds"]) if figures else 0


def entry(name: str, method: str, **settings: Any) -> Entry:
    """An entry of a cell."""
    return Entry(name=name, settings={"method": method, **settings})
