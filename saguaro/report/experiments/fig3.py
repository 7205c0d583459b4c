"""Figure 3: misses fall as a power of the fan-out."""

from typing import Any

import torch

from saguaro.algo.calibrate import PowerLaw, Recorded, fit_power_law, hit_curve
from saguaro.errors import ConfigError
from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Found, number, some, spread
from saguaro.report.experiments.common import ranks
from saguaro.report.page import Plot, Section, Table

KINDS = {"primary": "after a hit (primary)", "backup": "after random tokens (backup)"}
Series = dict[str, dict[str, Recorded | None]]  # by kind, then by prompts and temperature
FEW = 30  # rounds below which no law is fitted


def cells(profile: Profile) -> list[Cell]:
    """Every prompt set, greedy and at the highest temperature."""
    heats = dict.fromkeys((profile.temperatures[0], profile.temperatures[-1]))
    return [ranks(profile, prompts, heat) for prompts in profile.sets for heat in heats]


def recorded(table: list[list[int]] | None) -> Recorded | None:
    """Rounds from their counts by k and rank; the last column is of bonus tokens that were no candidates."""
    if table is None:
        return None
    counts = torch.tensor(table)
    places = counts.nonzero().repeat_interleave(counts[counts > 0], dim=0)  # [R, 2]
    N = counts.shape[1] - 1
    rank = torch.where(places[:, 1] == N, -1, places[:, 1])
    return Recorded(places[:, 0], rank, len(table) - 1, N)


def misses(rounds: Recorded) -> list[float]:
    """The share of rounds whose bonus is not among the first F candidates, F = 1 .. N."""
    return [1 - hits for hits in hit_curve(rounds.rank, rounds.N)[1:].tolist()]


def law_of(rounds: Recorded | None) -> PowerLaw | None:
    """The fitted law; None if there are too few rounds, or misses do not fall."""
    if rounds is None or len(rounds.k) < FEW:
        return None
    try:
        return fit_power_law(hit_curve(rounds.rank, rounds.N))
    except ConfigError:
        return None


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = [(cell, found[cell.name]["measured"]) for cell in cells(profile) if cell.name in found]
    series: Series = {
        kind: {f"{cell.prompts}, {some(cell.temperature)}": recorded(measured[kind]) for cell, measured in done}
        for kind in KINDS
    }
    laws = {kind: {name: law_of(rounds) for name, rounds in each.items()} for kind, each in series.items()}
    fits = [law for each in laws.values() for law in each.values() if law is not None]
    rows = [
        (name, KINDS[kind], *_row(rounds, laws[kind][name]))
        for kind, each in series.items()
        for name, rounds in each.items()
    ]
    head = (
        "prompts",
        "speculation before",
        "rounds",
        "miss at F = 1",
        f"F = {profile.candidates}",
        "r",
        "scale",
        "rms",
    )
    svg = chart.plot("fig3", lambda *axes: _draw(axes, series, laws), panels=2)
    return Section(
        paper="The share of verification outcomes that a cache misses falls as a power of its fan-out, both after a "
        "speculation of the draft and after one of the backup.",
        found=[_text(fits, len(rows))],
        differs=_differs(series),
        parts=[
            Plot(svg, "Misses by fan-out F, on logarithmic axes; dashed: the fitted power law."),
            Table(head, rows, "scale: fitted miss rate at F = 1. rms: error of the fitted logarithm."),
        ],
    )


def _text(fits: list[PowerLaw], n_curves: int) -> str:
    if not fits:
        return f"None of the {n_curves} curves could be fitted: that needs {FEW} rounds, and misses that fall."
    return (
        f"{len(fits)} of {n_curves} curves could be fitted. The exponent r is {spread([law.r for law in fits])}, and "
        f"the fit is off by {spread([law.rms for law in fits])} in the logarithm (root mean square)."
    )


def _differs(series: Series) -> list[str]:
    first = [misses(rounds)[0] for each in series.values() for rounds in each.values() if rounds is not None]
    if not first:
        return []
    return [
        f"In the paper's law (scale 1) a cache of one candidate always misses. Here it misses in {spread(first)} of "
        "the rounds, so a factor is fitted beside the exponent, and the planner does the same."
    ]


def _row(rounds: Recorded | None, law: PowerLaw | None) -> tuple[str, ...]:
    if rounds is None:
        return ("0", *["-"] * 5)
    curve = misses(rounds)
    fit = (law.r, law.scale, law.rms) if law else (None, None, None)
    return (str(len(rounds.k)), number(curve[0], 3), number(curve[-1], 3), *(number(value) for value in fit))


def _draw(axes: Any, series: Series, laws: dict[str, dict[str, PowerLaw | None]]) -> None:
    for panel, (kind, each) in zip(axes, series.items(), strict=True):
        for index, (name, rounds) in enumerate(each.items()):
            if rounds is None:
                continue
            points = [(float(F), miss) for F, miss in enumerate(misses(rounds), start=1) if miss > 0]
            x, y = [F for F, _ in points], [miss for _, miss in points]
            chart.line(panel, index, x, y, name, linestyle="none", markersize=4)
            law = laws[kind][name]
            if law is not None:
                fitted = [law.scale * F**-law.r for F in range(1, rounds.N + 1)]
                ends = list(range(1, rounds.N + 1))
                panel.plot(ends, fitted, color=chart.COLOURS[index], linewidth=1.2, linestyle=(0, (4, 2)))
        chart.log_axis(panel.xaxis, ticks=[1, 2, 4, 8, 16, 32])
        chart.log_axis(panel.yaxis)
        panel.set_xlabel("fan-out F")
        panel.set_ylabel("miss rate")
        chart.title(panel, KINDS[kind])


FIG3 = Experiment(
    name="fig3",
    title="Figure 3: misses by fan-out",
    about="the power law of misses, with its exponent, after primary and backup, by prompt set and temperature",
    cells=cells,
    section=section,
)
