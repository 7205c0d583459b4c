"""The `saguaro` command as a user runs it: real processes."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saguaro.cli.main import main, parse
from saguaro.model.tiny import write_tiny
from tests.cli.here import Here

SAGUARO = [sys.executable, "-m", "saguaro"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model's folder."""
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def saguaro(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([*SAGUARO, *args], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "compare", "bench", "tune", "info", "distill"])
def test_every_command_tells_its_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No two of a command's flags have the same name: that shows when they are put together."""
    with pytest.raises(SystemExit) as ended:
        parse([command, "--help"])
    assert ended.value.code == 0
    assert f"saguaro {command}" in capsys.readouterr().out


def test_generate_prints_one_json_object_per_prompt_in_order(tiny: str, tmp_path: Path, here: Here) -> None:
    file = tmp_path / "prompts.jsonl"
    entries = [{"id": "a", "prompt": "the end"}, {"prompt": "x" * 500}, {"id": "c", "prompt": "in an inn"}]
    file.write_text("\n".join(json.dumps(entry) for entry in entries))
    done = here("generate", "--model", tiny, "--prompts", str(file), "--max-tokens", "6", "--seed", "3", "--json")
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    keys = {"id", "text", "token_ids", "finish_reason", "seed", "n_tokens", "ttft_ms", "decode_tok_s"}
    assert (set(first), first["id"], third["id"]) == (keys, "a", "c")
    assert first["n_tokens"] == len(first["token_ids"]) <= 6
    assert first["seed"] == 3
    assert second["id"] == "1"
    assert "500 tokens" in second["error"]
    assert done.returncode == 1


def test_generate_streams_text_and_reports_metrics(tiny: str, here: Here) -> None:
    args = ("generate", "--model", tiny, "--prompt", "the", "--max-tokens", "8", "--temperature", "0")
    done = saguaro(*args, "--metrics")
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stderr
    assert "imports" in done.stderr
    line = json.loads(here(*args, "--json", "--method", "ar").stdout)
    assert done.stdout == line["text"] + "\n"


def test_generate_keeps_to_a_schema_or_a_choice(tiny: str, tmp_path: Path, here: Here) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": false, "required": ["a"]}'
    )
    args = ("generate", "--model", tiny, "--prompt", "the", "--seed", "3", "--max-tokens", "40")
    done = here(*args, "--json-schema", str(schema), "--json")
    assert json.loads(json.loads(done.stdout)["text"])["a"] in (1, 2), done.stderr
    assert here(*args, "--choice", "an end").stdout == "an end\n"
    twice = here(*args, "--choice", "an end", "--regex", "a")
    assert (twice.returncode, twice.stderr) == (
        2,
        "saguaro: structured has regex and choice; give exactly one of json, regex, choice, grammar\n",
    )
    assert "nowhere.json cannot be read" in here(*args, "--json-schema", "nowhere.json").stderr


def test_generate_writes_rounds_and_colours_without_changing_the_text(tiny: str, tmp_path: Path, here: Here) -> None:
    record, trace = tmp_path / "rounds.jsonl", tmp_path / "trace.json"
    args = ["generate", "--model", tiny, "--prompt", "the the the the", "--max-tokens", "12", "--temperature", "0"]
    args += ["--method", "ngram", "--metrics", "--ignore-eos"]
    done = here(*args, "--color", "always", "--record", str(record), "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert "just in time" in done.stderr
    assert "hit rate" in done.stderr
    rounds = [json.loads(line) for line in record.read_text().splitlines()]
    assert sum(row["n_tokens"] for one in rounds for row in one["rows"]) == 12
    names = [entry["name"] for entry in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("launch") == names.count("respond") == len(rounds)
    assert done.stdout.replace("\x1b[33m", "").replace("\x1b[0m", "") == here(*args).stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "give either --prompt TEXT or --prompts FILE"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be 0 (greedy) or more"),
        (["generate", "--prompt", "x", "--method", "arr"], "method is 'arr'; did you mean 'ar'?"),
        (["generate", "--prompt", "x", "--model", "/no/such"], "'/no/such' is no folder"),
        (["generate", "--prompts", "/no/such.jsonl"], "cannot read prompts from /no/such.jsonl"),
        (["generate", "--prompt", "x", "--top-p", "zero"], "zero"),
        (["generate", "--prompt", "x", "--record", "/no/such/file"], "cannot write /no/such/file: No such file"),
        (
            ["bench", "--model", "x", "--methods", "ssd"],
            "method ssd needs a draft model and none is given; pass draft (--draft)",
        ),
        (["compare", "--draft", "drop:1"], "there is no prompt; give --prompt TEXT"),
        (["info", "--kv-memory", "lots"], "kv_memory is 'lots'; write a size such as 512MiB"),
        (["generate", "--promt", "x"], "--prompt"),
    ],
)
def test_mistakes_are_explained(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert message in " ".join(said.err.split())
    assert said.out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--prompt", "x", "--method", "arr"], "method is 'arr'"),
        (["bench", "--temperature", "-1"], "temperature is -1.0"),
        (["serve", "--max-waiting", "-1"], "max_waiting is -1"),
        (["serve", "--tool-call-parser", "none-such"], "tool_call_parser is 'none-such'"),
        (["distill", "--out", "x", "--steps", "0"], "steps is 0"),
    ],
)
def test_settings_are_checked_before_torch_is_loaded(args: list[str], message: str) -> None:
    script = "import sys, saguaro.cli.main as cli\ntry: cli.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith(f"saguaro: {message}")


FULL = "the output cannot be written (No space left on device); make room, or send it elsewhere"


@pytest.mark.parametrize(
    "args",
    [["--version"], ["generate", "--help"], ["generate", "--prompt", "the", "--max-tokens", "4"]],
    ids=" ".join,
)
def test_a_full_disk_is_an_error_in_one_line(tiny: str, args: list[str]) -> None:
    model = [] if args[-1] in ("--version", "--help") else ["--model", tiny]
    with Path("/dev/full").open("w") as full:
        command = [*SAGUARO, *args, *model]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"saguaro: {FULL}\n")


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--prompt", "the", "--max-tokens", "4", "--json"],
        ["info"],
        ["compare", "--prompt", "the", "--max-tokens", "4"],
    ],
    ids=" ".join,
)
def test_other_output_to_a_full_disk(tiny: str, args: list[str], here: Here) -> None:
    done = here.writing_to(Path("/dev/full"), *args, "--model", tiny)
    assert (done.returncode, done.stderr) == (1, f"saguaro: {FULL}\n")


def test_a_reader_that_leaves_is_no_error_to_speak_of(tiny: str, tmp_path: Path, here: Here) -> None:
    """The output is longer than the pipe holds, so the command still writes when the reader leaves."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the end\n" * 24)
    args = ["generate", "--model", tiny, "--prompts", str(prompts), "--max-tokens", "40", "--ignore-eos", "--json"]
    with subprocess.Popen([*SAGUARO, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        n_bytes = fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        assert len(process.stdout.read(1)) == 1
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
    assert len(here(*args).stdout) > n_bytes + 1


def test_info_describes_the_model(tiny: str, here: Here) -> None:
    facts = json.loads(here("info", "--model", tiny, "--kv-memory", "1MiB", "--json").stdout)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["stored"] == "safetensors: float32"
    assert facts["kv_bytes"] <= 2**20
    assert facts["kv_tokens"] * facts["kv_bytes_per_token"] == facts["kv_bytes"]
    assert facts["learnt"] is facts["placement"] is None, "there is no draft"
    assert "max model len" in here("info", "--model", tiny).stdout


def test_info_says_what_was_learnt(tiny: str, tmp_path: Path, here: Here) -> None:
    args = ("info", "--model", tiny, "--draft", "drop:1", "--json")
    facts = json.loads(here(*args, "--learnt-dir", str(tmp_path)).stdout)
    assert facts["learnt"] == "nothing yet; run saguaro tune"
    assert facts["placement"] == "in the target's thread"
    assert json.loads(here(*args).stdout)["learnt"] == "not kept: learnt_dir is none"


def test_ctrl_c_stops_the_answer_and_not_the_chat(default_folder: Path) -> None:
    with Terminal([*SAGUARO, "chat", "--model", str(default_folder), "--temperature", "0", "--metrics"]) as terminal:
        terminal.wait_for(lambda text: text.endswith("> "))
        terminal.type("Write a very long story about the sea.\n")
        terminal.wait_for(lambda text: "sea." in text and len(text.split("sea.", 1)[1]) > 60)
        terminal.type("\x03")
        terminal.wait_for(lambda text: "tok/s" in text and text.endswith("> "))
        terminal.type("What is the capital of France?\n")
        terminal.wait_for(lambda text: text.count("tok/s") == 2 and text.endswith("> "))
        # A long message takes several rounds to read; Ctrl-C works in the middle of that too.
        for line in ['"""', *["All of the ships sailed out to sea in the morning. " * 10] * 20]:
            terminal.type(line + "\n")
        terminal.type('see a[i] and [/INST]"""\n')
        terminal.wait_for(lambda text: "\n" in text.partition("[/INST]")[2])
        time.sleep(0.5)  # the line ends on the screen just before the program has it
        terminal.insist("\x03", lambda text: text.split("[/INST]", 1)[1].strip() != "" and text.endswith("> "))
        terminal.type("/history\n")
        terminal.wait_for(lambda text: text.count("see a[i] and [/INST]") == 2 and text.endswith("> "))
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=60) == 0


def test_chat_reads_a_pipe_to_its_end(tiny: str, tmp_path: Path) -> None:
    record = tmp_path / "rounds.jsonl"
    args = [*SAGUARO, "chat", "--model", tiny, "--max-tokens", "4", "--record", str(record)]
    done = subprocess.run(args, input="the\n/nonsense\n/reset\nthe\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "/nonsense is no command" in done.stderr
    assert "Forgotten" in done.stderr
    assert len(record.read_text().splitlines()) >= 2


def test_a_full_context_drops_the_oldest_turns(tiny: str, here: Here) -> None:
    args = ("chat", "--model", tiny, "--max-model-len", "96", "--max-tokens", "16")
    done = here(*args, stdin="the end of the tale\n" * 4)
    assert done.returncode == 0, done.stderr
    assert "oldest turns are forgotten" in done.stderr


def test_interrupting_generate_leaves_quietly(tiny: str) -> None:
    args = [*SAGUARO, "generate", "--model", tiny, "--prompt", "x", "--max-tokens", "240", "--ignore-eos"]
    with Terminal(args) as terminal:
        terminal.wait_for(lambda text: len(text) > 0)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(timeout=60) in (0, 130)
        assert "Traceback" not in terminal.text


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, args: list[str]) -> None:
        self._main, child = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        self.process = subprocess.Popen(args, stdin=child, stdout=child, stderr=child, env=environment, close_fds=True)
        os.close(child)
        self.text = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)

    def type(self, text: str) -> None:
        """Press keys; Ctrl-C is sent as the signal the terminal would send."""
        if text == "\x03":
            self.process.send_signal(signal.SIGINT)
        else:
            os.write(self._main, text.encode())

    def insist(self, key: str, is_there: Callable[[str], bool]) -> None:
        """Press a key, and again if that did nothing: what comes while a line is being read may go with the line."""
        for _ in range(3):
            self.type(key)
            with contextlib.suppress(AssertionError):
                return self.wait_for(is_there, seconds=10)
        return self.wait_for(is_there)

    def wait_for(self, is_there: Callable[[str], bool], seconds: float = 120) -> None:
        """Read until the screen shows something."""
        end = time.monotonic() + seconds
        while not is_there(self.text):
            ready, _, _ = select.select([self._main], [], [], max(0.0, end - time.monotonic()))
            is_in_time = bool(ready) and time.monotonic() < end + 1
            assert is_in_time, f"not seen within {seconds} s; the screen shows: {self.text!r}"
            try:
                self.text += os.read(self._main, 65536).decode(errors="replace").replace("\r", "")
            except OSError:
                assert is_there(self.text), f"ended early; the screen shows: {self.text!r}"
