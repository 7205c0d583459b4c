"""The runner goes on where it stopped, measures again what has changed, and keeps what failed apart."""

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saguaro.errors import ConfigError
from saguaro.report import runner as runner_module
from saguaro.report.cell import Cell, Profile
from saguaro.report.experiment import entry
from saguaro.report.experiments.table import EXPERIMENTS
from saguaro.report.report import measured
from saguaro.report.store import Store, slug
from tests.report.conftest import TINY
from tests.report.driver import Said, read_page, report_of, runner_on, words

FIG5 = [EXPERIMENTS["fig5"]]
SMALL = replace(TINY, max_tokens=4, n_prompts=1, budget=2)


def cells(profile: Profile = SMALL) -> list[Cell]:
    return report_of(profile, FIG5).cells


def files(out: Path) -> dict[str, int]:
    """The finished cells, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}


def run(model: Path, out: Path, profile: Profile = SMALL, basis: dict[str, Any] | None = None) -> Said:
    said = Said()
    runner = runner_on(model, out, profile, said, basis)
    with runner.store.opened():
        runner.run(cells(profile))
    return said


def test_what_is_finished_is_not_measured_again(folder: Path, tmp_path: Path) -> None:
    first = run(folder, tmp_path)
    assert [line.partition(":")[0] for line in first] == [
        f"[{n}/3] {cell.name}" for n, cell in enumerate(cells(), start=1)
    ]
    before = files(tmp_path)
    again = run(folder, tmp_path)
    assert again == [f"3 of 3 cells are finished in {tmp_path}"]
    assert again.n_loaded == 0, "no model is loaded for nothing"
    assert files(tmp_path) == before


def test_interrupted_at_every_cell_it_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after the measurement and before it is kept: the worst moment."""
    whole = Store.write

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    for n_finished in range(2):
        monkeypatch.setattr(Store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(folder, tmp_path)
        assert len(files(tmp_path)) == n_finished
        monkeypatch.setattr(Store, "write", whole)
        one = replace(SMALL, weights=SMALL.weights[: n_finished + 1])
        said = Said()
        runner = runner_on(folder, tmp_path, one, said)
        with runner.store.opened():
            runner.run(cells(one)[: n_finished + 1])
    assert run(folder, tmp_path)[0].startswith("2 of 3 cells")


def _killed_while_writing(model: Path, out: Path) -> None:
    """Dies by SIGKILL when the second cell's file is half written."""
    whole = Path.write_text
    n_written = []

    def half(path: Path, text: str, encoding: str | None = None) -> int:
        n_written.append(path)
        if len(n_written) == 2:
            whole(path, text[: len(text) // 2], encoding=encoding)
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path, text, encoding=encoding)

    Path.write_text = half  # type: ignore[assignment, method-assign]
    run(model, out)


def test_killed_while_it_writes(folder: Path, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_killed_while_writing, args=(folder, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len([name for name in files(tmp_path) if name.endswith(".json")]) == 1
    said = run(folder, tmp_path)
    assert said[0].startswith("1 of 3 cells")
    assert sorted(files(tmp_path)) == sorted(f"{slug(cell.name)}.json" for cell in cells())


def test_changed_settings_and_versions_are_measured_again_and_said(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, basis={"version": 1})
    longer = replace(SMALL, max_tokens=5)
    for profile, basis in ((SMALL, {"version": 2}), (longer, {"version": 2})):
        said = run(folder, tmp_path, profile, basis)
        assert said[0].startswith("3 finished cells are of other settings, models, versions"), said
        assert len(said) == 4
    assert run(folder, tmp_path, longer, {"version": 2})[0].startswith("3 of 3")


def test_a_changed_prompt_is_a_changed_cell(tmp_path: Path) -> None:
    store, cell = Store(tmp_path, {}, {}), cells()[0]
    with store.opened():
        store.write(cell, ["a"], {"measured": {}})
        assert store.read(cell, ["a"]) is not None
        assert store.read(cell, ["b"]) is None
        assert store.is_outdated(cell, ["b"])


def test_a_changed_pair_is_of_its_own_cells(tmp_path: Path) -> None:
    cell, other = cells()[0], replace(cells()[0], name="another", pair="other")
    with Store(tmp_path, {}, {"tiny": 1, "other": 1}).opened():
        for one in (cell, other):
            Store(tmp_path, {}, {"tiny": 1, "other": 1}).write(one, ["a"], {"measured": {}})
    changed = Store(tmp_path, {}, {"tiny": 1, "other": 2})
    assert changed.read(cell, ["a"]) is not None
    assert changed.read(other, ["a"]) is None


@pytest.mark.parametrize("text", ["", "[]", '{"fingerprint": 1}', "{"])
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    store, cell = Store(tmp_path, {}, {}), cells()[0]
    with store.opened():
        store.write(cell, ["a"], {"measured": {}})
        (tmp_path / "cells" / f"{slug(cell.name)}.json").write_text(text)
        assert store.read(cell, ["a"]) is None
        assert not store.is_outdated(cell, ["a"])


def test_a_cell_that_fails_does_not_end_the_others(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = Said()
    runner = runner_on(folder, tmp_path, SMALL, said)
    good = cells()[0]
    bad = replace(cells()[1], entries=(entry("no such method", "telepathy"),))
    with runner.store.opened():
        done = runner.run([bad, good])
    assert "method is 'telepathy'" in done[bad.name]["failed"]
    assert set(measured(done)) == {good.name}
    page = report_of(SMALL, FIG5).page(done)
    assert f"Could not be measured: {bad.name}: method is 'telepathy'" in page.chapters[0].missing
    assert f"Not measured yet: {cells()[2].name}." in page.chapters[0].missing
    assert bad.name not in runner.finished([bad, good]), "it is tried again"


def test_a_pair_is_loaded_once(folder: Path, tmp_path: Path) -> None:
    """However the cells of two pairs are mixed."""
    said, others = Said(), Said()
    runner = runner_on(folder, tmp_path, SMALL, said)
    mixed = [replace(cell, name=f"{cell.name} {pair}", pair=pair) for cell in cells()[:2] for pair in ("tiny", "other")]
    other = runner_on(folder, tmp_path, SMALL, others).pairs["tiny"]
    both = replace(runner, pairs={**runner.pairs, "other": other})
    with both.store.opened():
        assert len(both.run(mixed)) == 4
    assert (said.n_loaded, others.n_loaded) == (1, 1)


def test_two_reports_do_not_share_a_folder(tmp_path: Path) -> None:
    with Store(tmp_path, {}, {}).opened(), pytest.raises(ConfigError, match="another report is being measured in"):
        Store(tmp_path, {}, {}).opened().__enter__()


def test_a_page_of_nothing(tmp_path: Path) -> None:
    report = report_of(SMALL, FIG5)
    store = Store(tmp_path, {}, {})
    with store.opened():
        assert report.write(store, {}) == 0
    page = read_page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "0 of 3 measured" in words(page)
    assert "Not measured yet: weights, C=1" in words(page)
    assert json.loads((tmp_path / "report.json").read_text())["cells"] == {}


def test_the_rest_is_guessed_from_what_was_done() -> None:
    clock = runner_module._Clock([100, 100, 200])
    assert clock.after(100, 60.0) == "; about 3 min left"
    assert clock.after(200, 20.0) == "; less than a minute left"
    assert clock.after(100, 1.0) == ""
