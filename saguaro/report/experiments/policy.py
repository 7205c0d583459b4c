"""Ours: the policy, which measures what pays, against settings that are fixed."""

from typing import Any

from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Figures, Found, finished, mean, number, of_summary, ratio, speed
from saguaro.report.experiments.common import AR, POLICY, shapes
from saguaro.report.page import Plot, Section, Table


def cells(profile: Profile) -> list[Cell]:
    """Every other batch size, greedy."""
    return [shapes(profile, batch, profile.temperatures[0]) for batch in profile.batches[::2]]


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = {cell.batch: each for cell, each in finished(found, cells(profile))}
    names = list(next(iter(done.values())))
    head = ("setting", *(f"batch {batch}" for batch in done))
    rows = [(name, *(number(speed(each[name]), 1) for each in done.values())) for name in names]
    rows.append(("policy / best fixed", *(number(_to_best(each)) for each in done.values())))
    svg = chart.plot("policy", lambda axes: _draw(axes, done, names))
    return Section(
        paper="The paper fixes lookahead, fan-out and backup for each of its settings.",
        found=[_text(batch, each) for batch, each in done.items()]
        + [
            f"The policy has {number(mean([_to_best(each) for each in done.values()]))} times the speed of the best "
            "fixed setting, in the mean. It begins without anything learnt; `saguaro tune` lets it begin with "
            "measured times."
        ],
        parts=[
            Plot(svg, "Greedy: speed over plain decoding, by batch size."),
            Table(head, rows, "tok/s of all rows together."),
        ],
    )


def _best(each: dict[str, Figures]) -> str:
    return max((name for name in each if name != POLICY), key=lambda name: speed(each[name]) or 0.0)


def _to_best(each: dict[str, Figures]) -> float | None:
    return ratio(speed(each[POLICY]), speed(each[_best(each)]))


def _text(batch: int, each: dict[str, Figures]) -> str:
    own, best = each[POLICY], _best(each)
    return (
        f"Batch {batch}: the best fixed setting is {best} ({number(speed(each[best]), 1)} tok/s); the policy has "
        f"{number(speed(own), 1)} tok/s, prepares in {100 * (of_summary(own, 'prepared') or 0.0):.0f} % of the "
        f"rounds, and verifies {number(of_summary(own, 'nodes_per_token'))} nodes per token."
    )


def _draw(axes: Any, done: dict[int, dict[str, Figures]], names: list[str]) -> None:
    series = {
        name: [ratio(speed(each[name]), speed(each[AR])) for each in done.values()] for name in names if name != AR
    }
    chart.bars(axes, [f"batch {batch}" for batch in done], series)
    axes.axhline(1, color=chart.INK, linewidth=1)
    axes.set_ylabel("speed over ar")


POLICY_AGAINST_FIXED = Experiment(
    name="policy",
    title="Ours: the policy and fixed settings",
    about="the default, which measures what pays, against fixed chains and trees",
    cells=cells,
    section=section,
)
