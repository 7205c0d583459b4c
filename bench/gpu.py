"""Speed of the engine on a GPU with a grown pair: one table, one JSON.

    python -m bench.gpu --target 32b --draft 0.6b --prompts DATA/*.jsonl --json gpu.json
    python -m bench.gpu --target 32b --draft 0.6b --cells ar sd:6 ssd:6:8 --batches 1 8 32 --temperatures 0 1
    python -m bench.gpu --target 32b --draft 0.6b --peers

A cell is method[:lookahead[:budget[:nodes[:width]]]]; without nodes it speculates chains. Every cell runs the same
prompts. Prefill is excluded: only rounds in which every row decodes are counted, from the end of one round to the end
of the next.

    verify    the target's time on the device; under ssd it shares the device with the draft
    draft     the draft's time on the device while the target verifies
    exposed   the target's wait for the draft: drafting just in time, or unfinished preparation
    host      the rest of the round
    floor     bytes of the target's weights / read bandwidth, measured in the same run

The pair is grown (saguaro.measure.grown): text as from SmolLM2, costs as of the shapes.
"""

import cProfile
import gc
import json
import pstats
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from bench.cells import settings_of
from bench.columns import line_of
from bench.workloads import read_prompts
from saguaro.config import EngineConfig, SamplingParams, format_bytes
from saguaro.engine.engine import Engine
from saguaro.measure.decoding import counted
from saguaro.measure.grown_pair import GrownPair, encode, make_pair
from saguaro.measure.metrics import Summary
from saguaro.types import RoundEvent


@dataclass(frozen=True)
class Args:
    """What to measure."""

    target: str = "32b"
    """A grown shape, or smollm2 as it is."""
    draft: str = "0.6b"
    """A grown shape, smollm2, or drop:I,J,..."""
    agreement: float = 0.8
    """Acceptance that the target's noise is set for, on text of SmolLM2."""
    epsilon: float | None = None
    """Noise of the target, in place of a search."""
    cells: tuple[str, ...] = ("ar", "sd:4", "sd:6", "sd:8", "ssd:6:8", "ssd:8:8", "ssd:10:8")
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    prompts: tuple[Path, ...] = ()
    num_prompts: int = 8
    """Prompts at batch 1; a larger batch has as many as it holds."""
    max_tokens: int = 128
    warm: int = 1
    """Batches served before any is counted: what is slow the first time, or is being found out, is left out."""
    prepare: str = "auto"
    """Whether ssd prepares: where it pays (auto), or always."""
    dtype: str = "bfloat16"
    peers: bool = False
    """Measure transformers too: alone, and with the draft as its assistant."""
    profile: bool = False
    """Print where the host's time goes, after each cell."""
    seconds: float = 540.0
    """Cells that have not begun by then are left out, and said to be."""
    json: Path | None = None


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
        """Print and store the conclusions."""
        floors = self.facts["floor_ms"], self.facts["draft_floor_ms"]
        self.facts["conclusions"] = conclusions(self.cells, *floors)
        for name, value in self.facts["conclusions"].items():
            print(f"{name:>36}  {value}")
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps({**self.facts, "cells": self.cells}, indent=1))


COLUMNS = {
    "cell": "<14", "batch": ">5", "T": ">3", "tok_s": ">8.1f", "per_round": ">9.2f", "acceptance": ">10.3f",
    "prepared": ">8.2f", "hit_rate": ">8.3f", "round_ms": ">8.2f", "verify": ">7.2f", "draft": ">7.2f",
    "exposed": ">7.2f", "host": ">6.2f",
}  # fmt: skip


def main(args: Args) -> int:
    """Measure every cell."""
    if not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device", file=sys.stderr)
        return 2
    began = time.perf_counter()
    with torch.inference_mode():
        texts = read_prompts(list(args.prompts), 8)
        pair, facts = make_pair(
            args.target,
            args.draft,
            texts,
            device=torch.device("cuda"),
            dtype=args.dtype,
            epsilon=args.epsilon,
            agreement=args.agreement,
        )
        read = format_bytes(facts["weight_bytes_read"])
        print(f"{args.target} on {facts['device']}: {read} of weights read for a token", flush=True)
        facts |= {"read_tb_s": read_bandwidth() / 1e12, "weight_bytes": pair.target.weight_bytes}
        facts["floor_ms"] = facts["weight_bytes_read"] / facts["read_tb_s"] / 1e9
        facts["draft_floor_ms"] = (facts["draft_bytes_read"] or 0) / facts["read_tb_s"] / 1e9
        print(json.dumps(facts), flush=True)
        report = Report({**facts, "args": {k: str(v) for k, v in asdict(args).items()}}, args.json)
        for batch in args.batches:
            prompts = encode(pair.tokenizer, read_prompts(list(args.prompts), max(batch, args.num_prompts)))
            for temperature in args.temperatures:
                for cell in args.cells:
                    if time.perf_counter() - began > args.seconds:
                        print(f"left out for want of time: {cell} at batch {batch}, temperature {temperature}")
                        continue
                    report.add(measure(pair, cell, batch, temperature, prompts, args))
        if args.peers:
            from bench.hugging import measure_peers

            prompts = encode(pair.tokenizer, read_prompts(list(args.prompts), args.num_prompts))
            for peer in measure_peers(pair.target.model, pair.draft, prompts, args.max_tokens):
                report.add(peer)
        report.conclude()
    return 0


def measure(
    pair: GrownPair, cell: str, batch: int, temperature: float, prompts: list[list[int]], args: Args
) -> dict[str, Any]:
    """Serve the prompts, a batch at a time; return the breakdown of the time."""
    sizes = settings_of(cell)
    method, lookahead, budget = sizes["method"], sizes["lookahead"], sizes["budget"]
    config = EngineConfig(
        **sizes,
        draft=(pair.draft_name if pair.draft is None else "given") if method != "ar" else None,
        prepare=args.prepare,
        link="inline",
        device="cuda",
        dtype=args.dtype,
        kv_memory="6GiB",
        max_model_len=2048,
        max_batch_rows=batch,
        max_batch_tokens=2048,
    )
    built = time.perf_counter()
    engine = Engine(pair.target, pair.tokenizer, config, draft=pair.draft)
    torch.cuda.synchronize()
    start_s, graph_bytes = time.perf_counter() - built, torch.cuda.memory_reserved()
    events: list[RoundEvent] = []
    for _ in range(args.warm):
        _serve(engine, prompts[:batch], batch, temperature, args.max_tokens)
    engine.round.observers.append(events.append)
    began = time.perf_counter()
    n_tokens = _serve(engine, prompts[: max(batch, args.num_prompts)], batch, temperature, args.max_tokens)
    whole_s = time.perf_counter() - began
    if args.profile:
        _profile(engine, prompts[:batch], batch, temperature, args.max_tokens)
    engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    found = {"cell": cell, "batch": batch, "T": temperature, "method": method, "K": lookahead, "M": budget}
    extra = {"tok_s_whole": n_tokens / whole_s, "start_s": start_s, "reserved_bytes": graph_bytes}
    return found | figures(events, batch) | extra


def _profile(engine: Engine, prompts: list[list[int]], batch: int, temperature: float, max_tokens: int) -> None:
    """Serve once more, and print the slowest functions."""
    profiler = cProfile.Profile()
    profiler.enable()
    _serve(engine, prompts, batch, temperature, max_tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def counted_on(events: list[RoundEvent], batch: int) -> Iterator[tuple[RoundEvent, RoundEvent]]:
    """The counted rounds that a device timed."""
    timed = ((before, event) for before, event in counted(events, batch))
    return ((before, event) for before, event in timed if before.verify is not None and event.verify is not None)


def verify_of(event: RoundEvent) -> float:
    """Seconds of the verification, on its device."""
    assert event.verify is not None
    return event.verify[1] - event.verify[0]


def wait_of(event: RoundEvent) -> float:
    """Seconds that the target waits for the draft; a draft in the host's thread may also hold up the outcome."""
    assert event.verify is not None
    return event.speculate[1] - event.speculate[0] + max(0.0, event.overlap[1] - event.verify[1])


def figures(events: list[RoundEvent], batch: int) -> dict[str, Any]:
    """Means over counted rounds, each from the end of the previous round."""
    summary, n_tokens, seconds, waits, hosts, verifies, drafts = Summary(), 0, 0.0, 0.0, 0.0, 0.0, 0.0
    n_rounds = 0
    for event in events[1:]:
        summary.add(event)
    for before, event in counted_on(events, batch):
        n_rounds += 1
        n_tokens += sum(row.n_tokens for row in event.rows)
        whole, verify, wait = event.collect[1] - before.collect[1], verify_of(event), wait_of(event)
        seconds, verifies, waits = seconds + whole, verifies + verify, waits + wait
        hosts += whole - verify - wait
        if event.draft is not None:
            drafts += event.draft.prepare[1] - event.draft.prepare[0]
    ms = 1e3 / max(n_rounds, 1)
    return {
        "n_rounds": n_rounds,
        "tok_s": n_tokens / seconds if seconds else None,
        "round_ms": seconds * ms,
        "verify": verifies * ms,
        "draft": drafts * ms,
        "exposed": waits * ms,
        "host": hosts * ms,
        "per_round": summary.tokens_per_round,
        "acceptance": summary.acceptance,
        "hit_rate": summary.hit_rate,
        "prepared": summary.prepared.value,
        "summary": summary.as_dict(),
    }


def conclusions(cells: list[dict[str, Any]], floor_ms: float, draft_floor_ms: float) -> dict[str, Any]:
    """The main ratios, at batch 1 and temperature 0 unless noted; those not measured are left out.

    On one GPU ssd reads the draft's weights K + 1 times during a verification. With only hits and no host time, a round
    takes the verification's time plus the time to read those bytes. It takes less only if the verification leaves
    bandwidth unused, and never less than reading all bytes at full bandwidth.
    """

    def of(method: str, batch: int = 1, heat: float = 0.0) -> list[dict[str, Any]]:
        found = [cell for cell in cells if (cell.get("method"), cell["batch"], cell["T"]) == (method, batch, heat)]
        return sorted(found, key=lambda cell: -cell["tok_s"])  # fastest first

    found: dict[str, Any] = {}
    ar, sd, ssd = of("ar"), of("sd"), of("ssd")
    if ar:
        found["ar: floor / round"] = round(floor_ms / ar[0]["round_ms"], 3)
        found["ar: floor / verify"] = round(floor_ms / ar[0]["verify"], 3)
    if sd:
        found["draft step, ms"] = round(min(cell["exposed"] / cell["K"] for cell in sd), 3)
        found["best sd, ms per round"] = f"{sd[0]['cell']}, {sd[0]['round_ms']:.2f}"
        for name, target_ms in (("as the verification reads", None), ("at full bandwidth", floor_ms)):
            ms = {c["K"]: (target_ms or c["verify"]) + (c["K"] + 1) * draft_floor_ms for c in sd}
            most, K = max((c["per_round"] / ms[c["K"]] * 1e3, c["K"]) for c in sd)
            found[f"ssd / sd at most, {name}"] = f"{most / sd[0]['tok_s']:.3f} (K = {K})"
    if sd and ssd:
        found["ssd / sd"] = f"{ssd[0]['tok_s'] / sd[0]['tok_s']:.3f} ({ssd[0]['cell']} / {sd[0]['cell']})"
        alone = {cell["K"]: cell["verify"] for cell in sd}  # verification time without a concurrent draft
        free = {c["cell"]: round(c["tok_s"] * alone[c["K"]] / c["per_round"] / 1e3, 3) for c in ssd if c["K"] in alone}
        found["ssd / a draft that costs nothing"] = free or None
    if ar and ssd:
        found["ssd / ar"] = round(ssd[0]["tok_s"] / ar[0]["tok_s"], 3)
    for cell in ssd:
        for warm in of("ssd", heat=1.0):
            if warm["cell"] == cell["cell"]:
                ratio = warm["tok_s"] / warm["per_round"] / (cell["tok_s"] / cell["per_round"])
                found[f"temperature 1 / 0, {cell['cell']}"] = round(ratio, 3)
    for batch in sorted({cell["batch"] for cell in cells}):
        if of("sd", batch) and of("ssd", batch):
            best, other = of("ssd", batch)[0], of("sd", batch)[0]
            found[f"ssd / sd, batch {batch}"] = round(best["tok_s"] / other["tok_s"], 3)
            found[f"host ms, ssd, batch {batch}"] = round(best["host"], 2)
    return found


def _serve(engine: Engine, prompts: list[list[int]], batch: int, temperature: float, max_tokens: int) -> int:
    """Run prompts a batch at a time; return the number of tokens."""
    n_tokens = 0
    for start in range(0, len(prompts), batch):
        names = [
            engine.add(prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True))
            for i, prompt in enumerate(prompts[start : start + batch])
        ]
        while engine.has_work:
            n_tokens += sum(len(delta.token_ids) for delta in engine.step())
        for name in names:
            engine.result(name)
    return n_tokens


def read_bandwidth(n_bytes: int = 8 * 2**30) -> float:
    """Read bandwidth in bytes per second, measured with a large sum."""
    x = torch.ones(n_bytes // 4, dtype=torch.float32, device="cuda")
    return n_bytes / min(_seconds(x.sum) for _ in range(10))


def _seconds(call: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    found: Tensor = call()
    end.record()
    end.synchronize()
    del found
    return float(start.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
