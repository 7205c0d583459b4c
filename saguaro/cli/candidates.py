"""Builds one engine per method, on the same weights and under the same conditions.

`ar` is always included, and first: the other methods must give its tokens, and their speed is compared with its speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from saguaro.cli import commands
from saguaro.cli.args import EngineArgs, ModelArgs
from saguaro.config import EngineConfig, SamplingParams
from saguaro.engine.assembly import choose_method
from saguaro.errors import ConfigError, TokenizerMismatch
from saguaro.llm import LLM
from saguaro.measure.candidate import Candidate, cores_of, method_of, placement, sizes_of
from saguaro.model.default import draft_for
from saguaro.model.tokenizer import Tokenizer

LOADER_KV = "64MiB"  # of the engine that only loads the weights
PLAIN: dict[str, Any] = {"nodes": None, "width": None, "fan_out": "auto", "saguaro_c": 1.0}  # what ar has no use for
LEAST_KV_TOKENS = 4096
WARM_UP = "Count slowly from one to ten, and then say what comes after ten."


def method_names(methods: str | None, engine: EngineConfig) -> list[str]:
    """Parse a comma-separated list of METHOD:K:M@CORES, with ar first; without a list, the default methods."""
    if engine.method != "auto":
        raise ConfigError(f"method is {engine.method!r}; several are compared here: give --methods {engine.method}")
    if methods is None:
        methods = "sd,ssd" if engine.draft_model is not None else "sd" if engine.has_suffix else "ngram"
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        # raises if the method is unknown or has no draft
        choose_method(replace(engine, **_own_settings(name)))
        cores_of(name)
    first = [name for name in names if method_of(name) == "ar"] or ["ar"]
    return list(dict.fromkeys([*first, *names]))


def config_for(which: ModelArgs, engine: EngineArgs) -> EngineConfig:
    """The checked config, with the default model's draft if applicable."""
    config = engine.config()
    return replace(config, draft=draft_for(which.model, config.draft))


@contextmanager
def load_candidates(
    settings: Mapping[str, Mapping[str, Any]],
    which: ModelArgs,
    engine: EngineArgs,
    params: SamplingParams,
    encode: Callable[[Tokenizer], list[list[int]]],
    n_together: int,
    n_warm: int = 16,
) -> Iterator[tuple[list[Candidate], list[list[int]]]]:
    """Build an entry per name, with these settings, ar first. Warm each up with n_warm tokens, and encode the prompts.
    The KV memory fits n_together of them."""
    config = config_for(which, engine)
    _check_sizes(config, params, n_together)
    is_sized_here = config.kv_memory == "auto"
    small: dict[str, Any] = {"kv_memory": LOADER_KV, "max_model_len": None} if is_sized_here else {}
    with ExitStack() as stack:
        base = stack.enter_context(commands.load(which, replace(engine, method="ar", **PLAIN, **small)))
        prompts = encode(base.engine.tokenizer)
        common = {**asdict(config), "learnt_dir": base.engine.config.learnt_dir}
        if is_sized_here:
            lookahead = max(own.get("lookahead", config.lookahead) for own in settings.values())
            longest = max(map(len, prompts)) + (params.max_tokens or 0) + lookahead + 2 * config.page_size
            common["kv_memory"] = _kv_memory(base, config, longest, n_together)
        entrants = []
        for name, own in settings.items():
            with placement(name):  # a draft process gets its cores now
                llm = stack.enter_context(base.sibling(**{**common, **own}))
            entrants.append(Candidate(name, llm, _is_comparable(llm, params)))
        for entrant in entrants:
            _warm_up(entrant, params, n_warm)
            entrant.watch()
        yield entrants, prompts


def settings_by_name(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The settings that the names say.

    >>> settings_by_name(["pearl@1", "ssd:2:16"])
    {'pearl@1': {'method': 'pearl'}, 'ssd:2:16': {'method': 'ssd', 'lookahead': 2, 'budget': 16}}
    """
    return {name: _own_settings(name) for name in names}


def _own_settings(name: str) -> dict[str, Any]:
    """`ar` runs beside other methods, whose settings it would refuse."""
    method = method_of(name)
    return {"method": method, **(PLAIN if method == "ar" else {}), **sizes_of(name)}


def encoder(texts: Sequence[str], chat: bool) -> Callable[[Tokenizer], list[list[int]]]:
    """Encode texts as prompts: as user messages if `chat` and the tokenizer has a template, else as plain text."""

    def encode(tokenizer: Tokenizer) -> list[list[int]]:
        if chat:
            try:
                return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
            except TokenizerMismatch:
                pass
        return [tokenizer.encode(text) for text in texts]

    return encode


def _is_comparable(llm: LLM, params: SamplingParams) -> bool:
    """False for rejection at a temperature above 0: other tokens, same distribution."""
    method = llm.engine.method
    return params.temperature == 0 or not method.drafts or method.verification == "shared"


def _kv_memory(base: LLM, config: EngineConfig, longest: int, n_together: int) -> str:
    """Bytes for twice n_together texts of this length, so that cached prefixes are not evicted at once."""
    n_tokens = max(2 * n_together * longest, LEAST_KV_TOKENS, config.max_model_len or 0)
    return str((n_tokens + config.page_size) * base.engine.kv.bytes_per_token)


def _check_sizes(config: EngineConfig, params: SamplingParams, n_together: int) -> None:
    if params.n != 1 or params.max_tokens is None:
        raise ConfigError(
            f"n is {params.n} and max_tokens {params.max_tokens}; one output of limited length is measured"
        )
    if n_together > config.max_batch_rows:
        limit = config.max_batch_rows
        raise ConfigError(f"batch is {n_together}; at most max_batch_rows, {limit}: raise --max-batch-rows")


def _warm_up(entrant: Candidate, params: SamplingParams, n_tokens: int) -> None:
    """Run once, to exclude one-time costs: lazy loading, the start of a draft, first use of memory."""
    assert entrant.llm is not None
    short = replace(params, max_tokens=min(n_tokens, params.max_tokens or n_tokens), min_tokens=0)
    with placement(entrant.name):
        entrant.llm.generate([entrant.llm.engine.tokenizer.encode(WARM_UP)], short)
