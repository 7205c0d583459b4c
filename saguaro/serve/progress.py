"""A progress bar on standard error for what takes long: downloads, conversions."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from saguaro.model.default import Progress as Report


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A callback that draws one line per stage; nothing is drawn until it is called."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console)
    stages: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if not stages:
            bar.start()
        if stage not in stages:
            stages[stage] = bar.add_task(stage, total=total)
            if not console.is_terminal:
                console.print(f"{stage} ...")
        bar.update(stages[stage], completed=done)

    try:
        yield report
    finally:
        if stages:
            bar.stop()
