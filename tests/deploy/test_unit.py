"""The systemd unit: systemd accepts it, and the command in it is one that the server knows."""

import configparser
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.deploy.test_container import ROOT, serve_help

UNIT = ROOT / "deploy" / "saguaro.service"


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string(UNIT.read_text())
    return found


def test_the_command_is_known_and_drains_in_time() -> None:
    service = unit()["Service"]
    program, command, *words = service["ExecStart"].split()
    assert (Path(program).name, command) == ("saguaro", "serve")
    known = serve_help()
    flags = {word: value for word, value in pairwise(words) if word.startswith("--")}
    for flag in flags:
        assert re.search(rf"{flag}\b", known), flag
    assert int(service["TimeoutStopSec"]) > float(flags["--drain-seconds"])
    assert service["CacheDirectory"] == "saguaro"
    assert "SAGUARO_CACHE=%C/saguaro" in service["Environment"].split()


def test_what_would_stop_the_server_is_not_asked_for() -> None:
    """Code is generated at run time, and /proc is read."""
    service = unit()["Service"]
    assert "MemoryDenyWriteExecute" not in service
    assert "ProcSubset" not in service
    assert service["NoNewPrivileges"] == "yes"


def test_systemd_accepts_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text = UNIT.read_text().replace("/opt/saguaro/bin/saguaro", "/bin/true")  # it must be there
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(tmp_path / UNIT.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
