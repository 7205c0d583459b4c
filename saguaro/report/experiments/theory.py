"""The theorems: predicted from what was measured, against what was measured."""

from dataclasses import dataclass
from typing import Any

from saguaro.algo.theory import ssd_over_sd, ssd_over_sd_bounds, ssd_speedup
from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Figures, Found, mean, number, ratio, slowdown, speed, spread
from saguaro.report.experiments.common import AR, DRAFT, RANDOM, SD, fallbacks
from saguaro.report.experiments.fig6 import BACKUPS, by_batch, critical
from saguaro.report.page import Plot, Section, Table


@dataclass(frozen=True)
class Compared:
    """A prediction and its measurement."""

    theorem: str
    what: str
    predicted: float | None
    measured: float | None
    bounds: str = ""  # an interval, in place of a prediction
    seen: str = ""  # words, in place of a measurement

    @property
    def row(self) -> tuple[str, ...]:
        """For the table."""
        both = (self.bounds or number(self.predicted), self.seen or number(self.measured))
        return (self.theorem, self.what, *both, number(ratio(self.predicted, self.measured)))


def cells(profile: Profile) -> list[Cell]:
    """Those of figure 6."""
    return [fallbacks(profile, batch) for batch in profile.batches]


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = by_batch(profile, found)
    one = done.get(1, {})
    speeds = [] if not one else theorem_7(one)
    rows = [*speeds, *corollaries(one)]
    batches = {name: corollary_16(done, name) for name in BACKUPS}
    rows += [each for name in BACKUPS for each in batches[name]]
    star = critical(done, RANDOM)
    if star is not None:
        what = "b* of random tokens; measured: the first batch size at which they are faster"
        rows.append(
            Compared("Theorem 17", what, star.predicted, None, seen=str(star.faster[0]) if star.faster else "-")
        )
    svg = chart.plot("theory", lambda axes: _draw(axes, batches))
    return Section(
        paper="Hit rates, tokens per round and the times of drafting predict the speed of SSD over plain decoding "
        "(Theorem 7), over SD (Corollaries 8 and 9), in a batch (Corollary 16), and the best backup (Theorem 17).",
        found=_texts(one, speeds, batches),
        differs=_differs(one),
        parts=[
            Plot(svg, "Corollary 16: speed over ar by batch size; dashed: predicted from batch 1, solid: measured."),
            Table(("theorem", "what", "predicted", "measured", "predicted / measured"), [each.row for each in rows]),
        ],
    )


def theorem_7(one: dict[str, Figures]) -> list[Compared]:
    """Tokens per round and speed of each backup, at batch 1."""
    rows = []
    for name in BACKUPS:
        facts = one[name]["played"]
        if facts is not None:
            tokens = (facts["tokens_predicted"], facts["tokens_measured"])
            rows.append(Compared("Equation 1", f"tokens per round, {name}", *tokens))
            rows.append(Compared("Theorem 7", f"tok/s, {name}", facts["tok_s_predicted"], facts["tok_s_measured"]))
    return rows


def corollaries(one: dict[str, Figures]) -> list[Compared]:
    """SSD over SD, with the same drafter on a miss, and with one that takes no time."""
    if not one or one[SD]["played"] is None:
        return []
    sd, rows = one[SD]["played"], []
    if one[DRAFT]["played"] is not None:
        predicted = ssd_over_sd(one[DRAFT]["played"]["p_h"], sd["T_b"])
        rows.append(Compared("Corollary 8", "ssd, draft over sd", predicted, ratio(speed(one[DRAFT]), speed(one[SD]))))
    fast = one[RANDOM]["played"]
    if fast is not None:
        low, high = ssd_over_sd_bounds(fast["p_h"], max(1.0, fast["E_hit"]), max(1.0, sd["E_miss"]), sd["T_b"])
        between = f"{low:.2f} to {high:.2f}"
        rows.append(
            Compared(
                "Corollary 9", "ssd, random tokens over sd", None, ratio(speed(one[RANDOM]), speed(one[SD])), between
            )
        )
    return rows


def corollary_16(done: dict[int, dict[str, Figures]], name: str) -> list[Compared]:
    """Speed over ar in batches, from hit rates, tokens and times at batch 1."""
    facts = done[1][name]["played"] if 1 in done else None
    if facts is None:
        return []
    rates = (facts["p_h"], max(1.0, facts["E_hit"]), max(1.0, facts["E_miss"]), facts["T_p"], facts["T_b"])
    return [
        Compared(
            "Corollary 16",
            f"{name} over ar, batch {batch}",
            ssd_speedup(*rates, b=batch),
            ratio(speed(each[name]), speed(each[AR])),
        )
        for batch, each in done.items()
    ]


def _texts(one: dict[str, Figures], speeds: list[Compared], batches: dict[str, list[Compared]]) -> list[str]:
    texts = []
    for theorem in ("Equation 1", "Theorem 7"):
        found = [ratio(each.predicted, each.measured) for each in speeds if each.theorem == theorem]
        if found:
            texts.append(f"{theorem}: predicted over measured is {spread(found)} at batch 1.")
    found = [ratio(each.predicted, each.measured) for rows in batches.values() for each in rows]
    if found:
        texts.append(
            f"Corollary 16: predicted over measured is {spread(found)} over all batch sizes (mean "
            f"{number(mean(found))})."
        )
    for each in corollaries(one):
        predicted = each.bounds or number(each.predicted)
        texts.append(f"{each.theorem} gives {predicted} for {each.what}; measured: {number(each.measured)}.")
    return texts


def _differs(one: dict[str, Figures]) -> list[str]:
    slower = [slowdown(one[name], one[SD]) for name in BACKUPS] if one else []
    if not slower:
        return []
    wider = ratio(one[SD]["played"]["verify_ms"], _step_ms(one[AR]))
    return [
        "The theorems count in verifications of one length. Here a verification beside a preparation takes "
        f"{spread(slower)} times that of sd, whose draft and target take turns on the whole machine; and that of sd, "
        f"of K + 1 tokens, takes {number(wider)} times a step of ar. So Corollary 8 (never slower than SD) can fail "
        "here, and predictions over ar count neither."
    ]


def _step_ms(ar: Figures) -> float | None:
    rate = speed(ar)
    return 1e3 / rate if rate else None


def _draw(axes: Any, batches: dict[str, list[Compared]]) -> None:
    for index, (name, rows) in enumerate(batches.items()):
        points = [(float(each.what.rpartition(" ")[2]), each) for each in rows]
        guess = [(batch, each.predicted) for batch, each in points if each.predicted is not None]
        seen = [(batch, each.measured) for batch, each in points if each.measured is not None]
        chart.line(axes, index, [b for b, _ in seen], [v for _, v in seen], name)
        style = {"color": chart.COLOURS[index], "linewidth": 1.2, "linestyle": (0, (4, 2))}
        axes.plot([b for b, _ in guess], [v for _, v in guess], **style)
    ticks = sorted({float(each.what.rpartition(" ")[2]) for rows in batches.values() for each in rows})
    if ticks:
        chart.log_axis(axes.xaxis, base=2, ticks=ticks)
    chart.from_zero(axes)
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed over ar")


THEORY = Experiment(
    name="theory",
    title="Theory against measurement",
    about="Theorems 7 and 17 and Corollaries 8, 9 and 16: predicted and measured",
    cells=cells,
    section=section,
)
