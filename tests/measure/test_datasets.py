"""Public prompt sets, from servers on loopback with files in the layout of the real ones."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from saguaro.errors import ConfigError, DatasetError
from saguaro.measure.datasets import DATASETS, Dataset, prompts_file
from saguaro.measure.prompts import read_prompt_file
from tests.default.hub import serve_hub
from tests.loopback import Quiet, listening

ROWS: dict[str, Any] = {
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""},
    "gsm8k": {"question": "How many?", "answer": "#### 2"},
    "alpaca": {"instruction": "Add.", "input": "1, 2", "output": "3"},
    "ultrafeedback": {"source": "evol_instruct", "instruction": "Say why.", "completions": []},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
    "spec-bench": {"question_id": 1, "category": "qa", "turns": ["Who?"]},
}
PROMPTS = {
    "humaneval": "def f():\n",
    "gsm8k": "How many?",
    "alpaca": "Add.\n\n1, 2",
    "ultrafeedback": "Say why.",
    "mt-bench": "First.",
    "spec-bench": "Who?",
}


def write_source(dataset: Dataset, folder: Path, n: int) -> Path:
    """A source of n rows, in the format of the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [ROWS[dataset.name]] * n
    lines = json.dumps(rows) if dataset.file.endswith(".json") else "\n".join(map(json.dumps, rows)) + "\n"
    path = folder / dataset.file
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


class Files(Quiet, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


@contextmanager
def serve_files(folder: Path) -> Iterator[str]:
    """Serve a folder's files; its address."""
    with listening(partial(Files, directory=str(folder))) as address:
        yield address


def test_every_set_has_rows_here() -> None:
    assert set(ROWS) == set(PROMPTS) == set(DATASETS)


@pytest.mark.parametrize("name", sorted(name for name, each in DATASETS.items() if each.source.startswith("https:")))
def test_a_set_is_fetched_once_and_checked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = DATASETS[name]
    write_source(real, tmp_path / "web", real.n_rows)
    with serve_files(tmp_path / "web") as address:
        dataset = replace(real, source=f"{address}/{real.file}")
        path = prompts_file(dataset, tmp_path / "cache")
        said = capsys.readouterr().err
        assert f"from {dataset.place}, licence {real.licence}; kept as {path}" in said
    assert prompts_file(dataset, tmp_path / "cache") == path, "the server is gone"
    assert capsys.readouterr().err == ""
    asked = read_prompt_file(path)
    assert len(asked) == real.n_rows
    assert asked[-1].prompt == PROMPTS[name]
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing unfinished is left"


USE = "from pathlib import Path; from saguaro.measure.prompts import read_prompts; print(read_prompts([Path('{}')], 2))"


def test_a_set_of_the_hub_is_fetched_through_its_client(tmp_path: Path) -> None:
    dataset = DATASETS["ultrafeedback"]
    write_source(dataset, tmp_path / "hub", dataset.n_rows)
    repo = "datasets/" + dataset.source.removeprefix("hub:").rpartition("/")[0]
    with serve_hub(repo, tmp_path / "hub") as address:
        own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "SAGUARO_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-c", USE.format("ultrafeedback")]
        environment = {**os.environ, **own, "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{[PROMPTS['ultrafeedback']] * 2}\n", done.stderr
    assert "saguaro: ultrafeedback: 10,000 instructions" in done.stderr


def test_offline_it_says_what_to_fetch_and_where_to_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAGUARO_CACHE", str(tmp_path))
    nowhere = replace(DATASETS["gsm8k"], source="http://127.0.0.1:1/data/test.jsonl")
    monkeypatch.setitem(DATASETS, "gsm8k", nowhere)
    by_hand = tmp_path / "datasets" / "gsm8k" / "test.jsonl"
    with pytest.raises(DatasetError, match="Connection refused") as found:
        read_prompt_file(Path("gsm8k"))
    assert f"Fetch its file test.jsonl elsewhere and put it at {by_hand}" in str(found.value)
    write_source(DATASETS["gsm8k"], by_hand.parent, DATASETS["gsm8k"].n_rows)
    capsys.readouterr()
    assert read_prompt_file(Path("gsm8k"))[0].prompt == PROMPTS["gsm8k"]
    assert "fetching" not in capsys.readouterr().err


def test_a_download_that_is_cut_short_is_not_kept(tmp_path: Path) -> None:
    real = DATASETS["mt-bench"]
    whole = write_source(real, tmp_path / "web", real.n_rows).read_bytes()

    class Cut(Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole[: len(whole) // 2])

    with listening(Cut) as address:
        dataset = replace(real, source=f"{address}/{real.file}")
        with pytest.raises(DatasetError, match=rf"only {len(whole) // 2} of {len(whole)} bytes arrived"):
            prompts_file(dataset, tmp_path / "cache")
    assert list((tmp_path / "cache" / "datasets").iterdir()) == []


def test_a_file_that_is_another_is_refused(tmp_path: Path) -> None:
    real = DATASETS["mt-bench"]
    folder = tmp_path / "datasets" / real.name
    for n, row, why in (
        (real.n_rows - 1, ROWS[real.name], "holds 79 prompts, and mt-bench has 80"),
        (80, {}, "KeyError"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / real.file).write_text("\n".join([json.dumps(row)] * n))
        with pytest.raises(DatasetError, match=why):
            prompts_file(real, tmp_path)
    (folder / real.file).write_bytes(b"\x1f\x8b no text")
    with pytest.raises(DatasetError, match="is not the set mt-bench"):
        prompts_file(real, tmp_path)


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("alpaca").write_text("mine\n")
    assert [asked.prompt for asked in read_prompt_file(Path("alpaca"))] == ["mine"]
    with pytest.raises(ConfigError, match="or one of the sets humaneval, gsm8k"):
        read_prompt_file(Path("alpaka"))
