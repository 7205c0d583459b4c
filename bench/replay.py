"""Two devices, replayed: the draft is real, the target answers from a recording. One table, one JSON.

    python -m bench.replay --target 32b --draft 0.6b --epsilon 0.27 --prompts DATA/*.jsonl --num-prompts 8 \\
        --max-tokens 96 --cells ar sd:8 sd:8:8:31:8 ssd:8:8:31:8 --temperatures 0 1 --save 32b.json
    python -m bench.replay --target 32b --draft 0.6b --epsilon 0.27 --prompts DATA/*.jsonl --num-prompts 8 \\
        --max-tokens 96 --cells sd:8:8:31:8 ssd:8:8:31:8 --presets 32b 70b 8b --load 32b.json
    python -m bench.replay --target smollm2 --draft default --link process --cells sd:4 ssd:4 --verify-ms 40
    python -m bench.replay --target smollm2 --draft default --link service --drafts 1 2 4 --batches 16 \\
        --cells sd:4 ssd-uniform:4:8 --verify-ms 16

Under shared noise the target's tokens are a function of (prompt, parameters, seed). First the real target writes them
alone, once. Then every cell runs with a replayed target (bench.replay_verifier): it gives the recorded tokens after
the time that a step takes on another device. That time is given (--verify-ms) or a preset (bench.step_times). The
engine, the scheduler, the policy, the link and the draft on its device are real. The target's weights are released
before, so the draft has the device to itself. A run fails if an output differs from the recording.

With several drafts (the paper's figure 6, right) the rows are shared out among draft services, each a process on the
CPU with one thread, so each draft prepares for fewer rows in the same time.

A cell is method[:lookahead[:budget[:nodes[:width]]]]; without nodes it speculates chains. Prefill is excluded.

    verify    the given time of a step
    draft     the draft's work while the target verifies
    exposed   the target's wait for the draft: drafting just in time, unfinished preparation, and the link
    of_hits   the same, in rounds in which every row hit
    host      the rest of the round. Not in it: what the host of a real target does to launch a step
    free      tok/s of a draft that costs nothing: the cell's tokens per round / (verify + host)
    of_free   tok/s / free
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro

from bench.cells import settings_of
from bench.columns import line_of
from bench.gpu import counted_on, figures, wait_of
from bench.recording import Recording, Source, load_recording, params_of, record
from bench.replay_verifier import CapturedShape, ReplayVerifier, without_weights
from bench.services import Services, draft_services
from bench.step_times import PRESETS, StepTimes, parse_times
from bench.workloads import read_prompts
from saguaro.config import EngineConfig
from saguaro.device.graphs import BUCKETS, bucket
from saguaro.engine.advice import check_machine
from saguaro.engine.assembly import find_device
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, SaguaroError
from saguaro.kernels.formats import computed_in, find_format, packed_kind, ready
from saguaro.link.apart import Apart
from saguaro.link.inline import Inline
from saguaro.link.several import Several
from saguaro.llm import default_cache
from saguaro.measure.grown import SHAPES, grow, grown_spec
from saguaro.measure.grown_pair import encode
from saguaro.method import find_method
from saguaro.model.default import DRAFT, fetch_default
from saguaro.model.hf_config import read_spec
from saguaro.model.load import Loaded, load
from saguaro.model.spec import ModelSpec
from saguaro.model.tokenizer import Tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer
from saguaro.types import RoundEvent

MAX_LENGTH = 2048  # longest text
RECORDED_ROWS = 8  # outputs recorded at a time

COLUMNS = {
    "times": "<6", "cell": "<14", "batch": ">5", "drafts": ">6", "T": ">3", "tok_s": ">8.1f", "per_round": ">9.2f",
    "prepared": ">8.2f", "hit_rate": ">8.3f", "round_ms": ">8.2f", "verify": ">7.2f", "draft": ">7.2f",
    "exposed": ">7.2f", "of_hits": ">7.2f", "host": ">6.2f", "free": ">8.1f", "of_free": ">7.3f",
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """What to measure."""

    target: str = "32b"
    """What is recorded: a shape of bench.grown, or smollm2 as it is."""
    draft: str = "0.6b"
    """A grown shape, smollm2, or default: the default model's draft."""
    epsilon: float = 0.27
    """Noise of a grown target; 0.27: 32b accepts 0.8 of the tokens of 0.6b."""
    cells: tuple[str, ...] = ("ar", "sd:8", "ssd:8:8", "sd:8:8:31:8", "ssd:8:8:31:8")
    presets: tuple[str, ...] = ("32b",)
    """Step times of the target elsewhere (bench.step_times); every cell runs with each."""
    verify_ms: tuple[str, ...] = ()
    """Step times in place of presets: MS, or MS@TOKENS[xROWS] ..."""
    padded: bool = True
    """Every verification takes the time of all nodes, as a captured step on a GPU; otherwise of those speculated."""
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: tuple[Path, ...] = ()
    num_prompts: int = 8
    """Prompts at batch 1; a larger batch has as many as it holds."""
    max_tokens: int = 128
    warm: int = 1
    """Batches served before any is counted."""
    prepare: str = "auto"
    """Whether ssd prepares: where it pays (auto), or always."""
    link: str = "inline"
    """Where the draft runs: inline, process, or service: services in processes of their own (a grown draft runs
    inline)."""
    drafts: tuple[int, ...] = (1,)
    """Numbers of draft services; every cell but ar runs with each."""
    device: str = "auto"
    """The draft's device, on which the target is recorded too."""
    dtype: str = "auto"
    save: Path | None = None
    """Keep the recording in this file."""
    load: Path | None = None
    """Use the recording of this file: the target is not built."""
    seconds: float = 540.0
    """Cells that have not begun by then are left out, and said to be."""
    json: Path | None = None

    def __post_init__(self) -> None:
        _one_of("target", self.target, (*SHAPES, "smollm2"))
        _one_of("draft", self.draft, (*SHAPES, "smollm2", "default"))
        _one_of("link", self.link, ("inline", "process", "service"))
        for preset in self.presets:
            _one_of("presets", preset, tuple(PRESETS))
        if self.link != "inline" and self.draft in SHAPES:
            raise ConfigError(f"link is {self.link} and draft {self.draft}, which is grown in this process; use inline")
        if self.link != "service" and self.drafts != (1,):
            raise ConfigError(f"drafts is {_words(self.drafts)} and link {self.link}; several drafts need link service")
        if not self.drafts or min(self.drafts) < 1:
            raise ConfigError(f"drafts is {_words(self.drafts)}; it must be numbers of at least 1")
        for cell in self.cells:
            method = find_method(cell.partition(":")[0])
            if method.verification != "shared":
                raise ConfigError(
                    f"cell {cell} verifies by {method.verification}, which changes tokens with the draft; a recording "
                    "answers only methods of shared noise"
                )

    def step_times(self) -> list[StepTimes]:
        """The step times to run with."""
        if self.verify_ms:
            return [parse_times("given", self.verify_ms)]
        return [parse_times(name, PRESETS[name]) for name in self.presets]


@dataclass(frozen=True)
class Models:
    """Builds the models on the device."""

    folder: Path  # of SmolLM2
    device: torch.device
    dtype: str

    def spec(self, name: str) -> ModelSpec:
        """The spec of a shape or of SmolLM2."""
        source = read_spec(self.folder)
        return grown_spec(source, SHAPES[name]) if name in SHAPES else source

    def build(self, name: str, epsilon: float) -> Transformer:
        """The model with its weights."""
        if name in SHAPES:
            source = load("smollm2", self.folder, self.device, torch.float32).model
            dtype = computed_in(self.dtype)
            grown = grow(source, SHAPES[name], epsilon=epsilon, device=self.device, dtype=dtype).model
            return ready(grown, self.dtype)
        kind = packed_kind(self.dtype, self.device)
        loaded = load("smollm2", self.folder, self.device, computed_in(self.dtype), kind)
        return ready(loaded.model, self.dtype)


@dataclass(frozen=True)
class Replay:
    """A recording, and what it is replayed to."""

    recording: Recording
    target: Loaded  # without weights
    tokenizer: Tokenizer
    prompts: list[list[int]]
    draft: Transformer | None  # in this process
    draft_name: str


@dataclass
class Report:
    """The measurements, written after every cell."""

    facts: dict[str, Any]
    path: Path | None
    cells: list[dict[str, Any]] = field(default_factory=list)

    def add(self, cell: dict[str, Any]) -> None:
        """Print and store a cell."""
        if not self.cells:
            print(line_of(COLUMNS), flush=True)
        self.cells.append(cell)
        print(line_of(COLUMNS, cell), flush=True)
        self._write()

    def conclude(self) -> None:
        """Print and store the ratios."""
        self.facts["ratios"] = ratios(self.cells)
        for each in self.facts["ratios"]:
            print(f"{each['cell']} / {each['sd']}, {each['times']}, batch {each['batch']}, ", end="")
            print(f"{each['drafts']} drafts, T {each['T']:g}: ", end="")
            print(f"{each['ssd / sd']:.3f}; {each['ssd / free sd']:.3f} of the same with a draft that costs nothing")
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps({**self.facts, "cells": self.cells}, indent=1))


def main(args: Args) -> int:
    """Record or load, then measure every cell."""
    began, all_times = time.perf_counter(), args.step_times()
    for times, batch, cell in product(all_times, args.batches, args.cells):
        times.check(shape_of(cell).n_tokens(batch), batch)
    replay = prepare(args)
    where = str(replay.target.model.device)
    device = torch.cuda.get_device_name(where) if where.startswith("cuda") else where
    print(f"replayed target: {replay.recording.source}; the draft {args.draft} computes on {device}", flush=True)
    tables = {times.name: {f"{rows:g}": points for rows, points in times.tables.items()} for times in all_times}
    facts = {"target": "replayed", "recorded": asdict(replay.recording.source), "device": device, "ms_by_rows": tables}
    report = Report({**facts, "args": {k: str(v) for k, v in asdict(args).items()}}, args.json)
    with ExitStack() as stack:
        services = None
        if args.link == "service":
            services = stack.enter_context(draft_services(max(args.drafts), service_flags(args, replay.target)))
        for times, batch, temperature, (cell, n_drafts) in product(
            all_times, args.batches, args.temperatures, drafted_cells(args)
        ):
            if time.perf_counter() - began > args.seconds:
                print(f"left out for want of time: {cell} at {times.name}, batch {batch}, temperature {temperature}")
                continue
            drafted = drafts_of(args, replay, services, n_drafts)
            report.add(measure(replay, cell, times, batch, temperature, args, drafted) | {"drafts": n_drafts})
    report.conclude()
    return 0


def drafted_cells(args: Args) -> list[tuple[str, int]]:
    """Every cell with every number of drafts; one that drafts nothing once, with none.

    >>> drafted_cells(Args(link="service", draft="default", drafts=(1, 2), cells=("ar", "sd:3")))
    [('ar', 0), ('sd:3', 1), ('sd:3', 2)]
    """
    return [
        (cell, n)
        for cell in args.cells
        for n in (args.drafts if find_method(settings_of(cell)["method"]).drafts else (0,))
    ]


def service_flags(args: Args, target: Loaded) -> list[str]:
    """How `saguaro draft` is told which model to serve."""
    return [*([] if args.draft == "default" else [str(target.path)]), "--dtype", args.dtype]


def drafts_of(args: Args, replay: Replay, services: Services | None, n: int) -> dict[str, Any]:
    """The settings that name the draft."""
    if services is None or n == 0:
        return {"draft": replay.draft_name if n else None, "link": "inline" if services else args.link}
    return {"draft": ",".join(services.addresses[:n]), "draft_key_file": services.key_file}


def prepare(args: Args) -> Replay:
    """Record the target, or load its recording; then build the draft."""
    device = find_device("device", args.device)
    check_machine(device, lambda *_: None)
    dtype = find_format(args.dtype, device)
    folder = fetch_default(default_cache())
    models = Models(folder, device, dtype)
    spec = models.spec(args.target)
    words = load_tokenizer(folder, spec.n_vocab)
    prompts = encode(words, read_prompts(list(args.prompts), max(args.num_prompts, *args.batches)))
    if args.load is not None:
        recording = load_recording(args.load)
        check_recording(recording, args, prompts)
    else:
        recording = make_recording(models, words, prompts, args)
        if args.save is not None:
            recording.save(args.save)
    draft = models.build(args.draft, 0.0) if args.draft in SHAPES else None
    named = {"default": str(DRAFT), "smollm2": str(folder)}
    target = without_weights(spec, device, computed_in(dtype), dtype)
    return Replay(recording, Loaded(args.target, folder, target), words, prompts, draft, named.get(args.draft, "given"))


@torch.inference_mode()
def make_recording(models: Models, words: Tokenizer, prompts: list[list[int]], args: Args) -> Recording:
    """Run the real target alone. Its memory is free afterwards."""
    model = models.build(args.target, args.epsilon)
    config = EngineConfig(
        method="ar", device=str(models.device), dtype=models.dtype, max_batch_rows=RECORDED_ROWS,
        max_batch_tokens=MAX_LENGTH, **_memory(model.spec, model.dtype, RECORDED_ROWS),
    )  # fmt: skip
    with _released():
        engine = Engine(Loaded(args.target, models.folder, model), words, config)
        began = time.perf_counter()
        outputs = record(engine, prompts, args.temperatures, args.max_tokens)
        seconds = time.perf_counter() - began
        engine.close()
        del engine, model
    print(f"recorded {len(outputs)} outputs of {args.target} in {seconds:.1f} s", flush=True)
    return Recording(_source(models, args), args.max_tokens, outputs)


def check_recording(recording: Recording, args: Args, prompts: list[list[int]]) -> None:
    """Raise unless this is a recording of what the flags describe."""
    source, epsilon = recording.source, args.epsilon if args.target in SHAPES else None
    if (source.target, source.epsilon) != (args.target, epsilon):
        raise ConfigError(
            f"{args.load} is a recording of {source}; the flags say {args.target} with epsilon {epsilon}: give the "
            "same, or record again"
        )
    if recording.n_tokens < args.max_tokens:
        raise ConfigError(
            f"{args.load} has {recording.n_tokens} tokens of each output; max_tokens is {args.max_tokens}: lower it, "
            "or record again"
        )
    for (seed, prompt), temperature in product(enumerate(prompts), args.temperatures):
        recording.output(prompt, temperature, seed)


def shape_of(cell: str) -> CapturedShape:
    """The shape of the step that verifies a cell's speculations.

    >>> shape_of("ar"), shape_of("ssd:8:8:31:8"), shape_of("pearl:3")
    (CapturedShape(nodes=0, lookahead=0), CapturedShape(nodes=31, lookahead=8), CapturedShape(nodes=3, lookahead=3))
    """
    sizes = settings_of(cell)
    if not find_method(sizes["method"]).drafts:
        return CapturedShape(0, 0)
    return CapturedShape(sizes.get("nodes", sizes["lookahead"]), sizes["lookahead"])


def measure(
    replay: Replay, cell: str, times: StepTimes, batch: int, temperature: float, args: Args, drafted: dict[str, Any]
) -> dict[str, Any]:
    """Serve the prompts, a batch at a time; return the breakdown of the time. drafted: see drafts_of."""
    engine = build(replay, cell, times, batch, args, drafted)
    events: list[RoundEvent] = []
    n_prompts = max(batch, args.num_prompts)
    try:
        for _ in range(args.warm):
            serve(engine, replay, range(batch), batch, temperature, args.max_tokens)
        engine.round.observers.append(events.append)
        serve(engine, replay, range(n_prompts), batch, temperature, args.max_tokens)
        lost = lost_drafts(engine)
    finally:
        engine.close()
    with _released():
        del engine
    if any(lost.values()):
        print(f"the draft of {cell} was late or lost, so some rounds had no speculation: {lost}")
    shape = shape_of(cell)
    found = {"times": times.name, "cell": cell, "batch": batch, "T": temperature, "method": cell.partition(":")[0]}
    tree = {"K": shape.lookahead, "N": shape.nodes, "R": settings_of(cell).get("width", 1)}
    measured = figures(events, batch) | {"of_hits": exposed_of_hits(events, batch)}
    return with_bound(found | tree | settings_of(cell) | lost | measured)


def build(replay: Replay, cell: str, times: StepTimes, batch: int, args: Args, drafted: dict[str, Any]) -> Engine:
    """An engine with the replayed target."""
    target, sizes = replay.target, settings_of(cell)
    config = EngineConfig(
        **sizes,
        **_memory(target.model.spec, target.model.dtype, batch),
        **drafted,
        prepare=args.prepare,
        device=str(target.model.device),
        dtype=target.model.format,
        max_batch_rows=batch,
        max_batch_tokens=MAX_LENGTH,
    )
    verifier = ReplayVerifier(replay.recording, times, shape_of(cell) if args.padded else None)
    engine = Engine(target, replay.tokenizer, config, draft=replay.draft, verifier=verifier)
    link = engine.round.draft
    if target.model.device.type == "cuda" and isinstance(link, Inline):
        for size in reversed([size for size in BUCKETS if size <= bucket(batch)]):  # as an engine with its own target
            link.warm(size)
    return engine


def serve(engine: Engine, replay: Replay, which: range, batch: int, temperature: float, n_tokens: int) -> None:
    """Run prompts a batch at a time. Raises if an output is not the recorded one."""
    for start in range(0, len(which), batch):
        names = {}
        for seed in which[start : start + batch]:
            names[seed] = engine.add(replay.prompts[seed], params_of(temperature, seed, n_tokens))
        while engine.has_work:
            engine.step()
        for seed, name in names.items():
            found = engine.result(name).outputs[0].token_ids
            wanted = replay.recording.output(replay.prompts[seed], temperature, seed)[:n_tokens]
            if found != wanted:
                at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if len({*pair}) > 1), "the end")
                raise SaguaroError(
                    f"prompt {seed} at temperature {temperature:g} differs from the recording, first at {at}: the "
                    "engine lost or changed tokens"
                )


def lost_drafts(engine: Engine) -> dict[str, int]:
    """How often a draft in its own process was late or died."""
    link = engine.round.draft
    return {"n_late": link.n_late, "n_deaths": link.n_deaths} if isinstance(link, Apart | Several) else {}


def exposed_of_hits(events: list[RoundEvent], batch: int) -> float | None:
    """Milliseconds that the target waits for the draft, in rounds in which every row hit; None without such rounds."""
    waits = [
        wait_of(event) for _, event in counted_on(events, batch) if all(row.source == "cache" for row in event.rows)
    ]
    return 1e3 * fmean(waits) if waits else None


def with_bound(cell: dict[str, Any]) -> dict[str, Any]:
    """Add the speed of a draft that costs nothing.

    >>> found = with_bound({"tok_s": 200.0, "round_ms": 20.0, "verify": 15.5, "host": 0.5, "exposed": 4.0})
    >>> found["free"], found["of_free"]
    (250.0, 0.8)
    """
    if cell["tok_s"] is None:
        return {**cell, "free": None, "of_free": None}
    share = (cell["verify"] + cell["host"]) / cell["round_ms"]
    return {**cell, "free": cell["tok_s"] / share, "of_free": share}


def ratios(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every cell that prepares, relative to sd with the same tree, step times, batch and temperature."""

    def alike(cell: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(cell[name] for name in ("times", "batch", "T", "K", "N", "R", "drafts"))

    measured = [cell for cell in cells if cell["tok_s"] is not None]
    plain = {alike(cell): cell for cell in measured if cell["method"] == "sd"}
    found = []
    for cell in measured:
        sd = plain.get(alike(cell))
        if sd is not None and cell["method"] != "sd":
            speeds = {"ssd / sd": cell["tok_s"] / sd["tok_s"], "ssd / free sd": cell["tok_s"] / sd["free"]}
            found.append(
                {name: cell[name] for name in ("cell", "times", "batch", "drafts", "T")} | {"sd": sd["cell"]} | speeds
            )
    return found


def _source(models: Models, args: Args) -> Source:
    is_grown, is_cuda = args.target in SHAPES, models.device.type == "cuda"
    where = torch.cuda.get_device_name(models.device) if is_cuda else str(models.device)
    return Source(args.target, args.epsilon if is_grown else None, models.dtype, where)


def _memory(spec: ModelSpec, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    """Pages for so many rows of full length."""
    length = min(MAX_LENGTH, spec.max_length)
    return {"max_model_len": length, "kv_memory": str(length * rows * spec.kv_bytes_per_token(dtype))}


@contextmanager
def _released() -> Iterator[None]:
    """Return the memory of what is deleted in this block."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers)) or "empty"


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def run() -> int:
    """The command."""
    try:
        return main(tyro.cli(Args))
    except SaguaroError as e:
        print(e, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
