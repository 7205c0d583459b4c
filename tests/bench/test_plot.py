"""The picture of bench.gpu: what it shows of files in the format of bench.gpu itself, and what it refuses."""

import doctest
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import bench.plot
from bench.gpu import Report, figures
from bench.plot import Args, main, merge
from saguaro.types import RoundEvent, RowEvent

FACTS = {"device": "a GPU", "dtype": "bfloat16", "epsilon": 0.27, "floor_ms": 14.6, "draft_floor_ms": 0.3}


def round_event(start: float, wait_ms: float, verify_ms: float, host_ms: float, n_tokens: int) -> RoundEvent:
    """A round of one row that begins where the one before it ended."""
    decided = start + wait_ms / 1e3
    computed = decided + verify_ms / 1e3
    row = RowEvent("a", n_tokens - 1, n_tokens - 1, "draft", n_tokens, n_tokens - 1)
    collect = (computed, computed + host_ms / 1e3)
    verify = (decided, computed)
    return RoundEvent(1, n_tokens, (row,), (start, decided), verify, (computed, computed), collect, None, verify)


def measured(name: str, batch: int = 1, n_tokens: int = 4, heat: float = 0.0, wait_ms: float = 5.0) -> dict[str, Any]:
    """A cell as bench.gpu measures it, of rounds of 20 ms and what is waited."""
    method, *sizes = name.split(":")
    lookahead, budget = (*map(int, sizes), *(4, 8)[len(sizes) :])
    events = [round_event(-1.0, 0, 1000, 0, 1), round_event(0.0, wait_ms, 19.5, 0.5, n_tokens)]
    found = {"cell": name, "batch": batch, "T": heat, "method": method, "K": lookahead, "M": budget}
    return found | figures(events, 1)


def peer(name: str, tok_s: float) -> dict[str, Any]:
    return {"cell": name, "batch": 1, "T": 0.0, "tok_s": tok_s, "n_tokens": 100}


def write(path: Path, *cells: dict[str, Any], target: str = "32b", **facts: Any) -> Path:
    """A file of bench.gpu."""
    report = Report({**FACTS, **facts, "args": {"target": target, "draft": "0.6b"}}, path)
    for cell in cells:
        report.add(cell)
    report.conclude()
    return path


def texts(path: Path) -> list[str]:
    """Every text of an SVG."""
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    own = [measured("ar", n_tokens=1), measured("sd:4"), measured("ssd:6:8", n_tokens=5, wait_ms=0.0)]
    one = write(tmp_path / "1.json", *own, peer("hf", 38.2), peer("hf+5c", 71.5))
    two = write(tmp_path / "2.json", measured("ar", 8, n_tokens=8), measured("ssd:4:4", 8, n_tokens=30))
    out = tmp_path / "gpu.svg"
    assert main(Args((one, two), out)) == 0
    shown = texts(out)
    at_1 = {"ar", "40.0 tok/s", "sd:4", "160.0 tok/s", "ssd:6:8", "250.0 tok/s", "19.5", "5.0", "floor 14.6 ms"}
    over_batches = {"sd", "ssd", "transformers", "transformers, assisted", "320", "1,200", "160", "250", "38", "72"}
    assert at_1 | over_batches <= set(shown)
    assert "32b with 0.6b, noise 0.27, bfloat16, a GPU" in shown
    before = out.read_bytes()
    assert main(Args((one, two), out)) == 0
    assert out.read_bytes() == before


def test_files_are_merged(tmp_path: Path) -> None:
    old = write(tmp_path / "old.json", measured("ssd:8:8"), measured("sd:4", n_tokens=2), measured("ar", n_tokens=1))
    again = [measured("sd:4", n_tokens=3), measured("sd:4", n_tokens=9, heat=1.0), measured("sd:4", 8, n_tokens=7)]
    new = write(tmp_path / "new.json", *again, measured("sd:10"), peer("hf+5c", 71.5), peer("hf+20h", 66.0), floor_ms=9)
    found = merge((old, new))
    assert found.floor_ms == 9
    shown = [(cell["cell"], round(cell["tok_s"])) for cell in found.rounds]
    assert shown == [("ar", 40), ("sd:4", 120), ("sd:10", 160), ("ssd:8:8", 160)]
    fastest = {name: {batch: c["cell"] for batch, c in points.items()} for name, points in found.series.items()}
    peers = {"transformers, assisted": {1: "hf+5c"}}
    assert fastest == {"ar": {1: "ar"}, "sd": {1: "sd:10", 8: "sd:4"}, "ssd": {1: "ssd:8:8"}, **peers}


def test_a_cell_without_rounds_is_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = measured("ar") | figures([], 1)
    path = write(tmp_path / "1.json", measured("ssd:4:8"))
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "cells": [empty, *found["cells"]]}))
    assert [cell["cell"] for cell in merge((path,)).rounds] == ["ssd:4:8"]
    assert capsys.readouterr().err == "left out, for no round of it was counted: ar at batch 1\n"


def test_other_pairs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "1.json", measured("ar"))
    other, noisy = (
        write(tmp_path / "2.json", measured("ar"), target="8b"),
        write(tmp_path / "3.json", measured("ar"), epsilon=0.4),
    )
    mine, rest = "32b with 0.6b, noise 0.27", "bfloat16, a GPU"
    for path, theirs in (other, "8b with 0.6b, noise 0.27"), (noisy, "32b with 0.6b, noise 0.4"):
        assert main(Args((one, path), tmp_path / "gpu.svg")) == 2
        said = f"{one} is of {mine}, {rest} and {path} of {theirs}, {rest}; a picture is of one pair\n"
        assert capsys.readouterr().err == said


def test_no_cell_at_batch_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "1.json", measured("ar", 8), measured("ar", heat=1.0), peer("hf", 38.2))
    assert main(Args((path,), tmp_path / "gpu.svg")) == 2
    assert f"no cell at batch 1 and temperature 0 in {path}; measure some" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON"),
        ("[]", "the file lacks device, dtype, floor_ms, args, cells"),
        (json.dumps({**FACTS, "floor_ms": "14", "args": {}, "cells": []}), "the file lacks floor_ms"),
        (json.dumps({**FACTS, "args": {"target": "32b"}, "cells": []}), "args lacks draft"),
        (json.dumps({**FACTS, "args": {"target": "", "draft": ""}, "cells": [7]}), "cell 0 lacks cell, batch, T"),
    ],
)
def test_files_of_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    path = tmp_path / "1.json"
    if text is not None:
        path.write_text(text)
    assert main(Args((path,), tmp_path / "gpu.svg")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{path} ")
    assert said in error


def test_a_cell_that_lacks_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "1.json", measured("ar"), measured("sd:4"))
    found = json.loads(path.read_text())
    del found["cells"][1]["verify"]
    path.write_text(json.dumps(found))
    assert main(Args((path,), tmp_path / "gpu.svg")) == 2
    assert capsys.readouterr().err.endswith("cell 1, sd:4, lacks verify\n")


def test_no_file_and_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Args((), tmp_path / "gpu.svg")) == 2
    assert "no file to draw" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "1.json", measured("ar"))
    for out in tmp_path / "gpu.txt", tmp_path / "nowhere" / "gpu.svg":
        assert main(Args((path,), out)) == 2
        assert f"out is {out}; it must end in .svg or .png" in capsys.readouterr().err


def test_examples() -> None:
    results = doctest.testmod(bench.plot)
    assert results.attempted > 0
    assert results.failed == 0
