"""Figure 7: speed by method, and the frontier of latency and throughput."""

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
    speed,
    spread,
)
from saguaro.report.experiments.common import AR, SD, Point, chain, frontier, paper, plain, prompts_for
from saguaro.report.page import Plot, Section, Table

SAGUARO, SSD = "saguaro", "ssd"
METHODS = (AR, SD, SAGUARO, SSD)


def cells(profile: Profile) -> list[Cell]:
    """A cell for each batch size."""
    return [_cell(profile, batch) for batch in profile.batches]


def _cell(profile: Profile, batch: int) -> Cell:
    return Cell(
        name=f"methods, batch {batch}",
        entries=(plain(), chain(profile), paper(profile, SAGUARO), entry(SSD, "ssd")),
        pair=profile.pair,
        prompts=profile.sets[0],
        n_prompts=prompts_for(profile, batch),
        max_tokens=profile.max_tokens,
        batch=batch,
    )


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = {cell.batch: each for cell, each in finished(found, cells(profile))}
    head = ("batch", *(f"{name} tok/s" for name in METHODS), "ssd to sd", "ssd to ar", "ssd tokens per round")
    rows = [
        (
            str(batch),
            *(number(speed(each[name]), 1) for name in METHODS),
            number(ratio(speed(each[SSD]), speed(each[SD]))),
            number(ratio(speed(each[SSD]), speed(each[AR]))),
            number(of_summary(each[SSD], "tokens_per_round")),
        )
        for batch, each in done.items()
    ]
    svg = chart.plot("fig7", lambda *axes: _draw(axes, done, profile), panels=2)
    return Section(
        paper="SSD is up to twice as fast as speculative decoding and up to five times as fast as plain decoding at "
        "batch 1, and is on the frontier of latency and throughput over the batch sizes, most clearly at small ones.",
        found=_texts(done),
        differs=[
            "The paper gives SSD one more GPU than its baselines. Here all methods have the same machine, so what "
            "hides the draft is taken from the target. ssd measures whether preparing pays: it prepared in "
            f"{spread([of_summary(each[SSD], 'prepared') for each in done.values()])} of the rounds."
        ],
        parts=[
            Plot(
                svg,
                "Greedy. Left: all rows together. Right: each request's speed against the machine's; towards the "
                "upper right is better.",
            ),
            Table(
                head,
                rows,
                "sd: a chain, just in time; saguaro: the paper's algorithm, always preparing; ssd: the default.",
            ),
        ],
    )


def places(done: dict[int, dict[str, Figures]]) -> dict[Point, tuple[str, int]]:
    """Throughput and the speed of a request, of every method and batch size."""
    known = ((name, batch, speed(each[name])) for batch, each in done.items() for name in METHODS)
    return {(rate, rate / batch): (name, batch) for name, batch, rate in known if rate is not None}


def _texts(done: dict[int, dict[str, Figures]]) -> list[str]:
    to_sd = {batch: ratio(speed(each[SSD]), speed(each[SD])) for batch, each in done.items()}
    to_ar = {batch: ratio(speed(each[SSD]), speed(each[AR])) for batch, each in done.items()}
    won = [batch for batch, each in done.items() if max(METHODS, key=lambda name: speed(each[name]) or 0.0) == SSD]
    first, every = min(done), places(done)
    on_it = [every[point] for point in frontier(list(every))]
    best = max(METHODS, key=lambda name: speed(done[first][name]) or 0.0)
    return [
        f"At batch {first} ssd has {number(to_sd[first])} times the speed of sd and {number(to_ar[first])} times "
        f"that of ar; the fastest method there is {best}.",
        f"Over the batch sizes, ssd to sd is {spread(list(to_sd.values()))} (mean "
        f"{number(mean(list(to_sd.values())))}), ssd to ar {spread(list(to_ar.values()))}. ssd is the fastest of the "
        "four at " + (f"batch {', '.join(map(str, won))}." if won else "no batch size."),
        f"On the frontier of latency and throughput: {', '.join(f'{name} (batch {batch})' for name, batch in on_it)}.",
    ]


def _draw(axes: Any, done: dict[int, dict[str, Figures]], profile: Profile) -> None:
    left, right = axes
    best = frontier(list(places(done)))
    style = {"color": chart.INK, "linewidth": 1, "linestyle": (0, (4, 2))}
    right.plot([x for x, _ in best], [y for _, y in best], label="frontier", **style)
    for index, name in enumerate(METHODS):
        points = [(float(batch), rate) for batch, each in done.items() if (rate := speed(each[name])) is not None]
        x, y = [batch for batch, _ in points], [rate for _, rate in points]
        chart.line(left, index, x, y, name)
        chart.line(right, index, y, [rate / batch for batch, rate in points], name)
        for batch, rate in points:
            place = (rate, rate / batch)
            right.annotate(f"{batch:g}", place, (4, 4), textcoords="offset points", fontsize=8, color=chart.QUIET)
    chart.log_axis(left.xaxis, base=2, ticks=[float(batch) for batch in profile.batches])
    left.set_xlabel("batch size")
    left.set_ylabel("tok/s, all rows")
    chart.from_zero(left)
    right.set_xlabel("tok/s, all rows")
    right.set_ylabel("tok/s of a request")
    chart.from_zero(right)
    chart.title(left, "by batch size")
    chart.title(right, "latency and throughput, by batch size")


FIG7 = Experiment(
    name="fig7",
    title="Figure 7: speed by method",
    about="tok/s by method and batch size, and the frontier of latency and throughput",
    cells=cells,
    section=section,
)
