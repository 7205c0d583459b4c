"""A pair of grown models: the costs of large shapes, the text of a small model, a chosen acceptance."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saguaro.config import EngineConfig, SamplingParams
from saguaro.device.machine import device_model
from saguaro.engine.engine import Engine
from saguaro.llm import default_cache
from saguaro.measure.grown import SHAPES, Grown, find_epsilon, grow
from saguaro.model.default import fetch_default
from saguaro.model.load import Loaded, load
from saguaro.model.tokenizer import Tokenizer, load_tokenizer
from saguaro.model.transformer import Transformer

LONGEST = 1024  # tokens of a prompt


@dataclass(frozen=True)
class GrownPair:
    """A target and a draft on the device."""

    target: Loaded
    draft: Transformer | None  # None: named by the config
    tokenizer: Tokenizer
    draft_name: str


def make_pair(
    target: str,
    draft: str,
    texts: Sequence[str],
    *,
    device: torch.device,
    dtype: str = "bfloat16",
    epsilon: float | None = None,
    agreement: float = 0.8,
    folder: Path | None = None,
) -> tuple[GrownPair, dict[str, Any]]:
    """The pair on the device, and facts about it. Each is a shape of SHAPES or `smollm2`; the draft may be drop:I,J,...
    Without epsilon, the target's noise is searched for this agreement on the source's answers to the texts. folder:
    the source; without it, the default model."""
    folder, kind = folder or fetch_default(default_cache()), getattr(torch, dtype)
    source = load("smollm2", folder, device, torch.float32).model
    tokenizer = load_tokenizer(folder, source.spec.n_vocab)
    facts: dict[str, Any] = {"device": device_model(device), "torch": torch.__version__, "dtype": dtype}
    began = time.perf_counter()
    small: Transformer | None = None
    if draft in SHAPES:
        small = grow(source, SHAPES[draft], epsilon=0.0, device=device, dtype=kind).model
    elif draft == "smollm2":
        small = load("smollm2", folder, device, kind).model
    if target == "smollm2":
        large = load("smollm2", folder, device, kind).model
    else:
        grown = grow(source, SHAPES[target], epsilon=epsilon or 0.1, device=device, dtype=kind)
        facts["epsilon"] = epsilon or _search(grown, small, source, tokenizer, texts, agreement)
        large = grown.model
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    facts["grown_s"] = time.perf_counter() - began
    facts["weight_bytes_read"] = bytes_read(large)
    facts["draft_bytes_read"] = bytes_read(small) if small is not None else None
    return GrownPair(Loaded(target, folder, large), small, tokenizer, draft), facts


def bytes_read(model: Transformer) -> int:
    """Weight bytes read per step. An untied embedding is not counted: only a few of its rows are read."""
    read = sum(p.numel() * p.element_size() for p in model.parameters())
    return read if model.is_tied else read - model.embedding.numel() * model.embedding.element_size()


def encode(words: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Texts as chat prompts; long ones are truncated."""
    return [words.encode_chat([{"role": "user", "content": text}])[-LONGEST:] for text in texts]


def _search(
    grown: Grown,
    draft: Transformer | None,
    source: Transformer,
    words: Tokenizer,
    texts: Sequence[str],
    agreement: float,
) -> float:
    """The noise for the wanted acceptance, on the source's own answers to a few prompts."""
    config = EngineConfig(device=str(source.device), dtype="float32", kv_memory="1GiB", max_batch_rows=8)
    engine = Engine(Loaded("smollm2", Path(), source), words, config)
    for prompt in (prompts := encode(words, texts)):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=96))
    answers: dict[str, list[int]] = {f"request-{i}": list(prompt) for i, prompt in enumerate(prompts)}
    while engine.has_work:
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
    engine.close()
    plain = draft if draft is not None else source
    return find_epsilon(grown, plain, list(answers.values()), words.n_vocab, agreement)
