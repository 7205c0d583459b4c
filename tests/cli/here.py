"""The command in this process, without another two seconds of imports: for what a process has shown already."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from saguaro.cli.main import main


class Here:
    """Runs the command to its end."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stdin", io.StringIO(stdin))
            with pytest.raises(SystemExit) as ended:
                main(args)
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(args, ended.value.code, said.out, said.err)

    def writing_to(self, path: Path, *args: str) -> "subprocess.CompletedProcess[str]":
        """The same, with a file as its standard output."""
        with path.open("w") as out, pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            return self(*args)
