"""The command line.

Results go to standard output, everything else to standard error. The exit status is 0; 1 if a prompt failed or outputs
differ that must not; 2 if nothing could be done.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from saguaro.cli.args import RayArgs
from saguaro.cli.commands import (
    AnyCommand,
    Bench,
    Chat,
    Command,
    Compare,
    Distill,
    Draft,
    Generate,
    Info,
    Report,
    Serve,
    Tune,
    check,
)
from saguaro.errors import SaguaroError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing standard output


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `saguaro` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe's encoding may not support every character
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        try:
            status = run(parse(sys.argv[1:] if argv is None else argv))
        except SystemExit as e:  # after --help, or an error in the flags
            status = e.code if isinstance(e.code, int) else 0
        sys.stdout.flush()
    except SaguaroError as e:
        status = 2
        _explain(str(e))
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader closed the pipe, e.g. `| head`
        status = 1
        _drop_output()
    except OSError as e:
        if e.errno not in FULL:
            raise
        status = 1
        _drop_output()
        _explain(f"the output cannot be written ({e.strerror}); make room, or send it elsewhere")
    sys.exit(status)


def _explain(message: str) -> None:
    with contextlib.suppress(OSError):  # standard error may fail too
        print(f"saguaro: {message}", file=sys.stderr)


def _drop_output() -> None:
    """Discard buffered output. Otherwise the interpreter writes it again at exit, and fails."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def parse(argv: Sequence[str]) -> AnyCommand:
    """Parse an argument list."""
    if list(argv) in (["--version"], ["-V"]):
        from saguaro import __version__

        print(__version__)
        sys.exit(0)
    return tyro.cli(
        Command,
        prog="saguaro",
        description="Exact, low-latency LLM inference by speculative speculative decoding.",
        args=list(argv),
    )


def run(command: AnyCommand) -> int:
    """Run a command and return its exit status. Imports only that command's module, after a check of the settings."""
    check(command)
    match command:
        case Generate():
            from saguaro.cli.generate import generate

            status = generate(command)
        case Chat(url=None):
            from saguaro.cli.chat import chat

            status = chat(command)
        case Chat():
            from saguaro.cli.chat_url import chat_url

            status = chat_url(command)
        case Serve(ray=RayArgs(ray=True)):
            from saguaro.cli.serve_ray import serve_ray

            status = serve_ray(command)
        case Serve():
            from saguaro.cli.serve import serve

            status = serve(command)
        case Draft():
            from saguaro.cli.draft import draft

            status = draft(command)
        case Compare():
            from saguaro.cli.compare import compare

            status = compare(command)
        case Bench():
            from saguaro.cli.bench import bench
            from saguaro.cli.bench_served import bench_served, is_served

            status = bench_served(command) if is_served(command) else bench(command)
        case Report():
            from saguaro.cli.report import report

            status = report(command)
        case Tune():
            from saguaro.cli.tune import tune

            status = tune(command)
        case Info():
            from saguaro.cli.info import info

            status = info(command)
        case Distill():
            from saguaro.cli.distill import distill

            status = distill(command)
    return status
