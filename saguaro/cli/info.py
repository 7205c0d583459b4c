"""`saguaro info`: describes a loaded model, its memory and its capacity."""

import json
from typing import Any

import torch

from saguaro import __version__
from saguaro.cli import commands
from saguaro.config import format_bytes
from saguaro.llm import LLM


def describe(llm: LLM) -> dict[str, Any]:
    """The description of a loaded model."""
    engine, spec = llm.engine, llm.engine.loaded.model.spec
    return {
        "saguaro": __version__,
        "torch": torch.__version__,
        "model": engine.loaded.name,
        "path": str(engine.loaded.path),
        "architecture": spec.architecture,
        "parameters": engine.loaded.n_params,
        "layers": spec.n_layers,
        "hidden": spec.hidden,
        "heads": f"{spec.n_heads} of {spec.head_dim}, {spec.n_kv_heads} for keys",
        "vocabulary": spec.n_vocab,
        "vocabulary_of_tokenizer": engine.tokenizer.n_vocab,
        "device": str(engine.loaded.model.device),
        "dtype": engine.loaded.model.format,
        "threads": torch.get_num_threads(),
        "method": engine.method.name,
        "draft": engine.config.draft,
        "preparation": engine.preparation.why,
        "link": type(engine.round.draft).__name__.lower(),
        "weight_bytes": engine.loaded.weight_bytes,
        "kv_bytes": engine.kv.n_bytes,
        "kv_bytes_per_token": engine.kv.bytes_per_token,
        "kv_tokens": engine.kv.n_tokens,
        "max_model_len": engine.kv.longest,
        "page_size": engine.kv.page_size,
        "memory_bytes": sum(engine.memory.values()),
        "memory": {name: format_bytes(n) for name, n in engine.memory.items() if n},
        "load_seconds": {name: round(seconds, 3) for name, seconds in engine.startup.items()},
    }


def info(command: commands.Info) -> int:
    """Print the description."""
    facts = describe(commands.load(command.which, command.engine))
    if command.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):>24}  {_readable(name, value)}")
    return 0


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes") or name == "kv_bytes_per_token":
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {seconds}" for key, seconds in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
