"""Cells: the units of a report that are measured, written and resumed. Profiles: how large they are.

A cell is plain data, so it is its own fingerprint. Experiments that need the same measurement name the same cell, and
it is measured once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIDE_BY_SIDE, RANKS = "side by side", "ranks"  # what is measured (saguaro.report.measure)
MORE_TO_PREPARE = 5  # times as long takes a token if outcomes are prepared for it in the target's thread


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One way to decode: a name for tables, and the engine's settings."""

    name: str
    settings: Mapping[str, Any]

    @property
    def prepares_inline(self) -> bool:
        """Whether it always prepares, in the target's thread."""
        return self.settings.get("prepare") == "always" and self.settings.get("link") == "inline"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement. Its name is unique in a report, and the name of its file."""

    name: str
    entries: tuple[Entry, ...]  # run in turn on the same prompts; outputs are compared with the first one's
    prompts: str  # the name of a set
    n_prompts: int
    max_tokens: int
    kind: str = SIDE_BY_SIDE
    pair: str = ""  # the name of a pair
    batch: int = 1
    temperature: float = 0.0

    @property
    def n_tokens(self) -> int:
        """What a cell costs, roughly, as tokens that are generated."""
        each = (MORE_TO_PREPARE if entry.prepares_inline else 1 for entry in self.entries)
        return sum(each) * self.n_prompts * self.max_tokens


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The sizes of a report."""

    name: str  # the flag
    about: str
    pairs: tuple[str, ...] = ()  # names; the first is the one of all experiments but the tables
    sets: tuple[str, ...] = ()  # prompt sets
    n_prompts: int  # of a cell
    max_tokens: int
    n_recorded: int  # prompts of a cell that records ranks
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    weights: tuple[float, ...]  # C of Saguaro sampling
    shapes: tuple[tuple[int, int, int], ...]  # lookahead, nodes and width of speculations
    lookahead: int = 4  # K
    budget: int = 8  # M
    candidates: int = 16  # whose ranks are recorded
    projected: int = 16  # the batch size of the projection to several drafts
    apart: Mapping[str, Any] = field(default_factory=dict)  # settings of a draft that works beside the target

    @property
    def pair(self) -> str:
        """The pair of most experiments."""
        return self.pairs[0]


CHAINS_AND_TREES = ((2, 2, 1), (4, 4, 1), (8, 8, 1), (6, 8, 2), (8, 16, 4), (8, 32, 8))

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="quick",
            about="about ten minutes on two quiet cores",
            n_prompts=4,
            max_tokens=48,
            n_recorded=4,
            temperatures=(0.0, 0.7, 1.0),
            batches=(1, 2, 4, 8),
            weights=(1.0, 0.75, 0.5, 0.25, 0.0),
            shapes=CHAINS_AND_TREES,
            apart={"link": "process"},
        ),
        Profile(
            name="full",
            about="more prompts, longer outputs, larger batches: hours on two cores",
            n_prompts=24,
            max_tokens=192,
            n_recorded=24,
            temperatures=(0.0, 0.3, 0.7, 1.0),
            batches=(1, 2, 4, 8, 16, 32),
            weights=(1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0),
            shapes=(*CHAINS_AND_TREES, (8, 64, 16)),
            candidates=32,
            apart={"link": "process"},
        ),
        Profile(
            name="gpu",
            about="grown pairs of 32B and 8B with 0.6B on one GPU",
            n_prompts=8,
            max_tokens=128,
            n_recorded=8,
            temperatures=(0.0, 0.7, 1.0),
            batches=(1, 2, 4, 8, 16, 32),
            weights=(1.0, 0.8, 0.6, 0.4, 0.2, 0.0),
            shapes=((4, 4, 1), (8, 8, 1), (8, 15, 4), (8, 31, 8)),
            lookahead=6,
            candidates=32,
            apart={"link": "inline"},
        ),
    )
}
