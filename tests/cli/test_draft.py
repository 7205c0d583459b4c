"""`saguaro draft` as it is started, used and ended."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from saguaro import LLM, SamplingParams
from saguaro.cli.commands import Draft
from saguaro.cli.main import main, parse
from saguaro.link.address import Address, listen, name_of
from saguaro.model.tiny import write_tiny
from tests.link.service import key_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=4)


class Started:
    """A running `saguaro draft`."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "saguaro", "draft", "--listen", "127.0.0.1:0", "--threads", "1", *flags]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.popen.stderr is not None
        self.log = list[str]()
        for line in self.popen.stderr:
            self.log.append(line)
            if found := re.match(r"saguaro: serving the draft (\S+) on (tcp://\S+)$", line):
                self.model, self.url = found[1], found[2]
                break

    def end(self, number: int) -> int:
        """Send a signal; returns the exit status."""
        self.popen.send_signal(number)
        self.log += self.popen.stderr or ()
        return self.popen.wait()


@contextlib.contextmanager
def started(*flags: str) -> Iterator[Started]:
    one = Started(*flags)
    try:
        yield one
    finally:
        one.popen.kill()
        one.popen.wait()
        assert one.popen.stderr is not None
        one.popen.stderr.close()


def test_it_serves_says_what_goes_on_and_ends(folder: Path, tmp_path: Path) -> None:
    key, params = key_file(tmp_path), SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    flags = ("drop:2", "--target", str(folder), "--key-file", key, "--status-seconds", "0.05", "--dtype", "int8")
    with started(*flags) as one, LLM(folder, device="cpu", kv_memory="2MiB", threads=1) as plain:
        assert one.model == "drop:2"
        settings = {"draft": f"{one.url}/drop:2", "draft_key_file": key, "method": "sd"}
        with plain.sibling(**settings) as llm:
            assert llm.generate("the", params)[0].token_ids == plain.generate("the", params)[0].token_ids
            assert llm.engine.round.draft.n_late == 0  # type: ignore[attr-defined]
        assert one.end(signal.SIGTERM) == 0
    log = "".join(one.log)
    assert re.search(r"session 1: 127\.0\.0\.1:\d+ is connected", log)
    assert re.search(r"session 1: .* has left \(it was closed\) after [\d.]+ s, \d+ requests", log)
    assert "Traceback" not in log


def test_flags_and_what_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["draft", "M", "--listen", "10.0.0.1:7200", "--key-file", "k", "--max-sessions", "2"])
    assert command == Draft(model="M", listen="10.0.0.1:7200", key_file=Path("k"), max_sessions=2)
    with contextlib.closing(listen(Address("127.0.0.1", 0), is_keyed=False)) as place:
        taken = name_of(place.getsockname())
        cases = {
            ("--listen", taken): f"cannot listen on {taken}: Address already in use; choose another --listen",
            ("--listen", "0.0.0.0:0"): "and there is no key; make one with `openssl rand",
            ("--listen", "here:there"): "'here:there' is no address; write HOST:PORT",
            ("--key-file", "/none"): "the key file /none cannot be read: No such file",
            ("--max-rows", "0"): "max_rows is 0; it must be between 1 and 4096",
            ("--status-seconds", "0"): "status_seconds is 0; it must be at least 0.01",
        }
        for flags, said in cases.items():
            with pytest.raises(SystemExit) as e:
                main(["draft", str(folder), "--device", "cpu", *flags])
            assert (e.value.code, said in capsys.readouterr().err) == (2, True), said
    assert torch.get_num_threads() == 1
    with pytest.raises(SystemExit):
        main(["tune", str(folder), "--draft", "tcp://127.0.0.1:1"])
    assert "which runs where it is served, so there is no place to choose" in capsys.readouterr().err
