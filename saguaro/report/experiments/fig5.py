"""Figure 5: Saguaro sampling trades acceptance for hits."""

from typing import Any

from saguaro.report import chart
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import Experiment, Found, entries, entry, number, of_summary, rounds_of, some
from saguaro.report.experiments.common import Point, frontier, paper
from saguaro.report.page import Plot, Section, Table


def cells(profile: Profile) -> list[Cell]:
    """A cell for each C, and one for shared noise."""
    return [*(_weighted(profile, weight) for weight in profile.weights), _shared(profile)]


def budgets(profile: Profile) -> tuple[int, int]:
    """Small and large caches."""
    return profile.budget, 2 * profile.budget


def _weighted(profile: Profile, weight: float) -> Cell:
    settings = {"link": "inline", "fallback": "draft", "saguaro_c": weight}
    return _cell(
        profile,
        f"weights, C={weight:g}",
        *(paper(profile, f"M = {budget}", **settings, budget=budget) for budget in budgets(profile)),
    )


def _shared(profile: Profile) -> Cell:
    settings = {"lookahead": profile.lookahead, "fan_out": "geometric", "prepare": "always", "link": "inline"}
    each = (entry(f"M = {budget}", "ssd-uniform", **settings, budget=budget) for budget in budgets(profile))
    return _cell(profile, "weights, shared noise", *each)


def _cell(profile: Profile, name: str, *each: Any) -> Cell:
    return Cell(
        name=name,
        entries=each,
        pair=profile.pair,
        prompts=profile.sets[0],
        n_prompts=profile.n_prompts,
        max_tokens=profile.max_tokens,
        temperature=profile.temperatures[-1],
    )


def section(profile: Profile, found: Found) -> Section:
    """See Experiment."""
    names = [f"M = {budget}" for budget in budgets(profile)]
    curves: dict[str, list[tuple[float, Point]]] = {name: [] for name in names}
    rows = []
    for weight in profile.weights:
        for name, own in entries(found, _weighted(profile, weight)).items():
            point = _point(own)
            if point is not None:
                curves[name].append((weight, point))
            rows.append((f"C = {weight:g}", name, *_row(own)))
    shared = {name: _point(own) for name, own in entries(found, _shared(profile)).items()}
    rows += [("shared noise", name, *_row(own)) for name, own in entries(found, _shared(profile)).items()]
    head = ("sampling", "cache", "acceptance", "hit rate", "tokens per round", "rounds")
    svg = chart.plot("fig5", lambda axes: _draw(axes, curves, shared))
    return Section(
        paper="Weighting the likeliest tokens of the draft by C < 1 makes the target's own token easier to foresee: "
        "the smaller C, the more hits, and the fewer accepted tokens. Where to stop depends on the times.",
        found=_texts(curves),
        differs=_differs(curves, shared),
        parts=[
            Plot(
                svg,
                f"Sampling: {some(profile.temperatures[-1])}, K = {profile.lookahead}; M: prepared outcomes. Upwards "
                "and to the right is better. Dashed: the frontier of rejection; stars: shared noise.",
            ),
            Table(
                head, rows, "acceptance: of a token, if those before it were accepted. rounds: which the rates rest on."
            ),
        ],
    )


def _point(own: dict[str, Any]) -> Point | None:
    """Acceptance and hit rate."""
    hit = of_summary(own, "hit_rate")
    return None if own["played"] is None or hit is None else (own["played"]["a"], hit)


def _row(own: dict[str, Any]) -> tuple[str, ...]:
    point = _point(own) or (None, None)
    return (*(number(value, 3) for value in point), number(of_summary(own, "tokens_per_round")), str(rounds_of(own)))


def _texts(curves: dict[str, list[tuple[float, Point]]]) -> list[str]:
    texts = []
    for name, points in curves.items():
        if len(points) < 2:
            continue
        (high, first), (low, last) = points[0], points[-1]
        texts.append(
            f"{name}: from C = {high:g} to C = {low:g} the hit rate goes from {first[1]:.2f} to {last[1]:.2f} and the "
            f"acceptance from {first[0]:.2f} to {last[0]:.2f}."
        )
    return texts


def _differs(curves: dict[str, list[tuple[float, Point]]], shared: dict[str, Point | None]) -> list[str]:
    """Shared noise beside rejection without a weight."""
    texts = []
    for name, point in shared.items():
        plain = next((place for weight, place in curves.get(name, []) if weight == 1), None)
        if point is not None and plain is not None:
            texts.append(
                f"{name}: hits {point[1]:.2f} (rejection {plain[1]:.2f}), acceptance {point[0]:.2f} ({plain[0]:.2f})"
            )
    if not texts:
        return []
    return [
        "The paper verifies by rejection. Under shared noise, the default here, there is no C: the draft ranks "
        f"candidates with the target's own noise. Beside rejection with C = 1, {'; '.join(texts)}."
    ]


def _draw(axes: Any, curves: dict[str, list[tuple[float, Point]]], shared: dict[str, Point | None]) -> None:
    for index, (name, points) in enumerate(curves.items()):
        chart.line(axes, index, [a for _, (a, _) in points], [hit for _, (_, hit) in points], f"rejection, {name}")
        for weight, place in points:
            axes.annotate(f"{weight:g}", place, (5, 4), textcoords="offset points", fontsize=8, color=chart.QUIET)
        point = shared.get(name)
        if point is not None:
            style = {"color": chart.COLOURS[index], "marker": "*", "markersize": 14, "linestyle": "none"}
            axes.plot([point[0]], [point[1]], label=f"shared noise, {name}", **style)
    best = frontier([point for points in curves.values() for _, point in points])
    axes.plot([a for a, _ in best], [hit for _, hit in best], color=chart.INK, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xlabel("acceptance of a token")
    axes.set_ylabel("hit rate")
    axes.margins(0.12)


FIG5 = Experiment(
    name="fig5",
    title="Figure 5: hits against acceptance",
    about="Saguaro sampling by C, with its frontier, and shared noise on the same axes",
    cells=cells,
    section=section,
)
