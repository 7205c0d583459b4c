"""`saguaro tune`: measures where the draft runs best and what rounds take, and keeps it for the next start.

Every place where the draft may run is measured in turn, at several batch sizes, from nothing learnt. The engines write
into a folder of their own; only when all is measured do the files take their place, so an interrupted run changes
nothing.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from saguaro.cli import commands
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.cli.candidates import config_for, encoder, load_candidates
from saguaro.cli.progress import progress_bar
from saguaro.config import EngineConfig, SamplingParams
from saguaro.device.affinity import usable_cores
from saguaro.draft.policy.costs import LearntCosts, costs_of
from saguaro.engine.assembly import choose_method, find_device
from saguaro.engine.placement import Placement, fastest, possible_placements, state_of
from saguaro.errors import ConfigError
from saguaro.llm import learnt_folder
from saguaro.measure.prompts import read_prompts
from saguaro.measure.tune import Measured, Plan, batch_sizes, measure_placements
from saguaro.types import Progress

MOST_PROMPTS = 1000


@dataclass(frozen=True)
class Tuned:
    """What was measured, and what follows from it."""

    measured: list[Measured]
    costs: dict[Placement, LearntCosts]
    chosen: Placement
    folder: Path

    def __str__(self) -> str:
        """In one line."""
        each = "; ".join(str(one) for one in self.measured if one.placement == self.chosen)
        return (
            f"The draft will run {'in its ' if self.chosen.is_apart else ''}{self.chosen}. {each[0].upper()}{each[1:]}."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        costs = [{"placement": asdict(place), **asdict(found)} for place, found in self.costs.items()]
        return {
            "chosen": asdict(self.chosen),
            "measured": [one.as_dict() for one in self.measured],
            "costs": costs,
            "learnt_dir": str(self.folder),
        }


def tune(command: commands.Tune) -> int:
    """Measure, keep, and print tables and the choice."""
    params, paths = command.sampling.params(), [path for group in command.prompts for path in group]
    texts = read_prompts(paths, MOST_PROMPTS)
    with progress_bar() as progress:
        found = tune_pair(
            command.which,
            command.engine,
            params,
            texts,
            batches=command.batches,
            seconds=command.seconds,
            chat=command.chat,
            progress=progress,
        )
    if command.json:
        print(json.dumps(found.as_dict()))
        return 0
    console = Console()
    console.print(speeds_table(found.measured))
    console.print(costs_table(found.costs))
    print(found)
    print(f"Kept in {found.folder}: the next start with this model and these settings uses it from its first round.")
    return 0


def tune_pair(
    which: ModelArgs,
    engine: EngineArgs,
    params: SamplingParams,
    texts: Sequence[str],
    *,
    batches: Sequence[int] = (),
    seconds: float,
    chat: bool = True,
    progress: Progress = lambda *_: None,
) -> Tuned:
    """Measure every placement, and keep what was found in the folder of what is learnt."""
    config = config_for(which, engine)
    placements = check(config, batches, seconds)
    batches = batches or batch_sizes(config.max_batch_rows)
    with _partial(Path(_folder(config, which))) as partial:
        settings = {
            str(place): {"link": place.link, "draft_threads": place.threads, "learnt_dir": str(partial)}
            for place in placements
        }
        encode = encoder(texts, chat)
        with load_candidates(settings, which, engine, params, encode, max(batches)) as (entrants, prompts):
            engines = {place: one.llm for place, one in zip(placements, entrants, strict=True) if one.llm is not None}
            plan = Plan(batches=batches, seconds=seconds, prompts=prompts, params=params)
            measured = measure_placements(engines, plan, progress)
        files = {place: llm.engine.learnt for place, llm in engines.items()}  # complete, now that all are closed
        costs = {place: costs_of(state) for place, file in files.items() if file and (state := file.read())}
        rates = {place: {one.batch: one.tok_s for one in measured if one.placement == place} for place in placements}
        tuned = engines[placements[0]].engine.tuned
        assert tuned is not None
        tuned.write(state_of(rates))
        for file in partial.glob("*.json"):
            file.replace(partial.parent / file.name)
        chosen = fastest(rates, placements)
        assert chosen is not None
        return Tuned(measured, {place: each for place, each in costs.items() if each}, chosen, partial.parent)


def check(config: EngineConfig, batches: Sequence[int], seconds: float) -> list[Placement]:
    """The placements to measure. Raises if there is nothing to tune, before anything is loaded."""
    if config.draft_model is None:
        raise ConfigError(
            "there is no draft model, so there is nothing to tune; pass draft (--draft), or use the default model"
        )
    if config.is_served:
        raise ConfigError(
            f"the draft is {config.draft!r}, which runs where it is served, so there is no place to choose; name a "
            "draft of this machine to tune"
        )
    method = choose_method(config)
    if not (method.needs_model and method.prepares):
        raise ConfigError(
            f"method is {method.name!r}, which does not prepare, so there is nothing to tune; leave --method out"
        )
    if config.link != "auto":
        raise ConfigError(f"link is {config.link!r}; tune measures every place for the draft: leave --link out")
    if not 0 < seconds <= 3600:
        raise ConfigError(f"seconds is {seconds:g}; it must be more than 0 and at most 3600")
    for batch in batches:
        if not 1 <= batch <= config.max_batch_rows:
            raise ConfigError(
                f"batches holds {batch}; it must be between 1 and max_batch_rows, {config.max_batch_rows}"
            )
    name = "device" if config.draft_device == "auto" else "draft_device"
    is_on_cpu = find_device(name, getattr(config, name)).type == "cpu"
    return possible_placements(len(usable_cores()), config.draft_threads) if is_on_cpu else [Placement()]


def speeds_table(measured: Sequence[Measured]) -> Table:
    """Tokens per second by placement and batch size, and what the engine did."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0)
    for title in ("the draft", "batch", "tok/s", "tokens/\nround", "accept-\nance", "what it did"):
        grid.add_column(title, justify="left" if title in ("the draft", "what it did") else "right", no_wrap=True)
    for batch in dict.fromkeys(one.batch for one in measured):
        same = [one for one in measured if one.batch == batch]
        for one in same:
            cells = (_number(one.tok_s, 1), _number(one.tokens_per_round, 2), _number(one.acceptance, 2))
            grid.add_row(str(one.placement), str(batch), *cells, one.habit, end_section=one is same[-1])
    return grid


def costs_table(costs: dict[Placement, LearntCosts]) -> Table:
    """What verifying and drafting take, by placement."""
    grid = Table(box=box.SIMPLE_HEAD, padding=0)
    grid.add_column("ms", no_wrap=True)
    for place in costs:
        grid.add_column(str(place), justify="right")
    for n in _counts([set(each.verification_ms) for each in costs.values()]):
        tokens = "1 token" if n == 1 else f"{n} tokens"
        grid.add_row(f"verify {tokens}", *(_number(each.verification_ms.get(n), 2) for each in costs.values()))
    for n in _counts([set(each.draft_step_ms) for each in costs.values()]):
        rows = "1 row" if n == 1 else f"{n} rows"
        grid.add_row(f"draft step, {rows}", *(_number(each.draft_step_ms.get(n), 2) for each in costs.values()))
    return grid


def _counts(each: Sequence[set[int]], most: int = 12) -> list[int]:
    """A dozen of the numbers, small ones first and then ever farther apart.

    >>> _counts([set(range(1, 100)), {150}])
    [1, 2, 3, 4, 5, 8, 12, 18, 27, 41, 62, 93, 150]
    """
    found: list[int] = []
    for n in sorted(set().union(*each)):
        if not found or n <= 5 or n >= 1.5 * found[-1]:
            found.append(n)
    return found[: most + 1]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _folder(config: EngineConfig, which: ModelArgs) -> str:
    folder = learnt_folder(config, which.cache_dir)
    if folder == "none":
        raise ConfigError("learnt_dir is none, so nothing would be kept; name a folder with --learnt-dir")
    return folder


@contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """A temporary folder inside this one."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = TemporaryDirectory(prefix="partial-", dir=folder, ignore_cleanup_errors=True)
    except OSError as e:
        raise ConfigError(
            f"cannot write to learnt_dir, {folder} ({e.strerror}); name another folder with --learnt-dir"
        ) from e
    with partial as name:
        yield Path(name)
