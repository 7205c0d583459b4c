"""What a start says and sets, as a user meets it."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import saguaro
from saguaro.engine.advice import check_machine
from saguaro.model.tiny import write_tiny
from tests.cli.here import Here
from tests.serve.http.test_command import serving

PHASES = ("compiling CPU kernels", "loading weights", "loading the draft")
SLOW = "no C compiler (gcc, cc, clang) was found; install gcc or clang"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=4))


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to its end, in an environment that says nothing of threads but this."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=False, env={**plain, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_threads_do_not_spin_unless_the_user_says_so(given: dict[str, str], kept: str) -> None:
    script = "import saguaro, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    assert python("-c", script, **given).stdout.strip() == f"{kept} False", "torch reads it as it is loaded"


def test_torch_before_saguaro_is_told_once_how_to_be_faster(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import torch; torch.set_num_threads(2)\nfrom saguaro import LLM\n"
    script += f"for _ in range(2): LLM({folder!r}, device='cpu', kv_memory='2MiB').close()"
    assert python("-c", script).stderr.count("Import saguaro before torch, or set GOMP_SPINCOUNT=10000") == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not saguaro.IS_SPINNING, "$GOMP_SPINCOUNT is set"
    check_machine(torch.device("cpu"), lambda *_: None)
    assert "Import saguaro" not in caplog.text


def test_without_a_c_compiler_it_is_said_once_that_this_is_slow(folder: str, here: Here) -> None:
    """By the command, and not again by what follows in its process."""
    args = ("generate", "--model", folder, "--prompt", "the", "--max-tokens", "2")
    script = f"from saguaro.cli.main import main\ntry: main({args})\nexcept SystemExit as e: assert e.code == 0\n"
    script += "import sys; print('generated', file=sys.stderr)\n"
    script += f"from saguaro import LLM\nfor _ in range(2): LLM({folder!r}, device='cpu', kv_memory='2MiB').close()"
    of_the_command, generated, of_others = python("-c", script, PATH="/nowhere").stderr.partition("generated\n")
    assert generated
    assert (of_the_command.count(SLOW), of_others.count(SLOW)) == (1, 0)
    assert "slow" not in here(*args).stderr


def test_the_log_of_a_server_has_a_line_for_each_phase(folder: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, folder, "--kv-memory", "2MiB", "--draft", "drop:1", "--link", "inline"):
        lines = log.read_text().splitlines()
    told = [line for line in lines if any(phase in line for phase in PHASES)]
    assert [line.removeprefix("INFO:").strip() for line in told] == [f"{phase} ..." for phase in PHASES]
    assert any("loaded, in seconds: weights" in line for line in lines)
    assert any("Nothing is prepared: with --link inline" in line for line in lines)


def test_a_terminal_sees_what_is_loaded_and_a_pipe_does_not(folder: str, here: Here) -> None:
    args = [sys.executable, "-m", "saguaro", "generate", "--model", folder, "--prompt", "the", "--max-tokens", "2"]
    parent, child = pty.openpty()
    seen = b""
    with subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=child, env={**os.environ, "COLUMNS": "100"}) as run:
        os.close(child)
        while piece := _read(parent):
            seen += piece
    assert run.returncode == 0
    assert b"loading weights" in seen
    assert "loading" not in here(*args[3:]).stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "Nothing is prepared: method ar speculates nothing."),
        (("--method", "ngram"), "Nothing is prepared: method ngram drafts just in time."),
        (("--draft", "drop:1", "--link", "inline"), "Nothing is prepared: with --link inline the draft works between"),
        (("--draft", "drop:1", "--link", "inline", "--prepare", "always"), None),
    ],
)
def test_metrics_say_why_nothing_is_prepared(
    folder: str, args: tuple[str, ...], sentence: str | None, here: Here
) -> None:
    command = ("generate", "--model", folder, "--prompt", "the", "--metrics", "--ignore-eos")
    told = here(*command, "--max-tokens", "12", *args).stderr
    assert sentence in told if sentence else "Nothing" not in told


def test_info_and_compare_say_it_too(folder: str, here: Here) -> None:
    args = ("--model", folder, "--draft", "drop:1", "--link", "inline")
    why = json.loads(here("info", "--json", *args).stdout)["preparation"]
    assert why == "Nothing is prepared: with --link inline the draft works between the target's steps, just in time."
    compared = here("compare", "--prompt", "the", "--max-tokens", "8", *args).stdout
    assert f"ssd: {why}" in compared.splitlines()


@pytest.mark.parametrize(("name", "is_forced"), [("demo", False), ("demo-prepare", True)])
def test_the_demo_forces_preparation_only_by_its_own_name(name: str, is_forced: bool) -> None:
    root = Path(__file__).parents[2]
    told = subprocess.run(["make", "-n", name], cwd=root, capture_output=True, text=True, check=True).stdout
    (command,) = (line for line in told.splitlines() if "saguaro compare" in line)
    assert [flag in command for flag in ("--prepare", "--link", "--lookahead")] == [is_forced] * 3


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""
