"""`saguaro distill`: makes a small draft for a target, from the target's own texts.

    OUT/config.json, model.safetensors, token_map.safetensors     the draft, for --draft
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
from torch import Tensor

from saguaro import __version__
from saguaro.cli import commands
from saguaro.cli.progress import progress_bar
from saguaro.config import SamplingParams
from saguaro.distill.checkpoint import StepReport
from saguaro.distill.corpus import Corpus
from saguaro.distill.questions import ask, spread
from saguaro.distill.recipe import Recipe
from saguaro.distill.sample import encode, sample
from saguaro.distill.seeds import MOST_PROMPTS, seed_prompts
from saguaro.distill.student import make_student, pick_layers, save_student, with_head
from saguaro.distill.train import train
from saguaro.errors import ConfigError
from saguaro.llm import LLM
from saguaro.measure.metrics import Summary
from saguaro.measure.prompts import read_prompt_file
from saguaro.model.default import DRAFT
from saguaro.model.load import Loaded, borrows, load, load_borrower
from saguaro.model.transformer import Transformer
from saguaro.model.weights import write_whole
from saguaro.types import Progress

LAYERS, HEAD = 3, 8192
MOST_MEANT = 50  # steps averaged at the beginning and at the end


def distill(command: commands.Distill) -> int:
    """Make and evaluate the draft, and print the results."""
    recipe = command.recipe.recipe()
    learnt, held = split_prompts(command)
    record = Record(command.out, settings_of(command, recipe))
    with progress_bar() as progress:
        if not record.is_whole:
            make(command, recipe, learnt, record, progress)
        chain = {"nodes": command.lookahead, "width": 1}  # acceptance by position is of chains
        with load_target(command, progress, method="sd", draft=str(command.out), link="inline", **chain) as llm:
            for temperature in (0.0, 1.0):
                record.write(f"temperature {temperature:g}", evaluate(command, llm, held, temperature))
    print(json.dumps(record.found, indent=1))
    print(f"saguaro: the draft is in {command.out}; use it with --draft {command.out}", file=sys.stderr)
    return 0


def load_target(command: commands.Distill, progress: Progress, **settings: Any) -> LLM:
    """Load the target without a prefix cache, so that prompts are computed alike and a resumed run is identical."""
    return LLM(
        command.target,
        revision=command.revision,
        cache_dir=command.cache_dir,
        progress=progress,
        device=command.device,
        threads=command.threads,
        max_batch_rows=command.batch_rows,
        lookahead=command.lookahead,
        prefix_caching=False,
        **settings,
    )


def make(
    command: commands.Distill, recipe: Recipe, prompts: Sequence[str], record: "Record", progress: Progress
) -> None:
    """Sample, train and write. Invalid settings are refused first."""
    target, corpus, ends = write_texts(command, recipe, prompts, record, progress)
    gc.collect()  # frees the engine's memory for training
    torch.cuda.empty_cache()
    counts = corpus.counts(target.model.spec.n_vocab)
    student = begin(command, target, counts, ends)
    ids = student.token_map
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
    reports = train(student, target.model, corpus, recipe, folder=command.out / "work" / "training", progress=progress)
    n = max(1, min(MOST_MEANT, len(reports) // 3))
    record.write("training", {"first": _mean(reports[:n]), "last": _mean(reports[-n:])})
    save_student(student, command.out, torch.int8 if command.stored == "int8" else None)


def write_texts(
    command: commands.Distill, recipe: Recipe, prompts: Sequence[str], record: "Record", progress: Progress
) -> tuple[Loaded, Corpus, frozenset[int]]:
    """The target, its texts, and its end-of-text tokens. Invalid sizes are refused before any text is written."""
    work, n_shard = command.out / "work", 4 * command.batch_rows
    with load_target(command, progress, method="ar") as llm:
        ends = llm.engine.eos_ids
        check_sizes(command, llm.engine.loaded, ends)
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


def check_sizes(command: commands.Distill, target: Loaded, ends: frozenset[int]) -> None:
    """Raise if such a draft cannot be made for the target."""
    layers, head = sizes(command)
    if layers is not None:
        pick_layers(target.model.spec.n_layers, layers)
    if head is not None and head <= len(ends):
        raise ConfigError(f"head is {head}; it must hold more than the {len(ends)} tokens that end a text")
    if command.start is not None:
        load_start(command.start, target)


def sizes(command: commands.Distill) -> tuple[int | None, int | None]:
    """Layers and rows of the head; None: taken from the draft to start from."""
    if command.start is None:
        return LAYERS if command.layers is None else command.layers, HEAD if command.head is None else command.head
    if command.layers is not None:
        raise ConfigError(f"start is {command.start}, whose layers are kept; leave layers out")
    return None, command.head


def load_start(start: str, target: Loaded) -> Transformer:
    """Load the draft to start from."""
    folder = DRAFT if start == "default" else Path(start)
    if not borrows(folder):
        raise ConfigError(f"start is {start}, which is no draft that `saguaro distill` made; give one")
    return load_borrower(folder, target.path, target.model.embedding, target.model.device, torch.float32)


def begin(command: commands.Distill, target: Loaded, counts: Tensor, ends: frozenset[int]) -> Transformer:  # [V]
    """The initial draft, in float32: another draft, or layers of the target and its most frequent tokens."""
    model, (layers, head) = target.model, sizes(command)
    ids = frequent(counts, head, ends) if head is not None else None
    if command.start is not None:
        draft = load_start(command.start, target)
        return draft if ids is None else with_head(draft, model, ids)
    assert layers is not None
    assert ids is not None
    return make_student(model, pick_layers(model.spec.n_layers, layers), ids)


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
    if not 1 <= n_held < len(prompts):
        raise ConfigError(f"evaluate is {n_held}; of {len(prompts)} prompts hold out at least 1 and not all")
    return prompts[:-n_held], prompts[-n_held:]


def frequent(counts: Tensor, n: int, always: frozenset[int]) -> Tensor:  # [V] -> [at most n] int64
    """The most frequent tokens, most frequent first, including those in `always`.

    >>> frequent(torch.tensor([5, 0, 9, 2]), 2, frozenset({1}))
    tensor([2, 1])
    """
    worth = counts.clone()
    worth[list(always)] = torch.iinfo(worth.dtype).max
    chosen = worth.argsort(descending=True, stable=True)[:n]
    chosen = chosen[worth[chosen] > 0]
    return chosen[counts[chosen].argsort(descending=True, stable=True)]


def settings_of(command: commands.Distill, recipe: Recipe) -> dict[str, Any]:
    """All settings that affect the draft."""
    # batch_rows too: it affects rounding.
    names = ["target", "revision", "questions", "texts", "max_tokens", "temperatures", "chat"]
    names += ["start", "stored", "evaluate", "batch_rows"]
    files = [str(path) for given in command.prompts for path in given]
    chosen = {name: getattr(command, name) for name in names}
    chosen["layers"], chosen["head"] = sizes(command)
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
            begun = found["settings"]
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
