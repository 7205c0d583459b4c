"""Cells that several experiments need, and the entries that occur in many of them."""

from saguaro.report.cell import RANKS, Cell, Entry, Profile
from saguaro.report.experiment import entry

Point = tuple[float, float]  # two figures, of which more is better

AR, SD, DRAFT, RANDOM, NGRAM = "ar", "sd", "ssd, draft", "ssd, random tokens", "ssd, n-grams"
POLICY = "ssd (policy)"


def plain() -> Entry:
    """The target alone."""
    return entry(AR, "ar")


def chain(profile: Profile, name: str = SD) -> Entry:
    """Speculative decoding as the paper's baseline: a chain of K tokens, drafted just in time."""
    K = profile.lookahead
    return entry(name, "sd", lookahead=K, nodes=K, width=1, link="inline")


def paper(profile: Profile, name: str, **settings: object) -> Entry:
    """The paper's algorithm: chains after prepared outcomes, rejection, the draft beside the target."""
    sizes = {"lookahead": profile.lookahead, "budget": profile.budget}
    return entry(name, "saguaro", **{**sizes, "prepare": "always", **profile.apart, **settings})


def policy(name: str = POLICY) -> Entry:
    """Ours, as it is without flags."""
    return entry(name, "ssd")


def prompts_for(profile: Profile, batch: int) -> int:
    """Full batches, and at least the profile's number."""
    return batch * max(1, -(-profile.n_prompts // batch))


def fallbacks(profile: Profile, batch: int) -> Cell:
    """What drafts a miss: the model just in time, or something that takes no time."""
    return Cell(
        name=f"fallbacks, batch {batch}",
        entries=(
            plain(),
            chain(profile),
            paper(profile, DRAFT, fallback="draft"),
            paper(profile, RANDOM, fallback="random"),
            paper(profile, NGRAM, fallback="ngram"),
        ),
        pair=profile.pair,
        prompts=profile.sets[0],
        n_prompts=prompts_for(profile, batch),
        max_tokens=profile.max_tokens,
        batch=batch,
    )


def ranks(profile: Profile, prompts: str, temperature: float) -> Cell:
    """The rank of the target's token among the draft's candidates, after hits and after random tokens."""
    settings = {"link": "inline", "budget": profile.candidates, "fallback": "random", "fan_out": "geometric"}
    return Cell(
        name=f"ranks, {prompts}, T={temperature:g}",
        kind=RANKS,
        entries=(paper(profile, "ranks", **settings),),
        pair=profile.pair,
        prompts=prompts,
        n_prompts=profile.n_recorded,
        max_tokens=profile.max_tokens,
        temperature=temperature,
    )


def shape_name(lookahead: int, nodes: int, width: int) -> str:
    """
    >>> shape_name(4, 4, 1), shape_name(8, 16, 4)
    ('sd, chain of 4', 'sd, tree of 16')
    """
    return f"sd, {'chain' if width == 1 else 'tree'} of {nodes}"


def shapes(profile: Profile, batch: int, temperature: float) -> Cell:
    """Fixed chains and trees, and the policy, side by side."""
    fixed = (
        entry(shape_name(*shape), "sd", lookahead=shape[0], nodes=shape[1], width=shape[2], link="inline")
        for shape in profile.shapes
    )
    return Cell(
        name=f"shapes, batch {batch}, T={temperature:g}",
        entries=(plain(), *fixed, policy()),
        pair=profile.pair,
        prompts=profile.sets[0],
        n_prompts=prompts_for(profile, batch),
        max_tokens=profile.max_tokens,
        batch=batch,
        temperature=temperature,
    )


def frontier(points: list[Point]) -> list[Point]:
    """The points that no other is better than in both.

    >>> frontier([(0.5, 0.9), (0.8, 0.6), (0.7, 0.5), (0.9, 0.1)])
    [(0.5, 0.9), (0.8, 0.6), (0.9, 0.1)]
    """
    best = [
        one for one in points if not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in points)
    ]
    return sorted(set(best))
