"""`saguaro distill`: makes a draft for a target, from the target's own texts.

    OUT/config.json, model.safetensors, ...                       the draft, for --draft
    OUT/distill.json                                              its settings and results
    OUT/work                                                      texts and training state; not needed afterwards

Running the same command again resumes an interrupted run.
"""

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from saguaro import __version__
from saguaro.cli import commands
from saguaro.cli.progress import progress_bar
from saguaro.config import SamplingParams
from saguaro.distill.checkpoint import StepReport
from saguaro.distill.corpus import Corpus
from saguaro.distill.kinds import EAGLE_HEAD, HEAD, LAYERS, EagleKind, Kind, ModelKind
from saguaro.distill.questions import ask, spread
from saguaro.distill.recipe import Recipe
from saguaro.distill.sample import encode, sample
from saguaro.distill.seeds import MOST_PROMPTS, seed_prompts
from saguaro.distill.train import train
from saguaro.errors import ConfigError
from saguaro.llm import LLM
from saguaro.measure.metrics import Summary
from saguaro.measure.prompts import read_prompt_file
from saguaro.model.load import Loaded, load
from saguaro.model.weights import write_whole
from saguaro.types import Progress

MOST_MEANT = 50  # steps averaged at the beginning and at the end


def distill(command: commands.Distill) -> int:
    """Make and evaluate the draft, and print the results."""
    recipe, kind = command.recipe.recipe(), kind_of(command)
    learnt, held = split_prompts(command)
    record = Record(command.out, settings_of(command, recipe, kind))
    with progress_bar() as progress:
        if not record.is_whole:
            make(command, recipe, kind, learnt, record, progress)
        if held:
            measure(command, held, record, progress)
    print(json.dumps(record.found, indent=1))
    print(f"saguaro: the draft is in {command.out}; use it with --draft {command.out}", file=sys.stderr)
    return 0


def kind_of(command: commands.Distill) -> Kind:
    """What is to be made. A draft that another begins has its sizes, unless they are given."""
    if command.start is not None and command.layers is not None:
        raise ConfigError(f"start is {command.start}, whose layers are kept; leave layers out")
    if command.start is not None and command.feature_layers is not None:
        raise ConfigError(f"start is {command.start}, whose feature layers are kept; leave feature_layers out")
    usual = {"model": HEAD, "eagle3": EAGLE_HEAD}[command.kind] if command.start is None else None
    head = usual if command.head is None else command.head
    if command.kind == "eagle3":
        if command.start == "default":
            raise ConfigError("start is default, which is no EAGLE-3 draft; give the folder of one, or leave start out")
        return EagleKind(head, command.start, command.feature_layers, command.recipe.seed)
    layers = LAYERS if command.layers is None and command.start is None else command.layers
    return ModelKind(layers, head, command.start, torch.int8 if command.stored == "int8" else None)


def measure(command: commands.Distill, prompts: Sequence[str], record: "Record", progress: Progress) -> None:
    """Measure the draft in speculative decoding with the engine; EAGLE-3 drafts on a CPU, because on a GPU they
    were not run yet."""
    settings: dict[str, Any] = {"method": "sd", "draft": str(command.out), "link": "inline"}
    settings |= {"nodes": command.lookahead, "width": 1}  # acceptance by position is of chains
    device = "cpu" if command.kind == "eagle3" else command.device
    with load_target(command, progress, device=device, **settings) as llm:
        for temperature in (0.0, 1.0):
            record.write(f"temperature {temperature:g}", evaluate(command, llm, prompts, temperature))


def load_target(command: commands.Distill, progress: Progress, device: str | None = None, **settings: Any) -> LLM:
    """Load the target without a prefix cache, so that prompts are computed alike and a resumed run is identical."""
    return LLM(
        command.target,
        revision=command.revision,
        cache_dir=command.cache_dir,
        progress=progress,
        device=command.device if device is None else device,
        threads=command.threads,
        max_batch_rows=command.batch_rows,
        lookahead=command.lookahead,
        prefix_caching=False,
        **settings,
    )


def make(
    command: commands.Distill,
    recipe: Recipe,
    kind: Kind,
    prompts: Sequence[str],
    record: "Record",
    progress: Progress,
) -> None:
    """Sample, train and write. Invalid settings are refused first."""
    target, corpus, ends = write_texts(command, recipe, kind, prompts, record, progress)
    gc.collect()  # frees the engine's memory for training
    torch.cuda.empty_cache()
    counts = corpus.counts(target.model.spec.n_vocab)
    draft = kind.begin(target, counts, ends)
    ids = draft.token_map
    assert ids is not None
    record.write(
        "texts",
        {
            "texts": len(corpus),
            "tokens": corpus.n_tokens,
            "head_rows": len(ids),
            "share_the_head_can_say": round(float(counts[ids.cpu()].sum() / counts.sum()), 4),
        },
    )
    learner = kind.learner(draft, target.model, recipe)
    reports = train(learner, corpus, folder=command.out / "work" / "training", progress=progress)
    n = max(1, min(MOST_MEANT, len(reports) // 3))
    record.write("training", {"first": _mean(reports[:n]), "last": _mean(reports[-n:])})
    kind.save(draft, command.out)


def write_texts(
    command: commands.Distill,
    recipe: Recipe,
    kind: Kind,
    prompts: Sequence[str],
    record: "Record",
    progress: Progress,
) -> tuple[Loaded, Corpus, frozenset[int]]:
    """The target, its texts, and its end-of-text tokens. Invalid sizes are refused before any text is written."""
    work, n_shard = command.out / "work", 4 * command.batch_rows
    with load_target(command, progress, method="ar") as llm:
        ends = llm.engine.eos_ids
        if kind.head is not None and kind.head <= len(ends):
            raise ConfigError(f"head is {kind.head}; it must hold more than the {len(ends)} tokens that end a text")
        kind.check(llm.engine.loaded)
        own: list[str] = []
        if command.questions:
            asked = Corpus(work / "questions")
            own = ask(llm, asked, n=command.questions, seed=recipe.seed, n_shard=n_shard, progress=progress)
        corpus = Corpus(work / "texts")
        done = sample(
            llm,
            spread(prompts, own),
            corpus,
            n_texts=command.texts,
            max_tokens=command.max_tokens,
            temperatures=command.temperatures,
            seed=recipe.seed,
            chat=command.chat,
            n_shard=n_shard,
            progress=progress,
        )
        record.write("prompts", {"given": len(prompts), "own_questions": len(own), "skipped": done.n_skipped})
        return plain(llm.engine.loaded), corpus, ends


def plain(loaded: Loaded) -> Loaded:
    """The model with plain weights, from which a draft can be made; loaded again if they are packed."""
    if not loaded.model.packed:
        return loaded
    return load(loaded.name, loaded.path, loaded.model.device, loaded.model.dtype)


def evaluate(command: commands.Distill, llm: LLM, prompts: Sequence[str], temperature: float) -> dict[str, Any]:
    """Measure the draft in speculative decoding with the engine, on held-out prompts."""
    summary = Summary()
    asked, _ = encode(llm.engine, prompts, SamplingParams(max_tokens=command.max_tokens), len(prompts), command.chat)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=command.max_tokens) for i in range(len(asked))]
    llm.engine.round.observers.append(summary.add)
    llm.generate(asked, params)
    llm.engine.round.observers.remove(summary.add)
    found = summary.as_dict()
    return {
        "lookahead": command.lookahead,
        **{name: found[name] for name in ("tokens_per_round", "acceptance_by_position")},
    }


def split_prompts(command: commands.Distill) -> tuple[list[str], list[str]]:
    """The training prompts and the held-out ones."""
    n_held = command.evaluate
    if command.questions < 0:
        raise ConfigError(f"questions is {command.questions}; it must be 0 or more")
    if not command.prompts:
        n = max(1, command.texts - command.questions)
        prompts = seed_prompts(min(n + n_held, MOST_PROMPTS))
    else:
        files = [path for given in command.prompts for path in given]
        prompts = [asked.prompt for path in files for asked in read_prompt_file(path)]
    if not 0 <= n_held < len(prompts):
        raise ConfigError(f"evaluate is {n_held}; of {len(prompts)} prompts hold out some and not all, or 0 for none")
    return prompts[: len(prompts) - n_held], prompts[len(prompts) - n_held :]


def settings_of(command: commands.Distill, recipe: Recipe, kind: Kind) -> dict[str, Any]:
    """All settings that affect the draft."""
    # batch_rows too: it affects rounding.
    names = ["kind", "target", "revision", "questions", "texts", "max_tokens", "temperatures", "chat"]
    names += ["start", "feature_layers", "stored", "evaluate", "batch_rows"]
    files = [str(path) for given in command.prompts for path in given]
    chosen = {name: getattr(command, name) for name in names}
    chosen["layers"], chosen["head"] = kind.layers, kind.head
    return json.loads(json.dumps({**chosen, "prompts": files or "ours", **asdict(recipe)}))  # type: ignore[no-any-return]


class Record:
    """distill.json: starts with the settings; results are added."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._path = folder, folder / "distill.json"
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out is {folder}, which is a file; give a folder")
        if self._path.exists():
            self.found = self._resume(settings)
        elif folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"out is {folder}, which holds something else; give a new or empty folder")
        else:
            self.found = {"saguaro": __version__, "settings": settings}
            self._save()

    @property
    def is_whole(self) -> bool:
        """Whether the draft is complete."""
        return "training" in self.found and (self._folder / "config.json").exists()

    def write(self, name: str, result: dict[str, Any]) -> None:
        """Add a result."""
        self.found[name] = result
        self._save()

    def _resume(self, settings: dict[str, Any]) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            begun = {"kind": "model", **found["settings"]}  # older folders do not name it
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{self._path} cannot be read ({e!r}); delete {self._folder} or give another out") from e
        odd = [name for name in settings if begun.get(name) != settings[name]]
        if odd:
            first = f"{odd[0]} was {begun.get(odd[0])!r} and is {settings[odd[0]]!r}"
            raise ConfigError(
                f"{self._folder} was begun with other settings ({', '.join(odd)}; {first}); give the same ones to go "
                "on, or another out"
            )
        return found  # type: ignore[no-any-return]

    def _save(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, lambda partial: partial.write_text(json.dumps(self.found, indent=1) + "\n"))


def _mean(reports: Sequence[StepReport]) -> dict[str, float]:
    each = [asdict(report) for report in reports]
    return {name: round(sum(one[name] for one in each) / len(each), 4) for name in each[0]}
