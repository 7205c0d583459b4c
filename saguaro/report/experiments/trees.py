"""Ours: chains against trees, by the nodes that are verified."""

from typing import Any

from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Figures, Found, finished, number, of_summary, ratio, some, speed
from saguaro.report.experiments.common import AR, POLICY, shape_name, shapes
from saguaro.report.page import Plot, Section, Table


def cells(profile: Profile) -> list[Cell]:
    """Batch 1, greedy and at the highest temperature."""
    heats = dict.fromkeys((profile.temperatures[0], profile.temperatures[-1]))
    return [shapes(profile, 1, heat) for heat in heats]


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = [(cell.temperature, each) for cell, each in finished(found, cells(profile))]
    head = ("temperature", "speculation", "tokens per round", "nodes per token", "tok/s", "to ar")
    rows = [(some(heat), name, *_row(each, name)) for heat, each in done for name in each if name != POLICY]
    svg = chart.plot("trees", lambda *axes: _draw(axes, profile, done), panels=2)
    return Section(
        paper="The paper speculates chains, and names trees as something that SSD can be combined with.",
        found=[_text(profile, heat, each) for heat, each in done],
        parts=[
            Plot(svg, "By the most nodes that a round verifies. Dashed: chains; solid: trees."),
            Table(head, rows, "nodes per token: speculated tokens verified for each token of output."),
        ],
    )


def _text(profile: Profile, heat: float, each: dict[str, Figures]) -> str:
    tokens = {name: of_summary(each[name], "tokens_per_round") or 0.0 for name in each if name not in (AR, POLICY)}
    best = {
        kind: max((name for name in tokens if kind in name), key=lambda name: speed(each[name]) or 0.0)
        for kind in ("chain", "tree")
        if any(kind in name for name in tokens)
    }
    most = max(tokens, key=lambda name: tokens[name])
    fastest = " and ".join(
        f"{name.removeprefix('sd, ')} ({number(speed(each[name]), 1)} tok/s)" for name in best.values()
    )
    start = some(heat)
    return (
        f"{start[0].upper()}{start[1:]}: most tokens per round has the {most.removeprefix('sd, ')}, "
        f"{tokens[most]:.2f}. The fastest chain and tree are the {fastest}. A larger tree pays only where verifying "
        "more tokens takes little more time, which depends on the machine."
    )


def _row(each: dict[str, Figures], name: str) -> tuple[str, ...]:
    own = each[name]
    return (
        number(of_summary(own, "tokens_per_round")),
        number(of_summary(own, "nodes_per_token")),
        number(speed(own), 1),
        number(ratio(speed(own), speed(each[AR]))),
    )


def _draw(axes: Any, profile: Profile, done: list[tuple[float, dict[str, Figures]]]) -> None:
    for index, (heat, each) in enumerate(done):
        for is_tree in (False, True):
            chosen = [shape for shape in profile.shapes if (shape[2] > 1) == is_tree]
            for panel, value in ((axes[0], _tokens), (axes[1], speed)):
                points = [(float(shape[1]), value(each[shape_name(*shape)])) for shape in chosen]
                known = [(x, y) for x, y in points if y is not None]
                label = f"{'trees' if is_tree else 'chains'}, {some(heat)}"
                style = {} if is_tree else {"linestyle": (0, (4, 2))}
                chart.line(panel, 2 * index + is_tree, [x for x, _ in known], [y for _, y in known], label, **style)
    for panel, name in zip(axes, ("tokens per round", "tok/s"), strict=True):
        chart.log_axis(panel.xaxis, base=2, ticks=[2, 4, 8, 16, 32, 64])
        panel.set_xlabel("nodes verified per round")
        chart.from_zero(panel)
        chart.title(panel, name)


def _tokens(figures: Figures) -> float | None:
    return of_summary(figures, "tokens_per_round")


TREES = Experiment(
    name="trees",
    title="Ours: chains and trees",
    about="tokens per round and speed of chains and trees, by nodes",
    cells=cells,
    section=section,
)
