"""Ours: exactness. Every method must give the tokens of plain decoding."""

from saguaro.method import METHODS
from saguaro.report.cell import SIDE_BY_SIDE, Cell, Profile
from saguaro.report.experiment import Experiment, Figures, Found, entry
from saguaro.report.experiments.common import AR, plain
from saguaro.report.page import Section, Table


def cells(profile: Profile) -> list[Cell]:
    """All methods, with shared noise at the highest temperature; the other experiments' cells count too."""
    each = (
        entry(name, name, verification="shared", link="inline", **_sizes(name, profile))
        for name in METHODS
        if name != AR
    )
    return [
        Cell(
            name="exactness, all methods",
            entries=(plain(), *each),
            pair=profile.pair,
            prompts=profile.sets[-1],
            n_prompts=profile.n_prompts,
            max_tokens=profile.max_tokens,
            temperature=profile.temperatures[-1],
        )
    ]


def _sizes(name: str, profile: Profile) -> dict[str, object]:
    method = METHODS[name]
    return {"lookahead": profile.lookahead} | ({"prepare": "always"} if method.prepares else {})


def compared(found: Found) -> list[tuple[str, Figures]]:
    """Every entry whose tokens had to be those of another one, with its cell's name."""
    return [
        (name, each)
        for name, finished in found.items()
        if finished["cell"]["kind"] == SIDE_BY_SIDE
        for each in finished["measured"]["entries"]
        if each["compared_with"] is not None
    ]


def n_different(found: Found) -> int:
    """Tokens that differ and must not, in all cells."""
    return sum(each["differ"] for _, each in compared(found))


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    pairs = compared(found)
    names = list(dict.fromkeys(name for name, _ in pairs))
    rows = [
        (name, str(len(each)), f"{sum(one['compared'] for one in each):,}", str(sum(one["differ"] for one in each)))
        for name, each in ((name, [one for place, one in pairs if place == name]) for name in names)
    ]
    n = sum(one["compared"] for _, one in pairs)
    return Section(
        paper="SSD is lossless: the tokens have the target's distribution.",
        found=[
            f"{n:,} tokens of {len(pairs)} runs in {len(names)} cells were compared with the first run of their cell, "
            f"which is ar where it takes part: {n_different(found)} differ. That number must be 0; otherwise the "
            "command ends with status 1."
        ],
        differs=[
            "Under shared noise, the default here, more is true than in the paper: not only the distribution but the "
            "tokens are those of plain decoding, for every seed. Runs with rejection above temperature 0 are not "
            "compared: they have noise of their own."
        ],
        parts=[Table(("cell", "runs compared", "tokens", "different"), rows)],
    )


EXACT = Experiment(
    name="exact",
    title="Ours: exactness",
    about="tokens that differ from plain decoding, of all methods and in all other experiments: must be 0",
    cells=cells,
    section=section,
)
