"""Plots as SVG that takes its colours from the page: readable in light and dark, and printed in light.

Plots are drawn with a palette of marker colours, which are then replaced by the page's CSS variables.
"""

import io
import re
from collections.abc import Callable
from typing import Any

from saguaro.errors import ConfigError

INK, QUIET, FAINT = "#222222", "#666666", "#d9d9d9"
COLOURS = ("#0072b2", "#c75000", "#00805d", "#a6558c", "#8a6d00", "#2f4b7c", "#757575")  # safe for colour blindness
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
VARIABLES = {INK: "--ink", QUIET: "--quiet", FAINT: "--faint"} | {
    colour: f"--c{index}" for index, colour in enumerate(COLOURS, start=1)
}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

LETTERS = (80, 125)  # that a line of a legend has room for, below one panel and below two

Draw = Callable[..., None]  # gets one axes for each panel


def check_matplotlib() -> None:
    """Refuse to begin without what draws."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        raise ConfigError("the report draws with matplotlib, which is missing; pip install 'saguaro-llm[bench]'") from e


def plot(name: str, draw: Draw, panels: int = 1) -> str:
    """An SVG element with so many panels side by side. The same name and data give the same text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no window and no global state

    with rc_context({**STYLE, "svg.hashsalt": name, "axes.prop_cycle": f"cycler('color', {list(COLOURS)})"}):
        figure = Figure(figsize=(4.9 * panels if panels > 1 else 6.2, 3.9), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for each in axes:
            each.grid(color=FAINT, linewidth=0.7)
        draw(*axes)
        _legend(figure, axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return themed(file.getvalue(), name, "wide" if panels > 1 else "narrow")


def _legend(figure: Any, axes: Any) -> None:
    """The series of all panels, once, below them."""
    named = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    if named:
        n_columns = max(1, min(len(named), LETTERS[len(axes) > 1] // (max(map(len, named)) + 7)))
        shape = {"ncols": n_columns, "handlelength": 1.8, "columnspacing": 1.4}
        figure.legend(named.values(), named, loc="outside lower center", fontsize=10, **shape)


def from_zero(axes: Any) -> None:
    """Begin the vertical axis at 0, with room above."""
    top = axes.dataLim.ymax
    axes.set_ylim(0, 1.1 * top if 0 < top < float("inf") else 1)


def themed(svg: str, name: str, shape: str) -> str:
    """The element alone, with the page's colours, and with ids that no other picture of the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        svg = re.sub(colour, f"var({variable})", svg, flags=re.IGNORECASE)
    prefix = re.sub(r"\W+", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    svg = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1sans-serif", svg)
    return svg.replace("<svg ", f'<svg class="{shape}" role="img" aria-label="{prefix}" ', 1)


def line(axes: Any, index: int, x: list[float], y: list[float], label: str, **more: Any) -> None:
    """A series with the colour and the marker of its number."""
    style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5.5}
    axes.plot(x, y, label=label, **{**style, "linewidth": 1.6, **more})


def log_axis(axis: Any, base: float = 10, ticks: list[float] | None = None) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    axis._set_axes_scale("log", base=base)
    axis.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(base=10, subs=(1, 2, 3, 5, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def title(axes: Any, text: str) -> None:
    """The title of a panel."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")


def bars(axes: Any, groups: list[str], series: dict[str, list[float | None]]) -> None:
    """Bars by group, one for each series; what was not measured has none."""
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        there = [(at, value) for at, value in enumerate(values) if value is not None]
        x = [at - 0.4 + width * (index + 0.5) for at, _ in there]
        axes.bar(x, [value for _, value in there], width=0.92 * width, color=COLOURS[index], label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
