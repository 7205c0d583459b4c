"""Settings: frozen dataclasses, validated at construction and independent of the environment.

The command line's flags and the Python API's keywords are these fields; a field's docstring is its help text.
"""

import difflib
import functools
import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from saguaro.errors import ConfigError, short

T = TypeVar("T")

MAX_SEED = 2**63 - 1
SMALL_SEEDS = 2**53  # exact in every JSON reader

FALLBACKS = ("auto", "draft", "ngram", "random", "empty", "batch", "batch-random", "measured", "suffix")
SUFFIX = "suffix"  # the draft that repeats what followed earlier; it may be combined with a model
SERVICE = "tcp://"  # begins the name of a draft that a service serves
MOST_SERVICES = 16  # of one target
PREPARES = ("auto", "always")
VERIFICATIONS = ("auto", "shared", "rejection")
LINKS = ("auto", "inline", "process")

MAX_ROWS, MAX_STEP, MAX_PAGE, MAX_THREADS = 4096, 2**20, 1024, 1024  # upper limits; no machine profits from more

LEAST_STORE, MOST_STORE = 1024, 2**26  # tokens of earlier outputs; the largest store takes some GiB
MAX_RANKS = 64  # of a target

MAX_STRUCTURED = 2**17  # characters of a schema or grammar: compiles in seconds

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class Structured:
    """The constraint of an output, in exactly one form. It is compiled, and so validated, for a tokenizer."""

    json: Mapping[str, Any] | str | bool | None = None
    """A JSON schema, as a mapping or as text (kept as text), or True for any JSON object."""
    regex: str | None = None
    """A regular expression (Rust's syntax, no look-around) that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """One of these strings."""
    grammar: str | None = None
    """A context-free grammar: Lark (`start: ...`) or GBNF (`root ::= ...`)."""

    def __post_init__(self) -> None:
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            _check("structured.choice", self.choice, not isinstance(self.choice, str), "a list of strings")
            object.__setattr__(self, "choice", _all_of(str, "structured.choice", self.choice))
            are_texts = bool(self.choice) and all(text and _is_unicode(text) for text in self.choice)
            _check("structured.choice", self.choice, are_texts, "a list of non-empty strings")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                is_text = isinstance(value, str) and _is_unicode(value)
                _check(f"structured.{name}", value, is_text and value != "", "non-empty text")
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise ConfigError(f"structured has {' and '.join(given) or 'nothing'}; give exactly one of {names}")
        if len(self.text) > MAX_STRUCTURED:
            raise ConfigError(
                f"structured.{self.kind} has {len(self.text)} characters; at most {MAX_STRUCTURED}: simplify it"
            )

    @property
    def kind(self) -> str:
        """The kind of constraint: json, regex, choice or grammar."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def text(self) -> str:
        """The schema, expression or grammar; choices as a JSON list.

        >>> Structured(json={"type": "integer"}).text, Structured(choice=("yes", "no")).text
        ('{"type": "integer"}', '["yes", "no"]')
        """
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model."""

    model: str | None = None
    """A folder, a .gguf file or a Hub id; without it, SmolLM2-135M-Instruct."""
    tokenizer: str | None = None
    """A folder with another tokenizer than the model's."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    cache_dir: Path | None = None
    """Where the default model is kept."""
    chat_template: str | None = None
    """A jinja2 chat template, or the name of its file, in place of the model's."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. The names are those of vLLM and the OpenAI API."""

    max_tokens: int | None = 256
    """Most tokens to generate; None fills the context, and 0 with prompt_logprobs scores the prompt alone."""
    temperature: float = 1.0
    """0 is greedy; larger is more random."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that hold this much probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtract from the logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtract from the logits of tokens per time seen in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Add to the logits of these token ids."""
    seed: int | None = None
    """Fixes the noise; without one, or with -1, a seed is drawn and reported. Other negative numbers are taken modulo
    2^53."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the token that ends the output, in the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's own."""
    min_tokens: int = 0
    """No end of text before this many tokens."""
    ignore_eos: bool = False
    """Go on past the model's end of text."""
    logprobs: int | None = None
    """Report each token's log-probability and this many alternatives."""
    prompt_logprobs: int | None = None
    """Report the same of each token of the prompt; the first has none."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of the prompt, the last ones; -1 keeps what fits beside max_tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    allowed_token_ids: tuple[int, ...] = ()
    """Generate nothing but these tokens; empty allows all."""
    n: int = 1
    """How many outputs for one prompt."""
    speculation: bool = True
    """Whether tokens may be speculated for this request; the output is the same either way."""
    structured: Structured | None = None
    """What the output must look like; or a mapping with json, regex, choice or grammar. It ends when that is complete,
    whatever ignore_eos and min_tokens say."""
    prepare: bool = True
    """Whether outcomes may be prepared for this request; without, it is drafted just in time."""

    def __post_init__(self) -> None:
        if isinstance(self.structured, Mapping):
            object.__setattr__(self, "structured", build(Structured, **self.structured))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", _all_of(str, "stop", stop))
        object.__setattr__(self, "stop_token_ids", _all_of(int, "stop_token_ids", self.stop_token_ids or ()))
        object.__setattr__(self, "allowed_token_ids", _all_of(int, "allowed_token_ids", self.allowed_token_ids or ()))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias or {}))
        _check_types(self)
        _check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or self.max_tokens >= (1 if self.prompt_logprobs is None else 0),
            "at least 1, or None",
        )
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or more")
        _check("top_k", self.top_k, self.top_k >= -1, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1 (off)")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 (off) and 1")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0 < self.repetition_penalty < math.inf,
            "more than 0",
        )
        _check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "between -2 and 2")
        _check("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            _check(
                f"logit_bias[{token}]",
                bias,
                token >= 0 and -math.inf < bias < math.inf,
                "a token id and a number",
            )
        _check(
            "seed",
            self.seed,
            self.seed is None or -MAX_SEED <= self.seed <= MAX_SEED,
            "between -(2^63 - 1) and 2^63 - 1, or None",
        )
        if self.seed is not None and self.seed < 0:
            object.__setattr__(self, "seed", None if self.seed == -1 else self.seed % SMALL_SEEDS)
        _check("stop", self.stop, all(self.stop), "non-empty strings")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or more")
        if self.max_tokens is not None:
            _check(
                "min_tokens",
                self.min_tokens,
                self.min_tokens <= self.max_tokens,
                f"at most max_tokens, {self.max_tokens}",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 <= value <= 20, "between 0 and 20, or None")
        n_kept = self.truncate_prompt_tokens
        _check("truncate_prompt_tokens", n_kept, n_kept is None or n_kept == -1 or n_kept >= 1, "at least 1, or -1")
        if self.allowed_token_ids and self.structured is not None:
            raise ConfigError("allowed_token_ids and structured both say what may come; give one of them")
        _check("n", self.n, 1 <= self.n <= 64, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine is built."""

    draft: str | None = None
    """The draft: a folder or .gguf file with the target's vocabulary, an EAGLE-3 or DFlash draft of the target, a Hub
    id, or drop:I,J,... for the target without those layers; the default model has one of its own. suffix: what followed
    earlier in the text, without a model; suffix+DRAFT: the likelier of both, where suffix+default takes the default
    model's own. Or tcp://HOST:PORT, a draft that `saguaro draft` serves, perhaps on another machine; tcp://HOST:PORT/NAME:
    only if it serves the model of that name; several of them with commas share the requests."""
    suffix_store: int = 0
    """With a suffix draft: most tokens of earlier outputs that are kept for all requests to repeat; 0: a request
    repeats only its own text. The speed of a request then tells of the outputs of others."""
    draft_key_file: str | None = None
    """The file with the key of a draft service."""
    method: str = "auto"
    """The decoding method (see saguaro.method); auto: ssd with a draft model, sd with suffix alone, else ar."""
    lookahead: int = 4
    """Most tokens speculated per round and request (K), where the method speculates."""
    nodes: int | None = None
    """Most nodes of a tree verified per round and request (N), where the method speculates trees; the lookahead: a
    chain. None: as many as pay on the device."""
    width: int | None = None
    """Nodes of a tree that a draft step expands (R); 1 with as many nodes as the lookahead: chains. None: as nodes."""
    budget: int = 8
    """Outcomes prepared per request while the target verifies (M), where the method prepares; of a tree, the nodes that
    each step adds."""
    fan_out: str = "auto"
    """How many of these outcomes follow k accepted tokens, where the method prepares chains after each k: uniform,
    geometric (Theorem 12), general (Theorem 18), lookahead + 1 numbers such as 3,2,2,2,4, or auto: the method's own."""
    prepare: str = "auto"
    """When outcomes are prepared: always, or auto: as the method does; ssd where it measures that this pays."""
    fallback: str = "auto"
    """Who drafts when the outcome was not prepared: draft, ngram, suffix, random, empty; batch or batch-random (draft,
    or for a large batch ngram or random, by Theorem 17), measured; or auto: the method's own."""
    verification: str = "auto"
    """How speculated tokens are accepted: shared (noise), rejection, or auto: the method's own."""
    saguaro_c: float = 1.0
    """C of Saguaro sampling, under rejection: the weight of tokens that are prepared, from 0 to 1 (off)."""
    link: str = "auto"
    """Where the draft runs: inline (in the target's thread), process (of its own, on its own cores), or auto: where
    `saguaro tune` found it fastest on this machine; inline before that."""
    draft_device: str = "auto"
    """The draft's device; auto: the target's."""
    draft_threads: int | None = None
    """CPU threads, and cores, of a draft in a process of its own; None: as many as `saguaro tune` found fastest, or
    1."""
    draft_timeout: float = 2.0
    """Seconds to wait for a draft that does not answer before the target goes on without it."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    dtype: str = "auto"
    """Of the weights: float32 (or float), bfloat16, int8 (on a CPU), fp8 (on a GPU), or auto: the fastest, int8 on a
    CPU with a C compiler, else float32; bfloat16 on a GPU."""
    quantization: str = "none"
    """Of matrices, on a GPU: fp8 (another name for the dtype fp8: e4m3, a scale per output and 128 inputs), or none: as
    dtype says."""
    kv_memory: str = "auto"
    """Memory for the target's keys and values, such as 512MiB; auto: on a CPU two full contexts, at most a quarter of
    the memory; on a GPU 90% of what is left beside weights and workspace, shared with the draft's."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that the engine may take in all: weights, keys and values, workspace; in place of
    kv_memory, and what others hold of it counts. None: as kv_memory says."""
    max_model_len: int | None = None
    """Longest text, prompt and output together; None (or, as in vLLM, -1 or "auto"): what the model and the KV memory
    allow."""
    max_batch_rows: int = 32
    """Most requests decoded together."""
    max_batch_tokens: int = 512
    """Most tokens computed in one step; longer prompts are computed in chunks."""
    max_inter_token_ms: float | None = None
    """Milliseconds that a round may take while prompts are read beside rows that decode: prompts get what fits, but at
    least a page; None: 200 on a CPU, 50 on a GPU, or two rounds without prompts if that is longer."""
    page_size: int = 16
    """Tokens per page of KV memory."""
    prefix_caching: bool = True
    """Reuse the keys and values of text computed before."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    learnt_dir: str = "auto"
    """The folder in which measured times and acceptance are kept, so that a second start is fast from its first round;
    none: they are not kept; auto: $SAGUARO_LEARNT, or `learnt` beside downloaded models."""
    tensor_parallel_size: int = 1
    """Processes that share the target, each with a GPU of its own, or with its share of the CPU cores; 1: this process
    alone."""

    def __post_init__(self) -> None:
        if _is_automatic(self.max_model_len):
            object.__setattr__(self, "max_model_len", None)
        if self.dtype == "float":
            object.__setattr__(self, "dtype", "float32")
        _check_types(self)
        object.__setattr__(self, "dtype", _quantised(self.quantization, self.dtype))
        choices = {"prepare": PREPARES, "fallback": FALLBACKS, "verification": VERIFICATIONS, "link": LINKS}
        for name, known in choices.items():
            value = getattr(self, name)
            _check(name, value, value in known, f"one of {', '.join(known)}")
        for name in ("device", "draft_device"):
            device = re.fullmatch(r"auto|cpu|cuda(:\d+)?", getattr(self, name))
            _check(name, getattr(self, name), device is not None, "auto, cpu, cuda or cuda:N")
        if self.kv_memory != "auto":
            parse_bytes(self.kv_memory, "kv_memory")
        _check(
            "max_model_len",
            self.max_model_len,
            self.max_model_len is None or 2 <= self.max_model_len < 2**31,
            "between 2 and 2^31 - 1, or None",
        )
        self._check_suffix()
        self._check_service()
        _check("lookahead", self.lookahead, 1 <= self.lookahead <= 64, "between 1 and 64")
        nodes = self.nodes
        is_tree = nodes is None or self.lookahead <= nodes <= 64
        _check("nodes", nodes, is_tree, f"between the lookahead, {self.lookahead}, and 64, or None")
        _check("width", self.width, self.width is None or 1 <= self.width <= 64, "between 1 and 64, or None")
        _check("budget", self.budget, 1 <= self.budget <= 256, "between 1 and 256")
        _check("saguaro_c", self.saguaro_c, 0 <= self.saguaro_c <= 1, "between 0 and 1 (off)")
        self._check_fan_out()
        for name in ("threads", "draft_threads"):
            n = getattr(self, name)
            _check(name, n, n is None or 1 <= n <= MAX_THREADS, f"{_from_1_to(MAX_THREADS)}, or None")
        _check("draft_timeout", self.draft_timeout, 0 < self.draft_timeout <= 3600, "more than 0 and at most 3600")
        _check("max_batch_rows", self.max_batch_rows, 1 <= self.max_batch_rows <= MAX_ROWS, _from_1_to(MAX_ROWS))
        _check(
            "max_batch_tokens",
            self.max_batch_tokens,
            self.max_batch_rows <= self.max_batch_tokens <= MAX_STEP,
            f"between max_batch_rows, {self.max_batch_rows}, and {MAX_STEP}",
        )
        wait = self.max_inter_token_ms
        _check("max_inter_token_ms", wait, wait is None or 0 < wait < math.inf, "more than 0, or None")
        _check("page_size", self.page_size, 1 <= self.page_size <= MAX_PAGE, _from_1_to(MAX_PAGE))
        self._check_gpus()

    @property
    def has_suffix(self) -> bool:
        """Whether the draft repeats what followed earlier, alone or beside a model.

        >>> EngineConfig(draft="suffix").has_suffix, EngineConfig(draft="drop:3").has_suffix
        (True, False)
        """
        return self.draft == SUFFIX or (self.draft is not None and self.draft.startswith(f"{SUFFIX}+"))

    @property
    def draft_model(self) -> str | None:
        """The draft model, if there is one.

        >>> EngineConfig(draft="suffix+drop:3").draft_model, EngineConfig(draft="suffix").draft_model
        ('drop:3', None)
        """
        if self.draft is None or not self.has_suffix:
            return self.draft
        return self.draft.partition("+")[2] or None

    @property
    def is_served(self) -> bool:
        """Whether the draft model is that of a service.

        >>> EngineConfig(draft="suffix+tcp://box:7117").is_served, EngineConfig(draft="drop:3").is_served
        (True, False)
        """
        return self.draft_model is not None and self.draft_model.startswith(SERVICE)

    @property
    def services(self) -> tuple[str, ...]:
        """The draft services.

        >>> EngineConfig(draft="tcp://a:1,tcp://b:2").services, EngineConfig(draft="drop:3").services
        (('tcp://a:1', 'tcp://b:2'), ())
        """
        return tuple((self.draft_model or "").split(",")) if self.is_served else ()

    def _check_suffix(self) -> None:
        if self.draft is not None and self.has_suffix and self.draft != SUFFIX:
            name = self.draft_model
            is_model = name is not None and name != SUFFIX and not name.startswith(f"{SUFFIX}+")
            _check(
                "draft", self.draft, is_model, f"{SUFFIX}, or {SUFFIX}+ and one draft model, such as {SUFFIX}+drop:3"
            )
        _check(
            "suffix_store",
            self.suffix_store,
            self.suffix_store == 0 or LEAST_STORE <= self.suffix_store <= MOST_STORE,
            f"0 (none), or between {LEAST_STORE} and {MOST_STORE} tokens",
        )
        if self.suffix_store and not (self.has_suffix or self.fallback == SUFFIX):
            raise ConfigError(
                f"suffix_store is {self.suffix_store}, and the draft is {self.draft!r}, which repeats nothing; leave "
                f"suffix_store out, or use draft {SUFFIX} or {SUFFIX}+DRAFT"
            )

    def _check_service(self) -> None:
        """What a draft service decides itself is not set here."""
        if not self.is_served:
            if self.draft_key_file is not None:
                raise ConfigError(
                    f"draft_key_file is {self.draft_key_file!r}, and the draft is {self.draft!r}, which asks for no "
                    f"key; leave it out, or use a draft service: {SERVICE}HOST:PORT"
                )
            return
        are_all = len(self.services) <= MOST_SERVICES and all(each.startswith(SERVICE) for each in self.services)
        _check("draft", self.draft, are_all, f"at most {MOST_SERVICES} of {SERVICE}HOST:PORT, with commas")
        usual = {"link": "auto", "draft_device": "auto", "draft_threads": None}
        for name, value in usual.items():
            given = getattr(self, name)
            if given != value:
                raise ConfigError(
                    f"{name} is {given!r}, and the draft is {self.draft!r}, which runs where it is served; leave "
                    f"{name} out, and set device and threads with `saguaro draft`"
                )

    def _check_fan_out(self) -> None:
        numbers = self.fan_outs
        is_list = len(numbers) == self.lookahead + 1 and 1 <= sum(numbers) <= 256
        is_known = self.fan_out in ("auto", "uniform", "geometric", "general")
        wanted = f"auto, uniform, geometric, general, or {self.lookahead + 1} numbers (lookahead + 1) with commas"
        _check("fan_out", self.fan_out, is_known or is_list, f"{wanted}, whose sum is at most 256")

    @property
    def fan_outs(self) -> tuple[int, ...]:
        """The numbers of fan_out, if it is a list.

        >>> EngineConfig(lookahead=2, fan_out="3,2,4").fan_outs, EngineConfig().fan_outs
        ((3, 2, 4), ())
        """
        is_list = re.fullmatch(r"\d{1,3}(,\d{1,3})*", self.fan_out) is not None
        return tuple(int(part) for part in self.fan_out.split(",")) if is_list else ()

    def _check_gpus(self) -> None:
        share = self.gpu_memory_utilization
        _check("gpu_memory_utilization", share, share is None or 0 < share <= 1, "more than 0 and at most 1, or None")
        if share is not None and self.kv_memory != "auto":
            raise ConfigError(
                f"gpu_memory_utilization is {share} and kv_memory {self.kv_memory!r}; both say how much memory there "
                "is for keys and values: give one of them"
            )
        n_ranks = self.tensor_parallel_size
        _check("tensor_parallel_size", n_ranks, 1 <= n_ranks <= MAX_RANKS, _from_1_to(MAX_RANKS))


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """How the draft side is built, in any process. All fields are plain values."""

    draft: str | None
    """Path of a model, drop:I,J,... or None without a draft model."""
    suffix: bool = False
    """Whether what followed earlier in the text is drafted beside the model."""
    suffix_store: int = 0
    """Most tokens of earlier outputs that are kept to be repeated."""
    target: str
    """Path of the target."""
    tokenizer: str
    """Path of its tokenizer."""
    growth: str
    """What is prepared (saguaro.method)."""
    fan_out: tuple[int, ...] = ()
    """F_0 .. F_K, if it is a list."""
    fallback: str
    """What drafts on a miss (saguaro.methods)."""
    verification: str
    """shared or rejection."""
    prepare: str = "always"
    """When outcomes are prepared: always, measured or never (saguaro.methods)."""
    lookahead: int
    """K."""
    nodes: int = 0
    """N; 0: the lookahead."""
    width: int = 1
    """R."""
    budget: int
    """M."""
    saguaro_c: float = 1.0
    """C of Saguaro sampling."""
    cut: float = 0.0
    """A speculation ends before the first token less likely than this; 0: never."""
    generation: int = 0
    """Number of drafts started before this one; it keeps their noise apart."""
    n_vocab: int
    """Number of tokens that the target can emit."""
    n_text: int
    """Number of tokens that a text may contain: those, and the padding of the target's head."""
    ends: tuple[int, ...] = ()
    """The target's end-of-text tokens."""
    max_rows: int
    """Maximum number of rows."""
    read_s: float = math.inf
    """Seconds per round for reading texts while rows decode."""
    n_tokens: int
    """Capacity of the draft's KV memory, in tokens."""
    n_features: int = 0
    """Numbers per token that the target's features have; 0: the draft reads none."""
    n_step: int = 0
    """Most tokens of a step of the target, whose features come together."""
    page_size: int
    """Tokens per page."""
    device: str = "cpu"
    """Device of the draft model."""
    dtype: str = "float32"
    """Of the draft's weights; the same as the target's."""
    learnt: str = ""
    """The file of what was learnt before; empty: nothing is kept."""
    learnt_facts: str = "{}"
    """What it depends on, as JSON."""

    @property
    def most_nodes(self) -> int:
        """Most nodes of a speculation."""
        return max(self.nodes, self.lookahead)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", _all_of(int, "ends", self.ends))
        object.__setattr__(self, "fan_out", _all_of(int, "fan_out", self.fan_out))
        _check_types(self)


def build(kind: type[T], **values: Any) -> T:
    """Make a config from keywords. The error for an unknown key names the nearest known one.

    >>> build(SamplingParams, temprature=1.0)
    Traceback (most recent call last):
    saguaro.errors.ConfigError: unknown key 'temprature'; did you mean 'temperature'?
    """
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key[:100], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {short(key)}; {hint}")
    return kind(**values)


def parse_bytes(text: str, name: str = "size") -> int:
    """Parse a size in bytes.

    >>> parse_bytes("512MiB"), parse_bytes("2GB"), parse_bytes("1.5 k")
    (536870912, 2000000000, 1500)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{name} is {text!r}; write a size such as 512MiB, 2GiB or 800MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_bytes(n: int) -> str:
    """Format a size for display.

    >>> format_bytes(536870912), format_bytes(1300)
    ('512.0 MiB', '1.3 KiB')
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _all_of(kind: type, name: str, values: Any) -> tuple[Any, ...]:
    """Check the type of each value and return a tuple."""
    for value in values if isinstance(values, list | tuple) else [values]:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{name} holds {short(value)}; it must be a list of {kind.__name__}")
    return tuple(values)


def _schema(value: Any) -> str:
    """A JSON schema as text; True is any object. Key order is kept, because it is the order of the output."""
    if value is True:
        return '{"type": "object"}'
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, TypeError, RecursionError) as e:
        raise ConfigError(f"structured.json is {short(value)}, which is not JSON ({e}); give a JSON schema") from e
    _check("structured.json", value, is_object and _is_unicode(text), "a JSON schema that is an object, or True")
    return text


def _is_unicode(text: str) -> bool:
    """Whether this can be encoded in UTF-8. JSON allows half a surrogate pair, UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bias(values: Any) -> dict[int, float]:
    """Token ids and numbers; JSON has the ids as strings."""
    try:
        return {int(token): float(bias) for token, bias in values.items()}
    except (AttributeError, TypeError, ValueError) as e:
        raise ConfigError(f"logit_bias is {short(values)}; it must map token ids to numbers") from e


def _check(name: str, value: object, ok: bool, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {short(value)}; it must be {limit}")


def _from_1_to(most: int) -> str:
    return f"between 1 and {most}"


def _quantised(quantization: str, dtype: str) -> str:
    """The dtype of weights that are quantised while they are loaded.

    >>> _quantised("fp8", "auto"), _quantised("none", "auto")
    ('fp8', 'auto')
    """
    known = "fp8 or none; how a checkpoint is quantised is read from its files"
    _check("quantization", quantization, quantization in ("fp8", "none"), known)
    if quantization == "none":
        return dtype
    fits = dtype in ("auto", "fp8", "bfloat16")
    _check("dtype", dtype, fits, "auto or bfloat16 with quantization fp8, in which products are computed")
    return quantization


def _is_automatic(value: object) -> bool:
    """Whether this is one of vLLM's values for an automatic length."""
    return value == "auto" or (value == -1 and not isinstance(value, bool))


def _check_types(config: object) -> None:
    """Check scalar fields against their annotations; an int is accepted as a float."""
    for name, kinds in _scalars(type(config)):  # type: ignore[arg-type]  # mypy asks the instances for __hash__
        allowed = (*kinds, int) if float in kinds else kinds
        value = getattr(config, name)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} is {short(value)}; it must be of type {wanted}")


@functools.cache
def _scalars(config: type) -> list[tuple[str, tuple[type, ...]]]:
    """The scalar fields and their types. Containers are converted, not checked."""
    found = []
    for name, hint in get_type_hints(config).items():
        kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if all(isinstance(kind, type) for kind in kinds):
            found.append((name, kinds))
    return found
