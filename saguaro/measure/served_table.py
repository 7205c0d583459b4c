"""The table of servers measured at one concurrency."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from saguaro.measure.served import PERCENTILES


def served_table(concurrency: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Format results; times are milliseconds, as percentiles 50/90/99."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0, title=f"concurrency {concurrency}", title_justify="left")
    grid.add_column("server", overflow="fold")
    for title in ("tok/s", "ratio", "first text\nms", "per token\nms", "gap\nms", "same\ntext"):
        grid.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        same = "-" if row["same_text"] is None else f"{row['same_text']}/{row['compared']}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        times = (cell(row[key]) for key in ("ttft_ms", "per_token_ms", "gap_ms"))
        grid.add_row(row["entry"] + (" FAILED" if row["failure"] else ""), f"{row['tok_s']:.1f}", ratio, *times, same)
    return grid


def cell(spread: Mapping[str, float] | None) -> str:
    """Percentiles with two significant digits at least.

    >>> cell({"p50": 1.234, "p90": 12.3, "p99": 1234.5}), cell(None)
    ('1.2/12/1234', '-')
    """
    if spread is None:
        return "-"
    found = (spread[f"p{n}"] for n in PERCENTILES)
    return "/".join(f"{one:.1f}" if one < 10 else f"{one:.0f}" for one in found)
