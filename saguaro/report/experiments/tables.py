"""Tables B.3 and F: speed by pair and prompt set."""

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
)
from saguaro.report.experiments.common import AR, SD, chain, plain
from saguaro.report.page import Section, Table

SSD = "ssd"
PAPER = (  # averages of table B.3: tok/s of ar, sd and ssd
    ("Llama-3.1-70B with 3.2-1B", 54.7, 161.8, 255.8),
    ("Qwen3-32B with 0.6B", 88.8, 136.8, 203.8),
)


def cells(profile: Profile) -> list[Cell]:
    """A cell for each pair and prompt set."""
    return [_cell(profile, pair, prompts) for pair in profile.pairs for prompts in profile.sets]


def _cell(profile: Profile, pair: str, prompts: str) -> Cell:
    return Cell(
        name=f"table, {pair}, {prompts}",
        entries=(plain(), chain(profile), entry(SSD, "ssd")),
        pair=pair,
        prompts=prompts,
        n_prompts=profile.n_prompts,
        max_tokens=profile.max_tokens,
    )


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    done = [(cell, each) for cell, each in finished(found, cells(profile))]
    head = ("pair", "prompts", "ar tok/s", "sd tok/s", "ssd tok/s", "ssd / sd", "ssd / ar", "acceptance")
    rows = [(cell.pair, cell.prompts, *_row(each)) for cell, each in done]
    to_sd = mean([ratio(speed(each[SSD]), speed(each[SD])) for _, each in done])
    to_ar = mean([ratio(speed(each[SSD]), speed(each[AR])) for _, each in done])
    theirs = [(name, *(number(rate, 1) for rate in rates), *_ratios(*rates)) for name, *rates in PAPER]
    accepted = {cell.prompts: of_summary(each[SD], "acceptance") or 0.0 for cell, each in done}
    easiest = max(accepted, key=lambda name: accepted[name])
    return Section(
        paper="Over four prompt sets, SSD is on average 1.58 and 1.49 times as fast as SD for two pairs, and most "
        "where drafts are accepted most: code and mathematics.",
        found=[
            f"Means here: ssd / sd {number(to_sd)}, ssd / ar {number(to_ar)}. Of the prompt sets, sd accepts most on "
            f"{easiest} ({accepted[easiest]:.2f} of the speculated tokens)."
        ],
        differs=[
            "The paper's pairs need five GPUs, one of them for the draft alone. The pairs here are smaller, on one "
            "machine; compare ratios, not tok/s."
        ],
        parts=[
            Table(head, rows, "Greedy, batch 1, without the reading of prompts. acceptance: speculated tokens of sd."),
            Table(
                ("the paper's pairs", "ar", "sd", "ssd", "ssd / sd", "ssd / ar"),
                theirs,
                "Averages of its table B.3, and their ratios.",
            ),
        ],
    )


def _row(each: dict[str, Figures]) -> tuple[str, ...]:
    return (
        *(number(speed(each[name]), 1) for name in (AR, SD, SSD)),
        number(ratio(speed(each[SSD]), speed(each[SD]))),
        number(ratio(speed(each[SSD]), speed(each[AR]))),
        number(of_summary(each[SD], "acceptance")),
    )


def _ratios(ar: float, sd: float, ssd: float) -> tuple[str, str]:
    return number(ssd / sd), number(ssd / ar)


TABLES = Experiment(
    name="tables",
    title="Tables B.3 and F: by prompt set and pair",
    about="tok/s of ar, sd and ssd for every prompt set and pair",
    cells=cells,
    section=section,
)
