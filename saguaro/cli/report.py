"""`saguaro report`: redoes the paper's experiments on this machine, and writes one HTML page.

Every finished cell is kept in the folder, so the same command goes on where it was interrupted. The exit status is 1 if
tokens differ that must not, or if a cell could not be measured.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saguaro.cli import commands
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.cli.bench import machine, versions
from saguaro.cli.candidates import LOADER_KV, config_for
from saguaro.errors import ConfigError
from saguaro.measure.grown_pair import make_pair
from saguaro.measure.prompts import BUILT_IN, OURS, read_prompt_file
from saguaro.model.default import NAME
from saguaro.report.cell import PROFILES, Profile
from saguaro.report.chart import check_matplotlib
from saguaro.report.engines import Grown, LoadedPair, Pair
from saguaro.report.experiments.table import EXPERIMENTS, chosen
from saguaro.report.report import Report
from saguaro.report.runner import Runner
from saguaro.report.store import Store, code_digest, files_of

GROWN = {"32b with 0.6b": ("32b", "0.6b", 0.27), "8b with 0.6b": ("8b", "0.6b", 0.27)}  # target, draft, noise
Pairs = Mapping[str, Callable[[], Pair]]


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
        store=Store(command.out, basis_of(command)),
        pairs=pairs,
        texts=texts,
        rows=max(profile.batches),
        circumstances={"versions": versions(), "machine": machine()},
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return Report(profile=profile, experiments=experiments, command=command_line(command)), runner


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


def pairs_of(command: commands.Report, profile: Profile) -> Pairs:
    """What loads each pair, by the pair's name."""
    if profile.name == "gpu":
        return {name: partial(_grown, name, profile) for name in GROWN}
    engine = EngineArgs(draft=command.draft, device=command.device, dtype=command.dtype, threads=command.threads)
    first = config_for(command.which, engine)
    if first.draft_model is None:
        raise ConfigError(
            "there is no draft model, and the paper is about drafts; pass draft (--draft): a smaller model with the "
            "target's vocabulary, or drop:I,J,... for the target without some layers"
        )
    found = {_name(command.which.model, command.draft): partial(_loaded, command, command.which, engine, profile)}
    for text in command.pair:
        target, is_given, draft = text.partition("=")
        if not (target and is_given and draft):
            raise ConfigError(f"pair is {text!r}; write TARGET=DRAFT, such as Qwen/Qwen3-4B=Qwen/Qwen3-0.6B")
        which = replace(command.which, model=None if target == "default" else target)
        own = replace(engine, draft=None if draft == "default" else draft)
        found[_name(which.model, own.draft)] = partial(_loaded, command, which, own, profile)
    return found


def _name(model: str | None, draft: str | None) -> str:
    """
    >>> _name(None, None), _name("/models/big", "drop:1,2")
    ('SmolLM2-135M-Instruct with its draft', 'big with drop:1,2')
    """
    return f"{Path(model).name if model else NAME} with {Path(draft).name if draft else 'its draft'}"


def _loaded(command: commands.Report, which: ModelArgs, engine: EngineArgs, profile: Profile) -> Pair:
    own = replace(engine, method="ar", kv_memory=LOADER_KV, learnt_dir="none")
    base = commands.load(which, own)
    return LoadedPair(_name(which.model, engine.draft), base, chat=command.chat, n_output=profile.max_tokens)


def _grown(name: str, profile: Profile) -> Pair:
    target, draft, epsilon = GROWN[name]
    pair, facts = make_pair(target, draft, OURS[:8], device=torch.device("cuda"), epsilon=epsilon)
    return Grown(name, pair, facts, n_output=profile.max_tokens)


def basis_of(command: commands.Report) -> dict[str, Any]:
    """What all cells depend on, beside their own settings and prompts."""
    models = [command.which.model, command.draft, *(part for text in command.pair for part in text.split("="))]
    paths = [Path(name).expanduser() for name in models if name]
    return {
        "which": asdict(command.which),
        "draft": command.draft,
        "pair": command.pair,
        "chat": command.chat,
        "device": command.device,
        "dtype": command.dtype,
        "threads": command.threads,
        "files": [files_of(path) for path in paths if path.exists()],
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
