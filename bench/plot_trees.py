"""Plot results of bench.trees: tokens per round over the nodes verified, by prompt set and temperature.

    python -m bench.plot_trees trees.json --out docs/trees.svg

Cells are drawn from left to right by the most nodes that they verify; `ar` and `default` are left out.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.cells import settings_of
from bench.plot import FAINT, FORMATS, OTHER, STYLE
from saguaro.errors import ConfigError

COLOURS = ("#0072b2", "#e69f00", "#00805d", "#a6558c", "#c75000")
NEEDED = {"cell": str, "temperature": int | float, "by_set": dict}


@dataclass(frozen=True)
class Args:
    """What to draw."""

    file: tyro.conf.Positional[Path]
    """JSON of bench.trees."""
    out: Path = Path("docs/trees.svg")
    """The picture; the ending says its format."""


def main(args: Args) -> int:
    """Draw."""
    try:
        draw(read(args.file), args.out)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(args.out)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The cells that are drawn."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file of bench.trees --json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file of bench.trees --json") from error
    cells = [cell for cell in found if isinstance(cell, dict)] if isinstance(found, list) else []
    if not cells or any(not isinstance(cell.get(name), kind) for cell in cells for name, kind in NEEDED.items()):
        raise ConfigError(f"{path} is no file of bench.trees --json: a cell lacks one of {', '.join(NEEDED)}")
    drawn = [cell for cell in cells if ":" in cell["cell"]]
    if not drawn:
        raise ConfigError(f"{path} has no cell with a lookahead; measure some: bench.trees --cells sd:4 sd:8:8:16:4")
    return drawn


def label_of(cell: str) -> str:
    """The shape of a cell.

    >>> label_of("sd:8"), label_of("sd:8:8:16:4")
    ('chain\\n8', '16 by\\n4')
    """
    shape = settings_of(cell)
    nodes, width = shape.get("nodes", shape["lookahead"]), shape.get("width", 1)
    return f"chain\n{nodes}" if width == 1 else f"{nodes} by\n{width}"


def draw(cells: list[dict[str, Any]], out: Path) -> None:
    """Write the picture: a panel for each temperature, a line for each set."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure  # without pyplot: no window and no global state
    except ModuleNotFoundError as error:
        raise ConfigError("bench.plot_trees needs matplotlib; pip install 'saguaro-llm[bench]'") from error
    if out.suffix not in FORMATS or not out.parent.is_dir():
        raise ConfigError(f"out is {out}; it must end in {' or '.join(FORMATS)}, in a folder that exists")
    temperatures = sorted({cell["temperature"] for cell in cells})
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(temperatures), 3.6), facecolor="white")
        panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for axes, temperature in zip(panels, temperatures, strict=True):
            _draw_panel(axes, [cell for cell in cells if cell["temperature"] == temperature])
            axes.set_title(f"temperature {temperature:g}", loc="left", fontsize=11)
        panels[0].set_ylabel("tokens per round")
        panels[0].legend(frameon=False, fontsize=9)
        figure.tight_layout()
        # No date, so that the same data give the same file.
        figure.savefig(out, dpi=160, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw_panel(axes: Any, cells: list[dict[str, Any]]) -> None:
    for index, name in enumerate(cells[0]["by_set"]):
        colour = COLOURS[index] if index < len(COLOURS) else OTHER[0]
        axes.plot([cell["by_set"][name] for cell in cells], color=colour, marker="o", markersize=5, label=name)
    axes.set_xticks(range(len(cells)), [label_of(cell["cell"]) for cell in cells])
    axes.set_xlabel("nodes verified at most, and expanded per step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.set_ylim(bottom=1)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
