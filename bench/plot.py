"""Plot results of bench.gpu: the parts of a round at batch 1, and tokens per second over the batch size.

    python -m bench.plot gpu1.json gpu2.json --out docs/gpu.svg

Greedy cells only. Files of one pair are merged: a cell of a later file replaces the same cell of an earlier one.
"""

import json
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import tyro

from saguaro.errors import ConfigError

Cell = dict[str, Any]  # a line of bench.gpu's table
NUMBER = int | float
FORMATS = (".svg", ".png")

# Colours similar to Okabe and Ito's, which are safe for colour blindness; each series also has its own marker.
PARTS = {"verify": "#0072b2", "exposed": "#e69f00", "host": "#8c8c8c"}
INSIDE = {"verify": "white", "exposed": "black", "host": "white"}
SERIES = {
    "ar": ("#000000", "o"), "sd": ("#c75000", "s"), "ssd": ("#00805d", "D"),
    "transformers": ("#a6558c", "^"), "transformers, assisted": ("#a6558c", "v"),
}  # fmt: skip
OTHER = ("#757575", "P")
INK, QUIET, FAINT = "#222222", "#666666", "#d9d9d9"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "bench.plot", "font.size": 10, "text.color": INK}
STYLE |= {"axes.labelcolor": INK, "axes.edgecolor": "#888888", "xtick.color": INK, "ytick.color": INK}


@dataclass(frozen=True)
class Args:
    """What to draw."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """JSON of bench.gpu, all of one pair."""
    out: Path = Path("docs/gpu.svg")
    """The picture; the ending says its format."""


@dataclass(frozen=True)
class Measured:
    """The greedy cells of one pair."""

    pair: str
    floor_ms: float
    cells: tuple[Cell, ...]

    @property
    def rounds(self) -> list[Cell]:
        """Our own cells at batch 1, in drawing order."""
        own = [cell for cell in self.cells if cell["batch"] == 1 and "method" in cell]
        return sorted(own, key=lambda cell: (*_place(cell["method"]), cell["K"], cell["M"]))

    @property
    def series(self) -> dict[str, dict[int, Cell]]:
        """The fastest cell of each method and peer at every batch size."""
        found: dict[str, dict[int, Cell]] = {}
        for cell in sorted(self.cells, key=lambda cell: (*_place(series_of(cell)), cell["batch"], cell["tok_s"])):
            found.setdefault(series_of(cell), {})[cell["batch"]] = cell
        return found


def main(args: Args) -> int:
    """Draw."""
    try:
        draw(merge(args.files), args.out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(args.out)
    return 0


def merge(paths: tuple[Path, ...]) -> Measured:
    """The merged files; the floor is that of the last one."""
    if not paths:
        raise ConfigError("no file to draw; name one or more that bench.gpu --json has written")
    files = {path: read(path) for path in paths}
    first = paths[0]
    for path in paths:
        if pair_of(files[path]) != pair_of(files[first]):
            raise ConfigError(
                f"{first} is of {pair_of(files[first])} and {path} of {pair_of(files[path])}; a picture is of one pair"
            )
    cells = {(cell["cell"], cell["batch"]): cell for path in paths for cell in files[path]["cells"] if is_drawn(cell)}
    measured = Measured(pair_of(files[first]), files[paths[-1]]["floor_ms"], tuple(cells.values()))
    if not measured.rounds:
        raise ConfigError(
            f"no cell at batch 1 and temperature 0 in {', '.join(map(str, paths))}; measure some: "
            "bench.gpu --batches 1 --temperatures 0"
        )
    return measured


def read(path: Path) -> dict[str, Any]:
    """Read a file of bench.gpu and check the fields that are drawn."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file of bench.gpu --json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file of bench.gpu --json") from error
    _need(path, "the file", found, {"device": str, "dtype": str, "floor_ms": NUMBER, "args": dict, "cells": list})
    _need(path, "args", found["args"], {"target": str, "draft": str})
    for index, cell in enumerate(found["cells"]):
        _need(path, f"cell {index}", cell, {"cell": str, "batch": int, "T": NUMBER, "tok_s": NUMBER | None})
        if "method" in cell:
            figures = {"method": str, "K": int, "M": int, **dict.fromkeys(PARTS, NUMBER)}
            _need(path, f"cell {index}, {cell['cell']},", cell, figures)
    return dict(found)


def _need(path: Path, what: str, found: Any, names: dict[str, Any]) -> None:
    """Check that all fields exist and have the right type."""
    has = found if isinstance(found, dict) else {}
    lacks = [name for name, kind in names.items() if name not in has or not isinstance(has[name], kind)]
    if lacks:
        raise ConfigError(f"{path} is no file of bench.gpu --json: {what} lacks {', '.join(lacks)}")


def pair_of(found: dict[str, Any]) -> str:
    """Description of the pair and its device; targets of one shape with different noise are different pairs."""
    noise = f", noise {found['epsilon']:.2g}" if "epsilon" in found else ""
    return f"{found['args']['target']} with {found['args']['draft']}{noise}, {found['dtype']}, {found['device']}"


def is_drawn(cell: Cell) -> bool:
    """Whether a cell is greedy and was measured; a cell without rounds is reported."""
    if cell["tok_s"] is None:
        print(f"left out, for no round of it was counted: {cell['cell']} at batch {cell['batch']}", file=sys.stderr)
    return cell["T"] == 0 and cell["tok_s"] is not None


def series_of(cell: Cell) -> str:
    """The series of a cell.

    >>> series_of({"cell": "ssd:6:8", "method": "ssd"}), series_of({"cell": "hf+5c"})
    ('ssd', 'transformers, assisted')
    """
    if "method" in cell:
        return str(cell["method"])
    name, plus, _ = str(cell["cell"]).partition("+")
    return {"hf": "transformers"}.get(name, name) + (", assisted" if plus else "")


def _place(series: str) -> tuple[float, str]:
    """Sort key of a series: the known ones first."""
    return (list(SERIES).index(series) if series in SERIES else inf, series)


def draw(measured: Measured, out: Path) -> None:
    """Write the picture."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # without pyplot: no window and no global state
    except ModuleNotFoundError as error:
        raise ConfigError("bench.plot needs matplotlib; pip install 'saguaro-llm[bench]'") from error
    if out.suffix not in FORMATS or not out.parent.is_dir():
        raise ConfigError(f"out is {out}; it must end in {' or '.join(FORMATS)}, in a folder that exists")
    with rc_context(STYLE):
        figure = Figure(figsize=(10.4, max(4.0, 1.7 + 0.37 * len(measured.rounds))), facecolor="white")
        figure.text(0.99, 0.015, measured.pair, ha="right", va="bottom", fontsize=9, color=QUIET)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        draw_rounds(left, measured.rounds, measured.floor_ms)
        draw_series(right, measured.series)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
        figure.tight_layout(rect=(0, 0.04, 1, 1), w_pad=3)
        # No date, so that the same data give the same file.
        figure.savefig(out, dpi=160, metadata={"Date": None} if out.suffix == ".svg" else None)


def draw_rounds(axes: Any, cells: list[Cell], floor_ms: float) -> None:
    """A stacked bar for every cell: milliseconds of a round by part, and tokens per second."""
    ends = [sum(cell[part] for part in PARTS) for cell in cells]
    best, widest = max(cell["tok_s"] for cell in cells), max([*ends, floor_ms])
    for row, (cell, end) in enumerate(zip(cells, ends, strict=True)):
        start = 0.0
        for part, colour in PARTS.items():
            axes.barh(row, cell[part], left=start, height=0.68, color=colour, label=part if row == 0 else None)
            if cell[part] > 0.1 * widest:
                style = {"ha": "center", "va": "center", "fontsize": 9, "color": INSIDE[part]}
                axes.text(start + cell[part] / 2, row, f"{cell[part]:.1f}", **style)
            start += cell[part]
        weight = "bold" if cell["tok_s"] == best else "normal"
        axes.text(end + 0.015 * widest, row, f"{cell['tok_s']:.1f} tok/s", va="center", fontweight=weight)
    axes.axvline(floor_ms, color="white", linewidth=2.2)
    axes.axvline(floor_ms, color=INK, linestyle=(0, (4, 2)), linewidth=1.3, label=f"floor {floor_ms:.1f} ms")
    axes.set_yticks(range(len(cells)), [cell["cell"] for cell in cells], family="monospace")
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlim(0, 1.27 * widest)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms of a round")
    _title(axes, "A round at batch 1, temperature 0")
    floor, *parts = axes.get_legend_handles_labels()[0]  # lines come before bars
    shape = {"ncols": 4, "borderpad": 0, "handlelength": 1.3, "handletextpad": 0.5, "columnspacing": 1.4}
    axes.legend(handles=[*parts, floor], loc="lower left", bbox_to_anchor=(-0.01, 1), frameon=False, **shape)


def draw_series(axes: Any, series: dict[str, dict[int, Cell]]) -> None:
    """Tokens per second over the batch size, a line for every method and a point for every peer."""
    batches = sorted({batch for points in series.values() for batch in points} | {1, 2, 4, 8, 16, 32})
    for name, points in series.items():
        colour, marker = SERIES.get(name, OTHER)
        rates = [cell["tok_s"] for cell in points.values()]
        axes.plot(list(points), rates, color=colour, marker=marker, markersize=6, linewidth=1.8, label=name)
    for batch in batches:
        _write_rates(axes, batch, {name: points[batch]["tok_s"] for name, points in series.items() if batch in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, list(map(str, batches)))
    axes.set_xlim(0.62, 1.65 * batches[-1])
    axes.set_yscale("log")
    axes.margins(y=0.18)
    _plain_ticks(axes.yaxis)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_xlabel("batch size")
    _title(axes, "Tokens a second")
    axes.annotate(
        "temperature 0, the fastest cell of each", (0, 1), (0, 6), xycoords="axes fraction", textcoords="offset points"
    )
    axes.legend(loc="lower right", fontsize=9, frameon=False, handlelength=1.8, labelspacing=0.35)


def _write_rates(axes: Any, batch: int, rates: dict[str, float]) -> None:
    """Labels: drafting methods above their points, the fastest on top; ar below its point, a peer beside it."""
    drafting = sorted((name for name in rates if name in ("sd", "ssd")), key=lambda name: rates[name])
    for name, rate in rates.items():
        at, (x, y), ha, va = rate, (-8, 0), "right", "center"
        if name == "ar":
            (x, y), ha, va = (8, -3), "left", "top"
        elif name in drafting:
            at, (x, y), ha, va = rates[drafting[-1]], (0, 7 + 11 * drafting.index(name)), "center", "bottom"
        style = {"ha": ha, "va": va, "fontsize": 9, "fontweight": "bold", "color": SERIES.get(name, OTHER)[0]}
        axes.annotate(f"{rate:,.0f}", (batch, at), (x, y), textcoords="offset points", **style)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=30)


def _plain_ticks(axis: Any) -> None:
    """Tick labels 1, 2, 5, 10, ... as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
