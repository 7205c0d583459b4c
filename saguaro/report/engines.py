"""Engines for the entries of a report: built when they are first needed, kept for the next cells, closed at the end."""

import gc
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from saguaro.config import EngineConfig
from saguaro.engine.assembly import choose_method
from saguaro.engine.engine import Engine
from saguaro.errors import ConfigError, TokenizerMismatch
from saguaro.llm import LLM
from saguaro.measure.grown_pair import LONGEST, GrownPair, encode

MOST_OPEN = 6  # engines at a time; a draft's process takes some hundred megabytes
BESIDE = "suffix+"  # as a draft: the pair's own, and what followed earlier
SPARE = 32  # tokens that a text may be longer than prompt and output


class Pair(Protocol):
    """A target and its draft."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The prompts as tokens."""

    def build(self, settings: Mapping[str, Any], rows: int) -> LLM:
        """An engine of these settings, for so many rows."""

    def facts(self) -> dict[str, Any]:
        """What a reader needs to know of it."""

    def close(self) -> None:
        """Release the weights."""


class LoadedPair:
    """A model as its files have it, and a draft. `base` decodes without the draft, and holds the weights."""

    def __init__(self, name: str, base: LLM, *, chat: bool, n_output: int) -> None:
        spec = base.engine.loaded.model.spec
        if spec.max_length < 2 * (n_output + SPARE):
            raise ConfigError(
                f"{name} reads texts of at most {spec.max_length} tokens, and the outputs of this report have "
                f"{n_output}; choose another model"
            )
        self.name, self._base, self._chat, self._n_output = name, base, chat, n_output + SPARE
        self._length = min(LONGEST + self._n_output, spec.max_length)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See Pair; as user messages, if the model has a template."""
        words, most = self._base.engine.tokenizer, self._length - self._n_output
        if self._chat:
            try:
                return [words.encode_chat([{"role": "user", "content": text}])[-most:] for text in texts]
            except TokenizerMismatch:
                pass
        return [words.encode(text)[-most:] for text in texts]

    def build(self, settings: Mapping[str, Any], rows: int) -> LLM:
        """See Pair."""
        room = room_for(rows, self._length, self._base.engine.kv.bytes_per_token)
        own = with_draft(settings, self._base.engine.config.draft)
        return self._base.sibling(**{"max_batch_rows": rows, **room, **own})

    def facts(self) -> dict[str, Any]:
        """See Pair."""
        model, config = self._base.engine.loaded.model, self._base.engine.config
        return {
            "target": self._base.engine.loaded.name,
            "draft": config.draft,
            "device": str(model.device),
            "dtype": model.format,
            "threads": config.threads,
        }

    def close(self) -> None:
        """See Pair."""
        self._base.close()


class Grown:
    """A grown pair: both models are in this process."""

    def __init__(self, name: str, pair: GrownPair, facts: Mapping[str, Any], *, n_output: int) -> None:
        self.name, self._pair, self._facts = name, pair, facts
        self._length = min(LONGEST + n_output + SPARE, pair.target.model.spec.max_length)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See Pair."""
        return encode(self._pair.tokenizer, texts)

    def build(self, settings: Mapping[str, Any], rows: int) -> LLM:
        """See Pair."""
        model = self._pair.target.model
        common = {"device": str(model.device), "dtype": model.format, "learnt_dir": "none", "max_batch_rows": rows}
        room = room_for(rows, self._length, model.spec.kv_bytes_per_token(model.dtype))
        config = EngineConfig(**{**common, **room, **with_draft(settings, self._pair.draft_name)})
        draft = self._pair.draft if choose_method(config).needs_model else None
        return LLM.around(Engine(self._pair.target, self._pair.tokenizer, config, draft=draft))

    def facts(self) -> dict[str, Any]:
        """See Pair."""
        return {
            "target": f"{self._pair.target.name} (grown)",
            "draft": f"{self._pair.draft_name} (grown)",
            **self._facts,
        }

    def close(self) -> None:
        """See Pair."""


class Engines:
    """The engines of one pair, by their settings. Beyond MOST_OPEN the least recently used are closed."""

    def __init__(self, pair: Pair, rows: int) -> None:
        self.pair, self._rows = pair, rows
        self._open: OrderedDict[str, LLM] = OrderedDict()

    def get(self, wanted: Sequence[Mapping[str, Any]]) -> list[LLM]:
        """The engines of these settings, all open at the same time, until the next call."""
        keys = [json.dumps(dict(settings), sort_keys=True) for settings in wanted]
        known = [key for key in keys if key in self._open]
        for key in known:
            self._open.move_to_end(key)
        n_new = len(set(keys)) - len(set(known))
        self._shrink(max(len(set(known)), MOST_OPEN - n_new))
        for key, settings in zip(keys, wanted, strict=True):
            if key not in self._open:
                self._open[key] = self.pair.build(settings, self._rows)
        return [self._open[key] for key in keys]

    def close(self) -> None:
        """Close all, and the pair."""
        self._shrink(0)
        self.pair.close()

    def _shrink(self, n: int) -> None:
        """Close the least recently used until n are open, and return their memory, a device's too."""
        if len(self._open) <= n:
            return
        while len(self._open) > n:
            self._open.popitem(last=False)[1].close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def room_for(rows: int, length: int, per_token: int) -> dict[str, Any]:
    """Settings of memory: so many rows of usual length, or one that is as long as it may be."""
    return {"max_model_len": length, "kv_memory": str(per_token * (rows * (length // 3) + 2 * length))}


def with_draft(settings: Mapping[str, Any], own: str | None) -> dict[str, Any]:
    """Settings with the pair's own draft, where they name none or one beside it.

    >>> with_draft({"method": "sd"}, "a"), with_draft({"draft": BESIDE}, "a"), with_draft({"draft": "suffix"}, "a")
    ({'draft': 'a', 'method': 'sd'}, {'draft': 'suffix+a'}, {'draft': 'suffix'})
    """
    named = {"draft": f"{BESIDE}{own}"} if settings.get("draft") == BESIDE else {}
    return {"draft": own, **settings, **named}
