"""Figure 4: geometric against uniform fan-out, and ours."""

from typing import Any

from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import (
    Experiment,
    Figures,
    Found,
    entry,
    finished,
    mean,
    number,
    of_summary,
    ratio,
    rounds_of,
    slowdown,
    some,
    speed,
    spread,
)
from saguaro.report.experiments.common import AR, SD, chain, paper, plain
from saguaro.report.page import Plot, Section, Table

UNIFORM, GEOMETRIC, OURS = "uniform", "geometric", "ours"
PREPARING = (UNIFORM, GEOMETRIC, OURS)


def cells(profile: Profile) -> list[Cell]:
    """A cell for each temperature."""
    return [_cell(profile, heat) for heat in profile.temperatures]


def _cell(profile: Profile, temperature: float) -> Cell:
    ours = {"prepare": "always", "budget": profile.budget, **profile.apart}
    return Cell(
        name=f"fan-out, T={temperature:g}",
        entries=(
            plain(),
            chain(profile),
            paper(profile, UNIFORM, fan_out="uniform", fallback="draft"),
            paper(profile, GEOMETRIC, fan_out="geometric", fallback="draft"),
            entry(OURS, "ssd", **ours),
        ),
        pair=profile.pair,
        prompts=profile.sets[0],
        n_prompts=profile.n_prompts,
        max_tokens=profile.max_tokens,
        temperature=temperature,
    )


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = [(cell.temperature, each) for cell, each in finished(found, cells(profile))]
    head = ("temperature", "method", "hit rate", "tokens per round", "tok/s", "to sd", "to ar", "rounds")
    rows = [(some(heat), name, *_row(each, name)) for heat, each in done for name in each]
    svg = chart.plot("fig4", lambda *axes: _draw(axes, done), panels=2)
    return Section(
        paper="Spreading the cache geometrically over the number of accepted tokens hits more often than spreading "
        "it evenly, and is faster end to end, the more so at high temperatures.",
        found=_texts(done),
        differs=_differs(done),
        parts=[
            Plot(
                svg,
                f"K = {profile.lookahead}, {profile.budget} prepared outcomes, batch 1. ours: the tree of ssd, "
                "always prepared.",
            ),
            Table(head, rows, "rounds: of single requests, which the rates rest on."),
        ],
    )


def _texts(done: list[tuple[float, dict[str, Figures]]]) -> list[str]:
    hits = {name: [of_summary(each[name], "hit_rate") for _, each in done] for name in PREPARING}
    rates = {name: [ratio(speed(each[name]), speed(each[SD])) for _, each in done] for name in PREPARING}
    pairs = [(g, u) for g, u in zip(hits[GEOMETRIC], hits[UNIFORM], strict=True) if g is not None and u is not None]
    n_better = sum(g > u for g, u in pairs)
    best = max(PREPARING, key=lambda name: mean(rates[name]) or 0.0)
    averages = ", ".join(f"{name} {number(mean(hits[name]))}" for name in PREPARING)
    speeds = ", ".join(f"{name} {number(mean(rates[name]))}" for name in PREPARING)
    return [
        f"Geometric fan-out hits more often than uniform at {n_better} of {len(pairs)} temperatures. Mean hit rates: "
        f"{averages}.",
        f"Speed relative to sd, mean over temperatures: {speeds}; the fastest of the three is {best}.",
    ]


def _differs(done: list[tuple[float, dict[str, Figures]]]) -> list[str]:
    """What preparing costs the verification, where it was measured."""
    slower = [slowdown(each[name], each[SD]) for _, each in done for name in PREPARING]
    to_sd = [ratio(speed(each[name]), speed(each[SD])) for _, each in done for name in PREPARING]
    return [
        "The paper's draft has a device of its own, and its SSD is always faster than SD. Here target and draft "
        f"share one machine: the rest of a round, besides waiting for the draft, takes {spread(slower)} times as long "
        f"as that of sd, and the speed of the three methods relative to sd is {spread(to_sd)}."
    ]


def _row(each: dict[str, Figures], name: str) -> tuple[str, ...]:
    own = each[name]
    return (
        number(of_summary(own, "hit_rate")) if name in PREPARING else "-",
        number(of_summary(own, "tokens_per_round")),
        number(speed(own), 1),
        number(ratio(speed(own), speed(each[SD]))),
        number(ratio(speed(own), speed(each[AR]))),
        str(rounds_of(own)),
    )


def _draw(axes: Any, done: list[tuple[float, dict[str, Figures]]]) -> None:
    left, right = axes
    for index, name in enumerate((*PREPARING, SD, AR)):
        points = [(heat, of_summary(each[name], "hit_rate"), speed(each[name])) for heat, each in done]
        hits = [(heat, hit) for heat, hit, _ in points if hit is not None]
        if name in PREPARING and hits:
            chart.line(left, index, [heat for heat, _ in hits], [hit for _, hit in hits], name)
        speeds = [(heat, rate) for heat, _, rate in points if rate is not None]
        chart.line(right, index, [heat for heat, _ in speeds], [rate for _, rate in speeds], name)
    for panel, name in ((left, "hit rate"), (right, "tok/s")):
        panel.set_xlabel("temperature")
        chart.title(panel, name)
        chart.from_zero(panel)
    left.set_ylim(0, 1)


FIG4 = Experiment(
    name="fig4",
    title="Figure 4: geometric, uniform and ours",
    about="hit rate and speed of geometric and uniform fan-out and of our trees, by temperature",
    cells=cells,
    section=section,
)
