"""The picture of bench.trees."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

import bench.plot_trees
from bench.plot_trees import Args, main
from bench.trees import Cell, line_of
from tests.bench.test_plot import texts


def cell(name: str, temperature: float, rate: float) -> dict[str, Any]:
    """A cell as bench.trees writes it, if it had been measured."""
    empty = Cell(seconds=1.0, n_tokens=10)
    return line_of(name, temperature, empty) | {"by_set": {"questions": rate, "code": rate + 1}}


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [cell(name, t, 2.0) for t in (0.0, 1.0) for name in ("ar", "sd:4", "sd:8:8:16:4", "default")]
    (tmp_path / "trees.json").write_text(json.dumps(cells))
    out = tmp_path / "trees.svg"
    assert main(Args(tmp_path / "trees.json", out)) == 0
    found = texts(out)
    assert {"temperature 0", "temperature 1", "questions", "code", "tokens per round"} <= set(found)
    assert not {"ar", "default"} & set(found)
    first = out.read_bytes()
    assert main(Args(tmp_path / "trees.json", out)) == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory; name a file of bench.trees --json"),
        ("{", "is not JSON"),
        ("{}", "is no file of bench.trees --json: a cell lacks one of cell, temperature, by_set"),
        ('[{"cell": "ar", "temperature": 0, "by_set": {}}]', "has no cell with a lookahead"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, text: str | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "trees.json").write_text(text)
    assert main(Args(tmp_path / "trees.json", tmp_path / "trees.svg")) == 2
    assert said in capsys.readouterr().err


def test_examples() -> None:
    assert doctest.testmod(bench.plot_trees).failed == 0
