"""Ours: drafters side by side."""

from typing import Any

from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.engines import BESIDE
from saguaro.report.experiment import Experiment, Figures, Found, entry, finished, number, of_summary, ratio, speed
from saguaro.report.experiments.common import AR, plain
from saguaro.report.page import Plot, Section, Table

MODEL, SUFFIX, BOTH, NGRAMS = "model", "suffix", "suffix and model", "n-grams"
DRAFTERS = (MODEL, SUFFIX, BOTH, NGRAMS)


def cells(profile: Profile) -> list[Cell]:
    """A cell for each prompt set."""
    return [_cell(profile, prompts) for prompts in profile.sets]


def _cell(profile: Profile, prompts: str) -> Cell:
    return Cell(
        name=f"drafters, {prompts}",
        entries=(
            plain(),
            entry(MODEL, "ssd"),
            entry(SUFFIX, "sd", draft="suffix"),
            entry(BOTH, "ssd", draft=BESIDE),
            entry(NGRAMS, "ngram"),
        ),
        pair=profile.pair,
        prompts=prompts,
        n_prompts=profile.n_prompts,
        max_tokens=profile.max_tokens,
    )


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = {cell.prompts: each for cell, each in finished(found, cells(profile))}
    head = ("prompts", "drafter", "tokens per round", "nodes per token", "tok/s", "to ar")
    rows = [(prompts, name, *_row(each, name)) for prompts, each in done.items() for name in each]
    svg = chart.plot("drafters", lambda axes: _draw(axes, done))
    return Section(
        paper="The paper drafts with a smaller model of the same family, and names n-grams and suffix structures as "
        "fast backups.",
        found=[_text(prompts, each) for prompts, each in done.items()],
        parts=[
            Plot(svg, "Greedy, batch 1: speed over plain decoding, by prompt set."),
            Table(head, rows, "suffix: what followed earlier in the text, without a model."),
        ],
    )


def _text(prompts: str, each: dict[str, Figures]) -> str:
    best = max(DRAFTERS, key=lambda name: speed(each[name]) or 0.0)
    most = max(DRAFTERS, key=lambda name: of_summary(each[name], "tokens_per_round") or 0.0)
    return (
        f"On {prompts} the fastest drafter is {best}, with {number(ratio(speed(each[best]), speed(each[AR])))} times "
        f"the speed of plain decoding. The most tokens per round: {most}, "
        f"{number(of_summary(each[most], 'tokens_per_round'))}."
    )


def _row(each: dict[str, Figures], name: str) -> tuple[str, ...]:
    own = each[name]
    rates = (of_summary(own, "tokens_per_round"), of_summary(own, "nodes_per_token"))
    return (*(number(rate) for rate in rates), number(speed(own), 1), number(ratio(speed(own), speed(each[AR]))))


def _draw(axes: Any, done: dict[str, dict[str, Figures]]) -> None:
    series = {name: [ratio(speed(each[name]), speed(each[AR])) for each in done.values()] for name in DRAFTERS}
    chart.bars(axes, list(done), series)
    axes.axhline(1, color=chart.INK, linewidth=1)
    axes.set_ylabel("speed over ar")


DRAFTERS_COMPARED = Experiment(
    name="drafters",
    title="Ours: drafters side by side",
    about="a model, a suffix automaton, both, and n-grams, by prompt set",
    cells=cells,
    section=section,
)
