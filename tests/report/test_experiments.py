"""Every experiment on a tiny pair: it measures, and what its section says comes from the data."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from saguaro.report.cell import PROFILES, Profile
from saguaro.report.experiment import Found
from saguaro.report.experiments.common import frontier
from saguaro.report.experiments.exact import compared, n_different
from saguaro.report.experiments.table import EXPERIMENTS, chosen
from saguaro.report.page import html
from saguaro.report.report import measured
from saguaro.report.store import Finished
from tests.report.conftest import TINY
from tests.report.driver import Said, loaded_from_outside, read_page, report_of, runner_on, words

NO_DATA = re.compile(r"\b(nan|no value)\b")


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Finished]]:
    """All cells of all experiments, measured once for all tests."""
    runner = runner_on(folder, tmp_path_factory.mktemp("report"), TINY, Said())
    with runner.store.opened():
        yield runner.run(report_of(TINY, list(EXPERIMENTS.values())).cells)


@pytest.fixture(scope="module")
def found(done: Mapping[str, Finished]) -> Found:
    assert all("failed" not in one for one in done.values()), done
    return measured(done)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_speaks_of_its_data(name: str, found: Found) -> None:
    pytest.importorskip("matplotlib")
    section = EXPERIMENTS[name].section(TINY, found)
    assert section.paper
    assert section.found
    assert all(not NO_DATA.search(text) for text in section.found), section.found
    assert section.parts


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_does_with_any_of_its_cells(name: str, found: Found) -> None:
    pytest.importorskip("matplotlib")
    for cell in EXPERIMENTS[name].cells(TINY):
        assert EXPERIMENTS[name].section(TINY, {cell.name: found[cell.name]}).parts


def test_the_whole_page(done: Mapping[str, Finished]) -> None:
    pytest.importorskip("matplotlib")
    text = html(report_of(TINY, list(EXPERIMENTS.values())).page(done))
    page = read_page(text)
    assert loaded_from_outside(page) == []
    ids = [element.attrib["id"] for element in page.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids)), "ids of two plots are the same"
    targets = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert targets <= set(ids)
    assert [section.attrib["id"] for section in page.iter("section")] == list(EXPERIMENTS)
    assert "a CPU" in words(page)
    assert "saguaro report --quick --only fig5" in words(page)
    assert "Not measured" not in words(page)


def test_outputs_are_compared(found: Found) -> None:
    assert n_different(found) == 0
    names = {(cell, one["name"]) for cell, one in compared(found)}
    assert ("exactness, all methods", "saguaro") in names, "under shared noise"
    assert ("fan-out, T=0", "geometric") in names, "greedy rejection gives the target's tokens"
    assert ("fan-out, T=1", "geometric") not in names, "rejection has noise of its own"
    assert ("fan-out, T=1", "ours") in names


def test_what_differs_is_counted_and_said(found: Found) -> None:
    pytest.importorskip("matplotlib")
    cell = found["exactness, all methods"]
    entries = [{**one, "differ": 3 if one["name"] == "pearl" else 0} for one in cell["measured"]["entries"]]
    changed = {**found, "exactness, all methods": {**cell, "measured": {"entries": entries}}}
    assert n_different(changed) == 3
    assert ": 3 differ" in EXPERIMENTS["exact"].section(TINY, changed).found[0]


def test_entries_have_what_their_names_say(found: Found) -> None:
    hits = {
        name: {one["name"]: one["summary"]["hit_rate"] for one in found[name]["measured"]["entries"]}
        for name in ("fan-out, T=0", "fallbacks, batch 1")
    }
    assert hits["fan-out, T=0"]["uniform"] is not None
    assert hits["fan-out, T=0"]["sd"] in (None, 0.0)
    sources = {
        one["name"]: set(one["summary"]["sources"]) for one in found["fallbacks, batch 1"]["measured"]["entries"]
    }
    assert "random" in sources["ssd, random tokens"]
    assert "draft" in sources["ssd, draft"]
    assert "random" not in sources["ssd, draft"]


def test_ranks_are_counted_by_k_and_kind(found: Found) -> None:
    measured = found["ranks, one, T=1"]["measured"]
    assert (measured["K"], measured["N"]) == (TINY.lookahead, TINY.candidates)
    assert len(measured["backup"]) == TINY.lookahead + 1
    assert {len(row) for row in measured["backup"]} == {TINY.candidates + 1}
    assert sum(map(sum, measured["backup"])) > 0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_cells_of_a_profile_are_shared_by_name(profile: Profile) -> None:
    with_sets = profile.__class__(**{**vars(profile), "pairs": ("a", "b"), "sets": ("x", "y")})
    report = report_of(with_sets, chosen(None))
    assert len(report.cells) < sum(len(one.cells(with_sets)) for one in report.experiments), "theory has those of fig6"
    for cell in report.cells:
        assert cell.n_prompts % cell.batch == 0, "full batches"
        assert len({entry.name for entry in cell.entries}) == len(cell.entries)


def test_the_frontier() -> None:
    assert frontier([]) == []
    assert frontier([(0.5, 0.5), (0.5, 0.5)]) == [(0.5, 0.5)]
