"""`saguaro report` as a command: a run, a second one, what it refuses, and its exit status."""

import json
import sys
from pathlib import Path

import pytest
import torch

from saguaro.cli.commands import Report
from saguaro.cli.main import parse
from saguaro.cli.report import command_line, texts_of
from saguaro.measure.prompts import OURS
from saguaro.model.tiny import write_tiny
from saguaro.report.experiments.table import EXPERIMENTS
from tests.cli.here import Here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=3))


def test_a_run_a_second_one_and_a_page_alone(folder: str, tmp_path: Path, here: Here) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    args = ("report", "--model", folder, "--draft", "drop:1", "--threads", "1", "--only", "tables", "--out", str(out))
    done = here(*args)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out / 'report.html'}\n"
    assert "[1/2] table, " in done.stderr
    found = json.loads((out / "report.json").read_text())
    assert found["command"].startswith("saguaro report --quick --model ")
    assert found["command"].endswith(" --threads 1 --only tables")
    assert len(found["cells"]) == 2
    assert all(one["machine"]["cores"] for one in found["cells"].values())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "2 of 2 measured" in page
    again = here(*args)
    assert again.returncode == 0
    assert "2 of 2 cells are finished" in again.stderr
    assert "[1/2]" not in again.stderr
    more = here(*args, "--pair", f"{folder}=drop:2")
    assert more.returncode == 0, more.stderr
    assert "2 of 4 cells are finished" in more.stderr
    assert "[4/4] table, " in more.stderr
    assert "with drop:2, writing: " in more.stderr
    other = here(*args, "--no-chat", "--page-only")
    assert other.returncode == 0
    assert "0 of 2 measured" in (out / "report.html").read_text(encoding="utf-8"), "other settings, nothing finished"
    changed = here(*args, "--no-chat")
    assert "2 finished cells are of other settings" in changed.stderr


def test_prompt_sets_by_name(tmp_path: Path) -> None:
    assert list(texts_of(())) == ["questions", "writing"]
    assert sorted(text for texts in texts_of(()).values() for text in texts) == sorted(OURS)
    (tmp_path / "own.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    given = texts_of(((Path("built-in"),), (tmp_path / "own.jsonl",)))
    assert given == {"built-in": OURS, "own": ["one", "two"]}


def test_the_command_that_a_page_names() -> None:
    words = ["report", "--full", "--prompts", "a b.txt", "--draft", "drop:1", "--pair", "x=y", "--only", "fig5"]
    command = parse([*words, "--no-chat", "--out", "there"])
    assert isinstance(command, Report)
    named = "saguaro report --full --draft drop:1 --prompts 'a b.txt' --pair x=y --no-chat"
    assert command_line(command) == named


def test_tokens_that_differ_are_an_exit_status(folder: str, tmp_path: Path, here: Here) -> None:
    args = ("report", "--model", folder, "--draft", "drop:1", "--threads", "1", "--only", "tables")
    pytest.importorskip("matplotlib")
    assert here(*args, "--out", str(tmp_path)).returncode == 0
    path = next((tmp_path / "cells").iterdir())
    cell = json.loads(path.read_text())
    cell["measured"]["entries"][1]["differ"] = 2
    path.write_text(json.dumps(cell))
    done = here(*args, "--out", str(tmp_path))
    assert done.returncode == 1
    assert "OUTPUT DIFFERS: 2 tokens that must equal those of ar do not" in done.stderr


def test_the_list(here: Here, tmp_path: Path) -> None:
    done = here("report", "--list", "--out", str(tmp_path / "none"))
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(EXPERIMENTS)
    assert not (tmp_path / "none").exists()


def test_without_matplotlib(here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = here("report", "--only", "fig5", "--out", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "which is missing; pip install 'saguaro-llm[bench]'" in done.stderr
    assert not (tmp_path / "none").exists(), "nothing is measured that cannot be drawn"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--only", "fig9"), "only names 'fig9', which is no experiment; did you mean 'fig"),
        (("--only", "zzz"), "known: fig3, fig4"),
        (("--only", ","), "only is ','; name one or more of fig3"),
        (("--page-only", "--draft", "drop:1"), "report is no folder of a report; name one with --out"),
        (("--quick", "--full"), "--quick and --full are given; choose one of them"),
        (("--pair", "big"), "pair is 'big'; write TARGET=DRAFT"),
        (("--pair", "default=default"), "two pairs are called 'SmolLM2-135M-Instruct with its draft'"),
        (("--model", "m"), "there is no draft model, and the paper is about drafts; pass draft (--draft)"),
        (("--prompts", "no-such-file"), "cannot read prompts from no-such-file"),
        (("--prompts", "a/x.txt", "--prompts", "b/x.txt"), "two prompt sets have the same name"),
        (("--draft", "drop:1", "--device", "tpu"), "device is 'tpu'; it must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], said: str, here: Here, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("one\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        done = here("report", *args)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "report").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_grown_pairs_need_a_gpu(here: Here) -> None:
    done = here("report", "--gpu")
    assert done.returncode == 2
    assert "--gpu needs a CUDA device, and this machine has none; use --quick or --full" in done.stderr


def test_a_folder_that_cannot_be_written(folder: str, here: Here, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    args = ("--model", folder, "--draft", "drop:1", "--only", "tables")
    done = here("report", *args, "--out", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert "cannot write to" in done.stderr
    assert "give a folder with room for it with --out" in done.stderr
