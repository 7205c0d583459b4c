"""Measures the cells that are not finished yet, one after the other. Interrupted at any moment, it can go on."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from saguaro.errors import SaguaroError
from saguaro.report.cell import Cell
from saguaro.report.engines import Engines, Pair
from saguaro.report.measure import measure
from saguaro.report.store import Finished, Store

Tell = Callable[[str], None]


@dataclass(kw_only=True)
class Runner:
    """Runs cells. Pairs are loaded when the first cell needs them."""

    store: Store
    pairs: Mapping[str, Callable[[], Pair]]
    texts: Mapping[str, Sequence[str]]  # of each prompt set
    rows: int  # the largest batch
    circumstances: Mapping[str, Any]  # kept with every cell
    tell: Tell
    _open: dict[str, Engines] = field(default_factory=dict, init=False)

    def finished(self, cells: Sequence[Cell]) -> dict[str, Finished]:
        """The cells that need not be measured, by name."""
        found = {cell.name: self.store.read(cell, self.texts_of(cell)) for cell in cells}
        return {name: one for name, one in found.items() if one is not None}

    def run(self, cells: Sequence[Cell]) -> dict[str, Finished]:
        """Measure what is not finished, pair by pair. A cell that fails is reported, and measured again the
        next time."""
        done, order = self.finished(cells), list(self.pairs)
        left = sorted((cell for cell in cells if cell.name not in done), key=lambda cell: order.index(cell.pair))
        self._say_what_is_left(cells, left)
        clock = _Clock([cell.n_tokens for cell in left])
        try:
            for index, cell in enumerate(left, start=len(cells) - len(left) + 1):
                began = time.perf_counter()
                done[cell.name] = self._measured(cell)
                seconds = time.perf_counter() - began
                about = clock.after(cell.n_tokens, seconds)
                self.tell(f"[{index}/{len(cells)}] {cell.name}: {seconds:.0f} s{about}")
        finally:
            self._close()
        return done

    def texts_of(self, cell: Cell) -> list[str]:
        """The prompts of a cell; a set that is too small is used again from the first on."""
        known = self.texts[cell.prompts]
        return [known[index % len(known)] for index in range(cell.n_prompts)]

    def _measured(self, cell: Cell) -> Finished:
        began = time.perf_counter()
        moment = datetime.now().astimezone().isoformat(timespec="seconds")
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # of everything that runs on the machine
        texts, engines = self.texts_of(cell), self._engines(cell.pair)
        try:
            found = measure(cell, texts, engines)
        except SaguaroError as e:  # of this cell's settings for this pair; the others may be fine
            self.tell(f"{cell.name} cannot be measured: {e}")
            return {"failed": str(e)}
        facts = {"date": moment, "seconds": time.perf_counter() - began, "load": load, "pair": engines.pair.facts()}
        return self.store.write(cell, texts, {**facts, **self.circumstances, "measured": found})

    def _engines(self, name: str) -> Engines:
        """The engines of a pair. Only one pair is loaded at a time."""
        if name not in self._open:
            self._close()
            self._open[name] = Engines(self.pairs[name](), self.rows)
        return self._open[name]

    def _close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _say_what_is_left(self, cells: Sequence[Cell], left: Sequence[Cell]) -> None:
        n_old = sum(self.store.is_outdated(cell, self.texts_of(cell)) for cell in left)
        if len(left) < len(cells):
            self.tell(f"{len(cells) - len(left)} of {len(cells)} cells are finished in {self.store.folder}")
        if n_old:
            self.tell(
                f"{n_old} finished cells are of other settings, models, versions or another machine: measured again"
            )


class _Clock:
    """Guesses how long the rest takes, from what the tokens so far took."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left, self._done, self._seconds = sum(tokens), 0, 0.0

    def after(self, n_tokens: int, seconds: float) -> str:
        self._left, self._done, self._seconds = self._left - n_tokens, self._done + n_tokens, self._seconds + seconds
        if not self._left:
            return ""
        minutes = self._seconds / max(1, self._done) * self._left / 60
        return f"; about {minutes:.0f} min left" if minutes >= 1 else "; less than a minute left"
