"""Figure 6: what drafts a miss, by batch size; and several drafts, projected."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from saguaro.algo import fanout
from saguaro.algo.calibrate import Recorded, fit_acceptance_rate, hit_table, outcome_frequencies
from saguaro.algo.theory import critical_batch_size, sd_speedup, ssd_speedup, unconditional_hit_rate
from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Figures, Found, finished, number, of_summary, slowdown, speed, spread
from saguaro.report.experiments.common import AR, DRAFT, NGRAM, RANDOM, SD, fallbacks, ranks
from saguaro.report.experiments.fig3 import law_of, recorded
from saguaro.report.page import Plot, Section, Table

BACKUPS = (DRAFT, RANDOM, NGRAM)
DRAFTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Critical:
    """b* of a fast backup, and the batch sizes at which it was measured to be faster than the model."""

    predicted: float
    faster: tuple[int, ...]


def cells(profile: Profile) -> list[Cell]:
    """A cell for each batch size, and the ranks that the projection needs."""
    return [*(fallbacks(profile, batch) for batch in profile.batches), _ranks(profile)]


def _ranks(profile: Profile) -> Cell:
    return ranks(profile, profile.sets[0], profile.temperatures[0])


def by_batch(profile: Profile, found: Found) -> dict[int, dict[str, Figures]]:
    """The entries of each finished batch size."""
    return {
        cell.batch: each for cell, each in finished(found, [fallbacks(profile, batch) for batch in profile.batches])
    }


def critical(done: dict[int, dict[str, Figures]], backup: str) -> Critical | None:
    """Theorem 17 from the rounds at batch 1, and what was measured; None without batch 1."""
    if 1 not in done or done[1][backup]["played"] is None or done[1][DRAFT]["played"] is None:
        return None
    slow, fast = done[1][DRAFT]["played"], done[1][backup]["played"]
    b = critical_batch_size(fast["p_hit_p"], fast["p_hit_b"], slow["E_miss"], fast["E_miss"], slow["T_b"])
    faster = [batch for batch, each in done.items() if (speed(each[backup]) or 0.0) > (speed(each[DRAFT]) or 0.0)]
    return Critical(b, tuple(sorted(faster)))


@dataclass(frozen=True)
class Projected:
    """What several drafts would give."""

    hit_rate: float
    to_sd: float


def projection(profile: Profile, found: Found) -> dict[int, Projected]:
    """By the number of drafts, each of which prepares M outcomes: hit rates from recorded ranks, tokens and times from
    batch 1, put together by Corollary 16. Empty without these."""
    done = by_batch(profile, found)
    cell = _ranks(profile)
    if cell.name not in found or 1 not in done or done[1][DRAFT]["played"] is None or done[1][SD]["played"] is None:
        return {}
    tables = found[cell.name]["measured"]
    kinds = [recorded(tables[kind]) for kind in ("primary", "backup")]
    if any(law_of(kind) is None for kind in kinds):
        return {}
    own, sd = done[1][DRAFT]["played"], done[1][SD]["played"]
    base = sd_speedup(sd["E_miss"], sd["T_b"])
    speeds = {}
    for n in DRAFTS:
        after_primary, after_backup = (_hits(kind, n * profile.budget) for kind in kinds if kind is not None)
        p_h = unconditional_hit_rate(after_primary, after_backup)
        T_p = min(1.0, own["T_p"])  # every draft prepares its own M outcomes in the time of one
        speedup = ssd_speedup(p_h, own["E_hit"], own["E_miss"], T_p, own["T_b"], profile.projected)
        speeds[n] = Projected(p_h, speedup / base)
    return speeds


def _hits(rounds: Recorded, budget: int) -> float:
    """The hit rate with so many outcomes, shared out by Theorem 12. Beyond the recorded candidates the law is used."""
    law, a = law_of(rounds), fit_acceptance_rate(rounds)
    assert law is not None
    lists = fanout.geometric(a, law.r, rounds.K, budget)
    most = max(*lists, rounds.N)
    table = hit_table(rounds)
    if most > rounds.N:
        F = torch.arange(rounds.N + 1, most + 1, dtype=torch.float64)
        last = table[:, -1:]
        beyond = 1 - (1 - last) * (F / rounds.N) ** -law.r
        table = torch.cat([table, beyond], dim=1)
    return fanout.hit_rate(lists, outcome_frequencies(rounds), table)


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done, projected = by_batch(profile, found), projection(profile, found)
    stars = {backup: critical(done, backup) for backup in (RANDOM, NGRAM)}
    head = ("batch", *BACKUPS, "sd", "ar", "fastest backup", "hit rate")
    rows = [
        (
            str(batch),
            *(number(speed(each[name]), 1) for name in (*BACKUPS, SD, AR)),
            max(BACKUPS, key=lambda name: speed(each[name]) or 0.0).removeprefix("ssd, "),
            number(of_summary(each[DRAFT], "hit_rate")),
        )
        for batch, each in done.items()
    ]
    svg = chart.plot("fig6", lambda *axes: _draw(axes, done, stars, projected, profile), panels=2 if projected else 1)
    return Section(
        paper="With a larger batch it becomes likely that some row misses, and then all rows wait for the backup. "
        "Up to a critical batch size it is best to draft misses with the model, above it with something that takes "
        "no time. More devices that draft give larger caches and more hits, with falling returns (projected in the "
        "paper too).",
        found=[*_texts(stars), *_projected(projected, profile)],
        differs=_differs(done),
        parts=[
            Plot(
                svg,
                f"Left: tok/s by batch size, greedy, K = {profile.lookahead}, {profile.budget} outcomes per row; "
                "dotted: b* of random tokens by Theorem 17."
                + (f" Right: PROJECTED speed relative to sd at batch {profile.projected}." if projected else ""),
            ),
            Table(head, rows, "tok/s of all rows together; hit rate: with misses drafted by the model."),
        ],
    )


def _differs(done: dict[int, dict[str, Figures]]) -> list[str]:
    """What b* assumes, and what was measured of it."""
    if 1 not in done:
        return []
    slower = [slowdown(done[1][name], done[1][SD]) for name in BACKUPS]
    return [
        "b* assumes that preparing does not slow the verification, which on one machine it may: at batch 1 the rest "
        f"of a round, besides waiting for the draft, takes {spread(slower)} times as long as that of sd. The paper's "
        "fast backup is random tokens; n-grams take as little time, and are sometimes right."
    ]


def _texts(stars: dict[str, Critical | None]) -> list[str]:
    texts = []
    for backup, star in stars.items():
        if star is None:
            continue
        name = backup.removeprefix("ssd, ")
        b = (
            "infinite (the model is better at every batch size)"
            if math.isinf(star.predicted)
            else f"{star.predicted:.1f}"
        )
        seen = f"at batch {', '.join(map(str, star.faster))}" if star.faster else "at no measured batch size"
        texts.append(f"For {name} in place of the model, b* by Theorem 17 is {b}; measured, {name} are faster {seen}.")
    return texts


def _projected(projected: dict[int, Projected], profile: Profile) -> list[str]:
    if not projected:
        return ["The projection to several drafts needs more recorded rounds than there are, and is left out."]
    few, many = projected[min(projected)], projected[max(projected)]
    return [
        f"Projected, not measured: with {max(projected)} drafts in place of {min(projected)} the hit rate of a row "
        f"goes from {few.hit_rate:.2f} to {many.hit_rate:.2f}, and at batch {profile.projected} the speed relative to "
        f"sd from {few.to_sd:.2f} to {many.to_sd:.2f}. Hit rates come from recorded ranks, tokens and times from "
        "batch 1, combined by Corollary 16."
    ]


def _draw(
    axes: Any,
    done: dict[int, dict[str, Figures]],
    stars: dict[str, Critical | None],
    projected: dict[int, Projected],
    profile: Profile,
) -> None:
    left = axes[0]
    for index, name in enumerate((*BACKUPS, SD, AR)):
        points = [(float(batch), rate) for batch, each in done.items() if (rate := speed(each[name])) is not None]
        chart.line(left, index, [batch for batch, _ in points], [rate for _, rate in points], name)
    star = stars[RANDOM]
    if star is not None and done and min(done) <= star.predicted <= max(done):
        left.axvline(star.predicted, color=chart.INK, linewidth=1.2, linestyle=(0, (1, 2)))
        left.annotate(" b*", (star.predicted, 0.02), xycoords=("data", "axes fraction"), fontsize=10)
    chart.log_axis(left.xaxis, base=2, ticks=[float(batch) for batch in profile.batches])
    chart.from_zero(left)
    left.set_xlabel("batch size")
    left.set_ylabel("tok/s")
    if projected:
        right = axes[1]
        chart.line(
            right,
            0,
            [float(n) for n in projected],
            [each.to_sd for each in projected.values()],
            "projected",
            linestyle=(0, (4, 2)),
        )
        right.set_xlabel(f"drafts, {profile.budget} outcomes each")
        right.set_ylabel("speed relative to sd")
        chart.from_zero(right)
        chart.title(right, f"projected, batch {profile.projected}")


FIG6 = Experiment(
    name="fig6",
    title="Figure 6: what drafts a miss",
    about="fallbacks by batch size with b* of Theorem 17; several drafts, projected",
    cells=cells,
    section=section,
)
