"""The command that measures how fast prompts are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.prompts import Args, main
from saguaro.errors import ConfigError


@pytest.mark.network
def test_the_command(default_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "prompts.json"
    flags: dict[str, Any] = {"target": "smollm2", "draft": "drop:5-29", "device": "cpu", "dtype": "float32"}
    assert main(Args(**flags, cells=("ar", "sd:2"), lengths=(40,), crowd=2, repeats=1, json=out)) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["cell"], cell["length"]) for cell in cells] == [("ar", 40), ("sd:2", 40)]
    for cell in cells:
        assert cell["tok_s"] == pytest.approx(40 / cell["first_ms"] * 1e3)
        assert cell["crowd_last_ms"] >= cell["crowd_ms"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"target": "99b"}, "target is '99b'; it must be one of"),
        ({"draft": "suffix"}, "draft is 'suffix'; it must be one of"),
        ({"cells": ("ssb",)}, "method is 'ssb'"),
        ({"lengths": (3,)}, "each must be more than 16 tokens"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Args(**flags)
