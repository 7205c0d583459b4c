"""The pairs that `saguaro report` measures: what loads each, and what its cells depend on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from saguaro.cli import commands
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.cli.candidates import LOADER_KV, config_for
from saguaro.errors import ConfigError
from saguaro.measure.grown_pair import make_pair
from saguaro.measure.prompts import OURS
from saguaro.model.default import NAME
from saguaro.report.cell import Profile
from saguaro.report.engines import Grown, LoadedPair, Pair
from saguaro.report.store import files_of

GROWN = {"32b with 0.6b": ("32b", "0.6b", 0.27), "8b with 0.6b": ("8b", "0.6b", 0.27)}  # target, draft, noise


@dataclass(frozen=True)
class Source:
    """Where a pair comes from."""

    load: Callable[[], Pair]
    depends_on: Any  # plain data: if it changes, the pair's cells are measured again


def pairs_of(command: commands.Report, profile: Profile) -> dict[str, Source]:
    """The pairs by name; the first is that of --model and --draft. Nothing is loaded."""
    if profile.name == "gpu":
        return {name: Source(partial(_grown, name, profile.max_tokens), GROWN[name]) for name in GROWN}
    engine = EngineArgs(draft=command.draft, device=command.device, dtype=command.dtype, threads=command.threads)
    if config_for(command.which, engine).draft_model is None:
        raise ConfigError(
            "there is no draft model, and the paper is about drafts; pass draft (--draft): a smaller model with the "
            "target's vocabulary, or drop:I,J,... for the target without some layers"
        )
    found = {}
    for which, own in [(command.which, engine), *(_more(text, command, engine) for text in command.pair)]:
        name = name_of(which.model, own.draft)
        if name in found:
            raise ConfigError(f"two pairs are called {name!r}; leave one out, or rename its folder")
        found[name] = Source(partial(_loaded, which, own, command.chat, profile.max_tokens), _facts(which, own))
    return found


def _more(text: str, command: commands.Report, engine: EngineArgs) -> tuple[ModelArgs, EngineArgs]:
    """A pair that is named as TARGET=DRAFT."""
    target, is_given, draft = text.partition("=")
    if not (target and is_given and draft):
        raise ConfigError(f"pair is {text!r}; write TARGET=DRAFT, such as Qwen/Qwen3-4B=Qwen/Qwen3-0.6B")
    which = ModelArgs(model=None if target == "default" else target, cache_dir=command.which.cache_dir)
    return which, replace(engine, draft=None if draft == "default" else draft)


def name_of(model: str | None, draft: str | None) -> str:
    """
    >>> name_of(None, None), name_of("/models/big", "drop:1,2")
    ('SmolLM2-135M-Instruct with its draft', 'big with drop:1,2')
    """
    return f"{Path(model).name if model else NAME} with {Path(draft).name if draft else 'its draft'}"


def _facts(which: ModelArgs, engine: EngineArgs) -> dict[str, Any]:
    paths = [Path(name).expanduser() for name in (which.model, engine.draft) if name]
    return {"which": asdict(which), "draft": engine.draft, "files": [files_of(path) for path in paths if path.exists()]}


def _loaded(which: ModelArgs, engine: EngineArgs, chat: bool, n_output: int) -> Pair:
    base = commands.load(which, replace(engine, method="ar", kv_memory=LOADER_KV, learnt_dir="none"))
    return LoadedPair(name_of(which.model, engine.draft), base, chat=chat, n_output=n_output)


def _grown(name: str, n_output: int) -> Pair:
    target, draft, epsilon = GROWN[name]
    pair, facts = make_pair(target, draft, OURS[:8], device=torch.device("cuda"), epsilon=epsilon)
    return Grown(name, pair, facts, n_output=n_output)
