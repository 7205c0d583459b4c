"""`saguaro distill` as its users have it: one command, a folder, and a draft that changes no token."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from saguaro import LLM, SamplingParams
from saguaro.cli.main import main
from saguaro.model.tiny import write_tiny
from tests.cli.here import Here

ASKED = [f"{a} {b}?" for a in ("why", "how", "when", "who", "where") for b in ("a", "an owl", "it", "us", "no")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ASKED))
    return path


def arguments(target: Path, prompts: Path, out: Path, others: dict[str, Any] | None = None) -> list[str]:
    """A command of a few seconds."""
    settings: dict[str, Any] = {
        "target": target, "prompts": prompts, "out": out, "texts": 24, "max_tokens": 24, "layers": 2, "head": 120,
        "steps": 30, "batch_texts": 4, "length": 48, "evaluate": 4, "threads": 1, "learning_rate": 4e-3,
        **(others or {}),
    }  # fmt: skip
    flags = [
        [f"--{name.replace('_', '-')}", *([str(one) for one in value] if isinstance(value, list) else [str(value)])]
        for name, value in settings.items()
        if value is not None
    ]
    return [sys.executable, "-m", "saguaro", "distill", *(part for flag in flags for part in flag)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def refuse(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that cannot be run says."""
    done = Here(capsys)(*command[3:])
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


@pytest.fixture(scope="module")
def made(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A draft, and what the command said of it."""
    out = tmp_path_factory.mktemp("made") / "draft"
    done = run(arguments(target, prompts, out))
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_the_draft_learns_and_is_evaluated(made: tuple[Path, dict[str, Any]]) -> None:
    out, said = made
    assert said == json.loads((out / "distill.json").read_text())
    assert said["texts"]["texts"] == 24
    assert 0.5 < said["texts"]["share_the_head_can_say"] < 1
    assert said["training"]["last"]["loss"] < said["training"]["first"]["loss"]
    assert said["training"]["last"]["acceptance"] > said["training"]["first"]["acceptance"]
    assert said["settings"]["layers"] == 2
    for temperature in ("0", "1"):
        found = said[f"temperature {temperature}"]
        assert len(found["acceptance_by_position"]) <= found["lookahead"] == 4
        assert 1 <= found["tokens_per_round"] <= 5
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "token_map.safetensors", "distill.json", "work",
    }  # fmt: skip


@pytest.mark.parametrize("link", ["inline", "process"])
def test_it_drafts_and_changes_no_token(made: tuple[Path, dict[str, Any]], target: Path, link: str) -> None:
    params = [SamplingParams(temperature=heat, seed=5, max_tokens=24) for heat in (0.0, 1.0)]
    with (
        LLM(target, threads=1) as plain,
        LLM(target, draft=str(made[0]), method="ssd", link=link, threads=1) as drafted,
    ):
        wanted, found = (llm.generate(["why an owl?"] * 2, params) for llm in (plain, drafted))
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


def test_prompts_of_the_target_itself_and_int8(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without any prompts: ours beside what the target asks; stored in 8 bits."""
    out = tmp_path / "draft"
    command = arguments(target, Path("none"), out, {"questions": 40, "stored": "int8", "max_tokens": 16})
    at = command.index("--prompts")
    del command[at : at + 2]
    done = Here(capsys)(*command[3:])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["prompts"]["given"] == 1  # 24 texts, and more questions than that
    assert 0 < said["prompts"]["own_questions"] <= 40
    stored = load_file(out / "model.safetensors")
    assert stored["lm_head.weight"].dtype == torch.int8
    asked = ["generate", "--model", str(target), "--draft", str(out), "--prompt", "a", "--max-tokens", "9"]
    done = Here(capsys)(*asked)
    assert done.returncode == 0, done.stderr


def without(command: list[str], *flags: str) -> list[str]:
    """The command without these flags and their values."""
    pairs = zip(command[4::2], command[5::2], strict=True)
    return command[:4] + [part for pair in pairs if pair[0] not in flags for part in pair]


@pytest.mark.parametrize("head", [None, 100])
def test_a_draft_begun_from_another(
    made: tuple[Path, dict[str, Any]],
    target: Path,
    prompts: Path,
    tmp_path: Path,
    head: int | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has the layers of the first and its head or another, and begins where that one ended."""
    start, first = made
    given = {"start": start, **({} if head is None else {"head": head})}
    left_out = ["--layers", *([] if head else ["--head"])]
    done = Here(capsys)(*without(arguments(target, prompts, tmp_path / "more", given), *left_out)[3:])
    assert done.returncode == 0, done.stderr
    more = json.loads(done.stdout)
    assert more["texts"]["head_rows"] == (head or first["texts"]["head_rows"])
    assert more["texts"]["tokens"] == first["texts"]["tokens"]
    assert more["training"]["first"]["loss"] < first["training"]["first"]["loss"]
    assert more["training"]["last"]["loss"] < first["training"]["last"]["loss"]


def test_the_same_command_again_makes_nothing_new(
    made: tuple[Path, dict[str, Any]], target: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, said = made
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    done = Here(capsys)(*arguments(target, prompts, out)[3:])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupted_command_goes_on(
    made: tuple[Path, dict[str, Any]], target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while it samples and while it trains, it comes to the same weights."""
    command = arguments(target, prompts, tmp_path / "draft")
    for sign in ("work/texts", "work/training"):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            until = time.monotonic() + 120
            while not (tmp_path / "draft" / sign).exists() and running.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=60)
    done = Here(capsys)(*command[3:])
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "token_map.safetensors"):
        assert (tmp_path / "draft" / name).read_bytes() == (made[0] / name).read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head": 90}, r"begun with other settings \(head; head was 120 and is 90\)"),
        ({"target": "nowhere"}, "begun with other settings"),
        ({"prompts": "nobody.jsonl"}, "cannot read prompts from nobody.jsonl"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"unroll": 3}, "unroll is 3, which a draft of kind model does not have; leave unroll out"),
        ({"unroll_decay": 0.5}, "unroll_decay is 0.5, which a draft of kind model does not have"),
        ({"feature_layers": 1}, r"feature_layers is \(1,\), which a draft of kind model does not have"),
        ({"kind": "eagle3"}, "layers is 2, which a draft of kind eagle3 does not have; leave layers out"),
        ({"questions": -1}, "questions is -1; it must be 0 or more"),
        ({"evaluate": 25}, "evaluate is 25; of 25 prompts hold out some and not all, or 0 for none"),
    ],
)
def test_refusals(
    made: tuple[Path, dict[str, Any]],
    target: Path,
    prompts: Path,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert re.search(message, refuse(arguments(target, prompts, made[0], changed), capsys))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target": "nowhere"}, "'nowhere' is no folder"),
        ({"layers": 9}, "the draft is to have 9 layers; the target has 4"),
        ({"head": 1}, "head is 1; it must hold more than"),
        ({"start": "here"}, "start is here, whose layers are kept; leave layers out"),
    ],
)
def test_refusals_at_the_beginning(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refuse(arguments(target, prompts, tmp_path / "draft", changed), capsys)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("nowhere", "nowhere"),
        ("target", "which is no draft that `saguaro distill` made"),
        ("default", "was made for a target of 49152 tokens and hidden size 576"),
    ],
)
def test_nothing_to_begin_from(
    target: Path, prompts: Path, tmp_path: Path, start: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"start": target if start == "target" else start}
    command = without(arguments(target, prompts, tmp_path / "draft", given), "--layers", "--head")
    assert message in refuse(command, capsys)


EAGLE: dict[str, Any] = {"kind": "eagle3", "layers": None, "feature_layers": [1, 3, 4], "unroll": 3, "steps": 20}


@pytest.fixture(scope="module")
def eagle(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An EAGLE-3 head, and what the command said of it."""
    out = tmp_path_factory.mktemp("eagle") / "draft"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        main(arguments(target, prompts, out, EAGLE)[3:])
    assert ended.value.code == 0
    return out, json.loads(said.getvalue())


def test_an_eagle3_head_learns_and_is_evaluated(eagle: tuple[Path, dict[str, Any]], target: Path) -> None:
    out, said = eagle
    assert said["settings"]["kind"] == "eagle3"
    assert said["settings"]["feature_layers"] == [1, 3, 4]
    assert said["training"]["last"]["loss"] < said["training"]["first"]["loss"]
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "distill.json", "work"}
    for temperature in ("0", "1"):
        assert 1 <= said[f"temperature {temperature}"]["tokens_per_round"] <= 5
    params = [SamplingParams(temperature=heat, seed=5, max_tokens=24) for heat in (0.0, 1.0)]
    with LLM(target, threads=1) as plain, LLM(target, draft=str(out), method="ssd", threads=1) as drafted:
        wanted, found = (llm.generate(["why an owl?"] * 2, params) for llm in (plain, drafted))
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


def test_an_eagle3_head_begun_from_another(
    eagle: tuple[Path, dict[str, Any]],
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on where that one ended; this one is not evaluated."""
    start, first = eagle
    given = {**EAGLE, "start": start, "feature_layers": None, "head": None, "evaluate": 0}
    done = Here(capsys)(*arguments(target, prompts, tmp_path / "more", given)[3:])
    assert done.returncode == 0, done.stderr
    more = json.loads(done.stdout)
    assert more["texts"]["head_rows"] == first["texts"]["head_rows"]
    assert more["training"]["first"]["loss"] < first["training"]["first"]["loss"]
    assert "temperature 0" not in more
    config = json.loads((tmp_path / "more" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 1}, "layers is 1, which a draft of kind eagle3 does not have; leave layers out"),
        ({"stored": "int8"}, "stored is int8, which a draft of kind eagle3 does not have; leave stored out"),
        ({"feature_layers": None}, "the target has 4 layers, and the usual feature layers"),
        ({"feature_layers": [1, 5]}, "feature_layers is [1, 5]; give layers from 1 to 4"),
        ({"start": "default", "feature_layers": None}, "start is default, which is no EAGLE-3 draft"),
        ({"start": "here"}, "start is here, whose feature layers are kept; leave feature_layers out"),
        ({"start": "nowhere", "feature_layers": None}, "nowhere"),
        ({"unroll": 0}, "unroll is 0; it must be at least 1"),
        ({"unroll_decay": 1.5}, "unroll_decay is 1.5; it must be at most 1"),
        ({"head": 1}, "head is 1; it must hold more than"),
    ],
)
def test_eagle3_refusals_at_the_beginning(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refuse(arguments(target, prompts, tmp_path / "draft", {**EAGLE, **changed}), capsys)
    assert not (tmp_path / "draft" / "work" / "texts").exists()


def test_a_folder_that_is_no_folder(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for name, message in (("file", "which is a file"), ("full", "which holds something else")):
        assert message in refuse(arguments(target, prompts, tmp_path / name), capsys)
