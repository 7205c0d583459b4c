"""Puts a report together: the cells that its experiments need, and the page that they make."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Found, spread
from saguaro.report.experiments.exact import n_different
from saguaro.report.page import Chapter, Page, html
from saguaro.report.store import Finished, Store, write_whole

TITLE = "Speculative speculative decoding, measured here"
LEAD = (
    "The experiments of the paper (arXiv 2603.03251), redone by Saguaro on this machine, and some of our own. Speeds "
    "are of decoding alone, in rounds with a full batch; the methods of a table or plot took turns on the same "
    "prompts, so other load on the machine slowed all of them. Compare them within a table, as ratios."
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is measured, and how a reader would redo it."""

    profile: Profile
    experiments: Sequence[Experiment]
    command: str  # without --only
    only: str | None = None  # as it was given

    @property
    def cells(self) -> list[Cell]:
        """The cells of all experiments, each once."""
        named = [cell for one in self.experiments for cell in one.cells(self.profile)]
        unique = {cell.name: cell for cell in named}
        assert all(unique[cell.name] == cell for cell in named), "two cells have the same name"
        return list(unique.values())

    @property
    def whole_command(self) -> str:
        """The command that makes this report."""
        return self.command if self.only is None else f"{self.command} --only {self.only}"

    def page(self, done: Mapping[str, Finished]) -> Page:
        """The page of these cells; some may have failed."""
        found = measured(done)
        facts = facts_of([found[name] for name in found], self.whole_command, len(self.cells), len(found))
        return Page(
            title=TITLE, lead=LEAD, facts=facts, chapters=[self._chapter(one, done) for one in self.experiments]
        )

    def _chapter(self, one: Experiment, done: Mapping[str, Finished]) -> Chapter:
        cells, found = one.cells(self.profile), measured(done)
        missing = [cell.name for cell in cells if cell.name not in done]
        failed = [f"{cell.name}: {done[cell.name]['failed']}" for cell in cells if "failed" in done.get(cell.name, {})]
        said = [f"Not measured yet: {', '.join(missing)}."] if missing else []
        said += [f"Could not be measured: {'; '.join(failed)}."] if failed else []
        has_any = any(cell.name in found for cell in cells)
        return Chapter(
            name=one.name,
            title=one.title,
            section=one.section(self.profile, found) if has_any else None,
            missing=" ".join(said),
            command=f"{self.command} --only {one.name}",
        )

    def write(self, store: Store, done: Mapping[str, Finished]) -> int:
        """Write page and JSON; return how many tokens differ that must not."""
        found = measured(done)
        facts = {"command": self.whole_command, "profile": self.profile.name, "cells": dict(found)}
        write_whole(store.folder / "report.json", json.dumps(facts, indent=1) + "\n")
        write_whole(store.folder / "report.html", html(self.page(done)))
        return n_different(found)


def measured(done: Mapping[str, Finished]) -> Found:
    """The cells that did not fail."""
    return {name: one for name, one in done.items() if "measured" in one}


def facts_of(found: Sequence[Finished], command: str, n_cells: int, n_found: int) -> list[tuple[str, str]]:
    """What the reader must know: machine, models, versions, when, how."""
    facts = [("command", command), ("cells", f"{n_found} of {n_cells} measured")]
    if not found:
        return facts
    machine, versions = found[0]["machine"], found[0]["versions"]
    dates = sorted(one["date"] for one in found)
    seconds = sum(one["seconds"] for one in found)
    pairs = {_pair(one["pair"]): None for one in found}
    return [
        ("machine", ", ".join(str(value) for value in (machine["gpu"], machine["cpu"]) if value)),
        ("cores", str(machine["cores"])),
        *(("pair", pair) for pair in pairs),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("measured", f"{dates[0]} to {dates[-1]}, {seconds / 60:.1f} minutes in all"),
        ("load", f"average of the minute before a cell: {spread([one.get('load') for one in found], 1)}"),
        *facts,
    ]


def _pair(facts: Mapping[str, Any]) -> str:
    more = [f"{name} {facts[name]:.3g}" for name in ("epsilon",) if name in facts]
    n = facts.get("threads")
    threads = [f"{n} thread{'s' * (n > 1)}"] if n else []
    target, draft = (Path(str(facts[name])).name for name in ("target", "draft"))
    return ", ".join([f"{target} with {draft}", str(facts["dtype"]), str(facts["device"]), *more, *threads])
