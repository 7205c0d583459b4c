"""`saguaro info`: describes a loaded model, its memory and its capacity."""

import json
from typing import Any

import torch

from saguaro import __version__
from saguaro.cli import commands
from saguaro.config import format_bytes
from saguaro.draft.policy.costs import costs_of
from saguaro.engine.engine import Engine
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
        "tensor_parallel_size": engine.config.tensor_parallel_size,
        "method": engine.method.name,
        "draft": engine.config.draft,
        "preparation": engine.preparation.why,
        "link": engine.placed.placement.link if engine.method.drafts else "null",
        "placement": str(engine.placed.placement) if engine.method.drafts else None,
        "learnt": learnt(engine),
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


def learnt(engine: Engine) -> dict[str, Any] | str | None:
    """A summary of what was learnt before: ms of a verification of 1 and of K + 1 tokens, ms of a draft step, tokens
    per round; or why there is none.
    """
    if not engine.method.needs_model:
        return None
    if engine.learnt is None:
        return "not kept: learnt_dir is none"
    state, tokens = engine.learnt.read(), (1, engine.config.lookahead + 1)
    costs = costs_of(state, tokens) if state is not None else None
    if costs is None:
        return "nothing yet; run saguaro tune"
    rounded = {n: round(ms, 2) for n, ms in costs.verification_ms.items() if n in tokens}
    steps = {n: round(ms, 2) for n, ms in costs.draft_step_ms.items()}
    per_round = costs.tokens_per_round
    return {
        "verification_ms": rounded,
        "draft_step_ms": steps,
        "tokens_per_round": None if per_round is None else round(per_round, 2),
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
    if name == "learnt" and isinstance(value, dict):
        return _learnt_words(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {seconds}" for key, seconds in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _learnt_words(found: dict[str, Any]) -> str:
    """
    >>> _learnt_words({"verification_ms": {1: 9.5, 5: 12.0}, "draft_step_ms": {1: 0.8}, "tokens_per_round": 2.4})
    'verify 1 token 9.5 ms, verify 5 tokens 12.0 ms, draft step of 1 row 0.8 ms, 2.4 tokens per round with the draft'
    """
    words = [f"verify {_count(n, 'token')} {ms} ms" for n, ms in found["verification_ms"].items()]
    words += [f"draft step of {_count(n, 'row')} {ms} ms" for n, ms in found["draft_step_ms"].items()]
    if found["tokens_per_round"] is not None:
        words.append(f"{found['tokens_per_round']} tokens per round with the draft")
    return ", ".join(words)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
