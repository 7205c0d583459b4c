"""Progress on standard error: a bar per stage on a terminal, lines in a log.

Other pipes get lines for downloads, but not for the stages of every start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from saguaro.types import Progress as Report

log = logging.getLogger(__name__)

EVERY_START = ("compiling CPU kernels", "loading weights", "packing weights", "loading the draft", "capturing")


@contextmanager
def progress_bar(is_logged: bool = False) -> Iterator[Report]:
    """Return a callback that reports stages. Draws nothing until it is called."""
    console = Console(stderr=True)
    if console.is_terminal:
        yield from _bars(console)
    else:
        yield _lines(console, is_logged)


def _bars(console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description:>24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    stages: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if not stages:
            bar.start()
        if stage not in stages:
            stages[stage] = bar.add_task(stage, total=total)
        bar.update(stages[stage], completed=done)

    try:
        yield report
    finally:
        if stages:
            bar.live.transient = set(stages) <= set(EVERY_START)  # remove the bars of stages that every start has
            bar.stop()


def _lines(console: Console, is_logged: bool) -> Report:
    told: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage in told:
            return
        told.add(stage)
        if is_logged:
            log.info("%s ...", stage)
        elif stage not in EVERY_START:
            console.print(f"{stage} ...")

    return report
