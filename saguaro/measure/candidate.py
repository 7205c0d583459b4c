"""One method of a comparison, its results, and the table of all methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import torch
from rich import box
from rich.table import Table

from saguaro.device.affinity import Affinity, usable_cores
from saguaro.errors import ConfigError
from saguaro.llm import LLM
from saguaro.measure.metrics import Summary

P = ParamSpec("P")


@dataclass(frozen=True)
class Timed:
    """One timed call."""

    seconds: float
    n_tokens: int
    n_rounds: int  # of the candidate by then


@dataclass
class Candidate:
    """One method and its results so far."""

    name: str  # a method, optionally with :K and :M, or a peer; optionally with @ and a number of cores
    llm: LLM | None  # None: a peer
    is_comparable: bool  # whether its tokens must equal ar's; otherwise only the distribution is the same
    summary: Summary | None = None
    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    runs: list["Timed"] = field(default_factory=list)

    def run(self, generate: Callable[P, list[list[int]]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Time a call that generates, and add its output tokens."""
        with placement(self.name):
            began = time.perf_counter()
            outputs = generate(*args, **kwargs)
            seconds = time.perf_counter() - began
        self.runs.append(Timed(seconds, sum(map(len, outputs)), self.n_rounds))
        self.seconds += seconds
        self.outputs += outputs

    def watch(self) -> None:
        """Start counting rounds."""
        assert self.llm is not None
        self.summary = Summary()
        self.llm.engine.round.observers.append(self.summary.add)

    def unwatch(self) -> None:
        """Stop counting rounds."""
        assert self.llm is not None
        assert self.summary is not None
        self.llm.engine.round.observers.remove(self.summary.add)

    @property
    def n_rounds(self) -> int:
        """Rounds so far, since it is watched."""
        return self.summary.n_rounds if self.summary is not None else 0

    @property
    def n_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.outputs))

    @property
    def tok_s(self) -> float:
        """Tokens per second, over all requests."""
        return self.n_tokens / self.seconds if self.seconds else 0.0


def results(entrants: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The results of each entry, for tables and JSON; null if not applicable. The first entry is an ar."""
    sd = next((entrant for entrant in entrants if method_of(entrant.name) == "sd"), None)
    return [_result(entrant, entrants[0], sd) for entrant in entrants]


def method_of(name: str) -> str:
    """The method or peer in an entry's name.

    >>> method_of("ar@1"), method_of("ssd:4:8")
    ('ar', 'ssd')
    """
    return name.partition("@")[0].partition(":")[0]


def sizes_of(name: str) -> dict[str, Any]:
    """The lookahead and budget in an entry's name.

    >>> sizes_of("ssd:2:16@1"), sizes_of("sd:3"), sizes_of("sd")
    ({'lookahead': 2, 'budget': 16}, {'lookahead': 3}, {})
    """
    given = name.partition("@")[0].split(":")[1:]
    if len(given) > 2 or not all(one.isdecimal() for one in given):
        raise ConfigError(
            f"{name!r} is no method; write METHOD, METHOD:K or METHOD:K:M, and @CORES behind it if wanted"
        )
    return dict(zip(("lookahead", "budget"), map(int, given), strict=False))


def cores_of(name: str) -> int | None:
    """The number of cores in an entry's name; None: all.

    >>> cores_of("ar@1"), cores_of("ssd")
    (1, None)
    """
    _, is_given, n = name.partition("@")
    if not is_given:
        return None
    most = len(usable_cores())
    if not n.isdecimal() or not 1 <= int(n) <= most:
        raise ConfigError(f"{name!r} asks for {n or 'no'} cores; after @ stands a number from 1 to {most}")
    return int(n)


def placement(name: str) -> Affinity:
    """The CPU affinity of an entry."""
    n = cores_of(name)
    return Affinity() if n is None else Affinity(frozenset(usable_cores()[:n]), n)


def first_difference(entrant: Candidate, ar: Candidate) -> tuple[int, int] | None:
    """The first prompt, and the position in its output, at which an entry differs from ar."""
    for prompt, (own, other) in enumerate(zip(entrant.outputs, ar.outputs, strict=True)):
        if own != other:
            shared = (at for at, (a, b) in enumerate(zip(own, other, strict=False)) if a != b)
            return prompt, next(shared, min(len(own), len(other)))
    return None


def verdict(entrants: Sequence[Candidate]) -> int:
    """Print whether all outputs equal ar's. Returns the exit status: 1 if a method differs that must not."""
    ar, status = entrants[0], 0
    for entrant in entrants:
        place = first_difference(entrant, ar) if entrant.is_comparable else None
        if place is None:
            continue
        where = f"{entrant.name} is not ar, first at token {place[1]} of output {place[0]}"
        if entrant.llm is None:
            print(f"note: {where}")
        else:
            status = 1
            hint = "" if entrant.llm.engine.loaded.model.dtype == torch.float32 else _NEAR_TIES
            print(f"OUTPUT DIFFERS: {where}{hint}")
    if status == 0:
        same = ", ".join(entrant.name for entrant in entrants if entrant.is_comparable and entrant.llm)
        free = ", ".join(entrant.name for entrant in entrants if not entrant.is_comparable)
        print(f"identical output: {same}" + (f"; of the target's law, with noise of their own: {free}" if free else ""))
    return status


_NEAR_TIES = "; below float32 near ties can fall either way: compare with --dtype float32"


def _result(entrant: Candidate, ar: Candidate, sd: Candidate | None) -> dict[str, Any]:
    summary = entrant.summary
    return {
        "method": entrant.name,
        "tok_s": entrant.tok_s,
        "ratio_ar": entrant.tok_s / ar.tok_s if ar.tok_s else None,
        "ratio_sd": entrant.tok_s / sd.tok_s if sd is not None and sd.tok_s else None,
        "tokens_per_round": summary.tokens_per_round if summary else None,
        "acceptance": summary.acceptance if summary else None,
        "nodes_per_token": summary.nodes_per_token if summary else None,
        "hit_rate": summary.hit_rate if summary else None,
        "hidden_share": summary.hidden_share if summary else None,
        "identical_to_ar": first_difference(entrant, ar) is None if entrant.is_comparable else None,
        "tokens": entrant.n_tokens,
        "seconds": entrant.seconds,
        "summary": summary.as_dict() if summary else None,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Format results as a table; "law": the tokens have the target's distribution, with their own noise."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0)
    columns = {
        "tok/s": ("tok_s", "{:.1f}"),
        "ratio\nto ar": ("ratio_ar", "{:.2f}"),
        "ratio\nto sd": ("ratio_sd", "{:.2f}"),
        "tokens/\nround": ("tokens_per_round", "{:.2f}"),
        "accept-\nance": ("acceptance", "{:.2f}"),
        "nodes/\ntoken": ("nodes_per_token", "{:.2f}"),
        "hit\nrate": ("hit_rate", "{:.2f}"),
        "hidden\nshare": ("hidden_share", "{:.2f}"),
        "identical\nto ar": ("identical_to_ar", "{}"),
    }
    grid.add_column("method", no_wrap=True)
    for title in columns:
        grid.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(row["method"], *(_cell(row[key], shape) for key, shape in columns.values()))
    return grid


def _cell(value: float | bool | None, shape: str) -> str:
    """
    >>> _cell(None, "{:.2f}"), _cell(0.5, "{:.2f}"), _cell(True, "{}"), _cell(None, "{}")
    ('-', '0.50', 'yes', 'law')
    """
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "law" if shape == "{}" else "-"
    return shape.format(value)
