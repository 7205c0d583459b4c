"""`saguaro bench`: measures methods on the same prompts, weights and noise; prints a table, and writes JSON.

Runs are interleaved: every group of prompts is run by every method before the next group, in a rotating order, so that
other load on the machine affects all methods alike. Every method must give the tokens of `ar`, except those that verify
by rejection at a temperature above 0. The exit status is 1 if one does not.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from saguaro import __version__
from saguaro.cli import commands
from saguaro.cli.candidates import config_for, encoder, load_candidates, method_names, settings_by_name
from saguaro.cli.progress import progress_bar
from saguaro.config import SamplingParams
from saguaro.device.machine import cpu_model
from saguaro.errors import ConfigError
from saguaro.llm import LLM
from saguaro.measure.candidate import Candidate, method_of, placement, results, table, verdict
from saguaro.measure.interleaved import Generate, generate_by, run_in_turn, seeded
from saguaro.measure.metrics import OutputFile
from saguaro.measure.peer import LLAMA, LlamaCpp, Peer, check_peer, gguf_of
from saguaro.measure.prompts import read_prompts


def bench(command: commands.Bench) -> int:
    """Measure, print the table and write the JSON. Returns 1 if tokens differ from ar's that must not."""
    params = command.sampling.params()
    names = method_names(command.methods, config_for(command.which, command.engine))
    texts = _texts(command)
    for peer in command.peer:
        check_peer(peer, command.which.model, params)
    if command.json:
        OutputFile(command.json, keep=True).close()
    encode, settings = encoder(texts, command.chat), settings_by_name(names)
    with load_candidates(settings, command.which, command.engine, params, encode, command.batch) as (entrants, prompts):
        runs = {entrant.name: generate_by(entrant.llm) for entrant in entrants if entrant.llm}
        ar = entrants[0].llm
        assert ar is not None
        for peer in command.peer:
            entrants.append(Candidate(peer, None, is_comparable=params.temperature == 0))
            with placement(peer):
                runs[peer] = _theirs(peer, ar, max(map(len, prompts)) + (params.max_tokens or 0))
        with progress_bar() as progress:
            run_in_turn(entrants, runs, prompts, seeded(params, len(prompts)), command.batch, progress)
        rows, circumstances = results(entrants), _circumstances(command, ar, names, len(prompts))
    Console().print(table(rows))
    if command.json:
        write_report(command.json, {"results": rows, **circumstances})
    return verdict(entrants)


def _texts(command: commands.Bench) -> list[str]:
    for name, value in (("num_prompts", command.num_prompts), ("batch", command.batch)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    return read_prompts([path for group in command.prompts for path in group], command.num_prompts)


def _theirs(name: str, llm: LLM, longest: int) -> Generate:
    """A peer, warmed up. transformers pads a group and generates it in one batch, with its first prompt's seed."""
    model, path = llm.engine.loaded.model, llm.engine.loaded.path
    warm_up = llm.engine.tokenizer.encode("Count from one to ten.")
    if method_of(name) == LLAMA:
        other = LlamaCpp(gguf_of(path), torch.get_num_threads(), longest + 8)
        other.generate([warm_up], [SamplingParams(temperature=0, max_tokens=8)])
        return other.generate
    peer = Peer(path, model.dtype, model.device)
    peer.generate(warm_up, 8)
    return lambda prompts, params: peer.generate_batch(prompts, params[0])


def _circumstances(command: commands.Bench, llm: LLM, names: Sequence[str], n_prompts: int) -> dict[str, Any]:
    """Everything the results depend on: settings, versions, machine."""
    model = llm.engine.loaded.model
    own = {
        "methods": list(names),
        "prompts": [str(path) for group in command.prompts for path in group],
        "num_prompts": n_prompts,
        "batch": command.batch,
        "chat": command.chat,
        "peer": list(command.peer),
    }
    found = {
        "model": llm.engine.loaded.name,
        "device": str(model.device),
        "dtype": model.format,
        "threads": torch.get_num_threads(),
    }
    asked = {**asdict(command.which), **asdict(command.engine), **asdict(command.sampling)}
    return {
        "settings": {**asked, **own, **found},
        "versions": versions(),
        "machine": machine(model.device),
    }


def versions() -> dict[str, str]:
    """The versions of what computes."""
    return {
        "saguaro": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """This machine; of its GPUs, the one of a device, or without a device the first."""
    has_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if has_gpu else None,
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    file = OutputFile(path)
    file.write(json.dumps(report, indent=2, default=str) + "\n")
    file.close()
