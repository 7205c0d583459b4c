"""`saguaro report`: redoes the paper's experiments on this machine, and writes one HTML page.

Every finished cell is kept in the folder, so the same command goes on where it was interrupted. The exit status is 1 if
tokens differ that must not, or if a cell could not be measured.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from saguaro.cli import commands
from saguaro.cli.bench import machine, versions
from saguaro.cli.report_pairs import pairs_of
from saguaro.errors import ConfigError
from saguaro.measure.prompts import BUILT_IN, OURS, read_prompt_file
from saguaro.report.cell import PROFILES, Profile
from saguaro.report.chart import check_matplotlib
from saguaro.report.experiments.table import EXPERIMENTS, chosen
from saguaro.report.report import Report
from saguaro.report.runner import Runner
from saguaro.report.store import Store, code_digest


def report(command: commands.Report) -> int:
    """Measure what is not finished, and write the page."""
    if command.list:
        list_experiments()
        return 0
    plan, runner = planned(command)
    if command.page_only:  # also while another report is measured there
        done = runner.finished(plan.cells)
        n_different = plan.write(runner.store, done)
    else:
        with runner.store.opened():
            done = _run(runner, plan)
            n_different = plan.write(runner.store, done)
    n_failed = sum("failed" in one for one in done.values())
    print(command.out / "report.html")
    if n_different:
        print(f"OUTPUT DIFFERS: {n_different} tokens that must equal those of ar do not", file=sys.stderr)
    return int(bool(n_different or n_failed))


def planned(command: commands.Report) -> tuple[Report, Runner]:
    """The report of the flags, and what runs it. Raises before anything is loaded or written."""
    experiments, profile = chosen(command.only), profile_of(command)
    texts, pairs = texts_of(command.prompts), pairs_of(command, profile)
    if command.page_only and not command.out.is_dir():
        raise ConfigError(f"{command.out} is no folder of a report; name one with --out, or leave --page-only out")
    check_matplotlib()
    profile = replace(profile, pairs=tuple(pairs), sets=tuple(texts))
    runner = Runner(
        store=Store(command.out, basis_of(command), {name: pair.depends_on for name, pair in pairs.items()}),
        pairs={name: pair.load for name, pair in pairs.items()},
        texts=texts,
        rows=max(profile.batches),
        circumstances={"versions": versions(), "machine": machine()},
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    only = ",".join(one.name for one in experiments) if command.only else None
    return Report(profile=profile, experiments=experiments, command=command_line(command), only=only), runner


def _run(runner: Runner, plan: Report) -> dict[str, Any]:
    try:
        return runner.run(plan.cells)
    except KeyboardInterrupt:
        n = len(runner.finished(plan.cells))
        runner.tell(
            f"\ninterrupted: {n} of {len(plan.cells)} cells are finished in {runner.store.folder}; the same command "
            "goes on, and --page-only makes a page of them"
        )
        raise


def list_experiments() -> None:
    """Names, and what each is."""
    width = max(map(len, EXPERIMENTS))
    for one in EXPERIMENTS.values():
        print(f"{one.name:{width}}  {one.about}")


def profile_of(command: commands.Report) -> Profile:
    """The profile of the flags."""
    flags = [name for name in PROFILES if getattr(command, name)]
    if len(flags) > 1:
        raise ConfigError(f"--{' and --'.join(flags)} are given; choose one of them")
    profile = PROFILES[flags[0]] if flags else PROFILES["quick"]
    if profile.name == "gpu" and not torch.cuda.is_available():
        raise ConfigError("--gpu needs a CUDA device, and this machine has none; use --quick or --full")
    if profile.name == "gpu" and (command.which.model or command.draft or command.pair):
        raise ConfigError("--gpu measures grown pairs; leave --model, --draft and --pair out, or use --full")
    return profile


def texts_of(prompts: tuple[tuple[Path, ...], ...]) -> dict[str, list[str]]:
    """The prompt sets by name: the built-in ones, or those of files and public sets; `built-in` names ours."""
    paths = [path for group in prompts for path in group]
    if not paths:
        return dict(BUILT_IN)
    sets = {path.stem: _read(path) for path in paths}
    if len(sets) < len(paths):
        raise ConfigError(f"two prompt sets have the same name, of {', '.join(map(str, paths))}; rename a file")
    return sets


def _read(path: Path) -> list[str]:
    if str(path) == "built-in" and not path.is_file():
        return OURS
    return [asked.prompt for asked in read_prompt_file(path)]


def basis_of(command: commands.Report) -> dict[str, Any]:
    """What all cells depend on, beside their pair, their own settings and their prompts."""
    return {
        "chat": command.chat,
        "device": command.device,
        "dtype": command.dtype,
        "threads": command.threads,
        "versions": versions(),
        "code": code_digest(),
        "machine": machine(),
    }


def command_line(command: commands.Report) -> str:
    """The command, without --only, --page-only and the folder."""
    words = ["saguaro", "report", f"--{profile_of(command).name}"]
    given = {"model": command.which.model, "draft": command.draft, "threads": command.threads}
    given |= {name: value for name in ("device", "dtype") if (value := getattr(command, name)) != "auto"}
    for name, value in given.items():
        words += [f"--{name}", str(value)] if value is not None else []
    for path in (path for group in command.prompts for path in group):
        words += ["--prompts", str(path)]
    for text in command.pair:
        words += ["--pair", text]
    return shlex.join([*words, *(["--no-chat"] if not command.chat else [])])
