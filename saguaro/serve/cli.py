"""The command line: `saguaro generate`, `chat`, `serve`, `compare`, `bench`, `info`, `distill`.

Flags are the fields of EngineConfig, SamplingParams and Recipe. Results go to standard output, everything else to
standard error; the exit status is 0, or 1 when some prompt failed or outputs differ that must not, or 2 when nothing
could be done.
"""

import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from saguaro.config import EngineConfig, SamplingParams, Structured
from saguaro.distill.recipe import Recipe
from saguaro.errors import ConfigError, SaguaroError
from saguaro.method import METHODS
from saguaro.serve.http.limits import Limits
from saguaro.serve.tools.parsers import Parsers

if TYPE_CHECKING:
    from saguaro.serve.llm import LLM

STARTED = time.perf_counter()
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # standard output cannot be written

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
Repeatable = Annotated[T, tyro.conf.UseAppendAction]
Color = Literal["auto", "always", "never"]


def _method_help() -> str:
    """What --method says, from the table."""
    known = ", ".join(f"{method.name} ({method.summary})" for method in METHODS.values())
    return f"The decoding method: {known}; or auto: ssd if there is a draft, else ar."


LENGTH = PrimitiveConstructorSpec[int | None](
    nargs=1,
    metavar="INT|auto",
    instance_from_str=lambda words: None if words[0] in ("auto", "None") else int(words[0]),
    is_instance=lambda value: value is None or isinstance(value, int),
    str_from_instance=lambda value: ["auto" if value is None else str(value)],
)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
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
class EngineArgs(EngineConfig):
    """How the engine is built."""

    method: Annotated[str, tyro.conf.arg(help=_method_help())] = EngineConfig.method
    max_model_len: Annotated[int | None, LENGTH] = None
    """Longest text, prompt and output together; auto or -1: what the model and the KV memory allow."""

    def __post_init__(self) -> None:
        """Checked when the config is made, so that errors read the same everywhere."""

    def config(self) -> EngineConfig:
        """The checked config."""
        return EngineConfig(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class SamplingArgs(SamplingParams):
    """How text is decoded."""

    structured: Annotated[Structured | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    stop: Repeatable[tuple[str, ...]] = ()
    """A string that ends the output; not part of it. One value per flag, which may be repeated."""
    stop_token_ids: Repeatable[tuple[int, ...]] = ()
    """A token id that ends the output, beside the model's own. One value per flag, which may be repeated."""
    prepare: tyro.conf.Suppress[bool] = True  # for requests that differ; here --prepare says it for the whole engine

    def __post_init__(self) -> None:
        """Checked when the parameters are made, so that errors read the same everywhere."""

    def params(self) -> SamplingParams:
        """The checked parameters."""
        return SamplingParams(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class StructuredArgs:
    """What the output must look like; at most one."""

    json_schema: Path | None = None
    """A file with a JSON schema."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Repeatable[tuple[str, ...]] = ()
    """A string that the output may be. One value per flag, which is repeated for the others."""
    grammar: Path | None = None
    """A file with a grammar, Lark or GBNF."""

    def structured(self) -> Structured | None:
        """The checked wish, files read."""
        schema, grammar = (_read(path) for path in (self.json_schema, self.grammar))
        if schema is None and grammar is None and self.regex is None and not self.choice:
            return None
        return Structured(json=schema, regex=self.regex, choice=self.choice or None, grammar=grammar)


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts and print what comes."""

    prompt: str | None = None
    """The text to continue."""
    prompts: Path | None = None
    """A file of prompts: JSONL with `prompt` (and `id`), or plain text, one per line."""
    chat: bool = False
    """Treat each prompt as a user's message, through the model's chat template."""
    json: bool = False
    """Print one JSON object per output."""
    metrics: bool = False
    """Report speed, what the rounds amount to and where start-up time went, on standard error."""
    color: Color = "auto"
    """Colour tokens by origin when one output is streamed: prepared in time, drafted just in time, the target's own;
    auto: on a terminal."""
    record: Path | None = None
    """Write one JSON object per round to this file."""
    trace: Path | None = None
    """Write when target and draft worked to this file, for chrome://tracing or ui.perfetto.dev."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(default_factory=SamplingArgs)
    shape: Flat[StructuredArgs] = field(default_factory=StructuredArgs)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with the model. Ctrl-C stops an answer, Ctrl-D or /quit leaves, /help lists commands."""

    system: str | None = None
    """The system message."""
    metrics: bool = False
    """Report speed after each answer, and what all rounds amount to at the end."""
    color: Color = "auto"
    """Colour tokens by origin: prepared in time, drafted just in time, the target's own; auto: on a terminal."""
    record: Path | None = None
    """Write one JSON object per round to this file."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(
        default_factory=lambda: SamplingArgs(temperature=0.6, top_p=0.95, max_tokens=None)
    )


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Show one prompt decoded by several methods, tokens coloured by origin, and check that the output is the same."""

    prompt: str | None = None
    """The text to continue, or the user's message."""
    methods: str | None = None
    """Comma-separated; ar always runs. Without it: sd,ssd if there is a draft, else ngram."""
    chat: bool = True
    """Through the model's chat template, where it has one."""
    color: Color = "auto"
    """Colour tokens by origin; auto: on a terminal."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(default_factory=lambda: SamplingArgs(temperature=0.0, max_tokens=128, seed=0))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure several methods on the same prompts, side by side; ar always runs and is what they must equal."""

    methods: str | None = None
    """Comma-separated, each perhaps with its lookahead, its budget and the cores it may use, such as
    ar@1,sd:3@2,ssd:2:16. Without it: sd,ssd if there is a draft, else ngram."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files of prompts, as for generate; of several, prompts are taken in turn. Without any, 20 of our own."""
    num_prompts: int = 20
    """Most prompts to take."""
    batch: int = 1
    """Prompts decoded together."""
    chat: bool = True
    """Through the model's chat template, where it has one."""
    json: Path | None = None
    """Write results and circumstances to this file."""
    peer: Repeatable[tuple[str, ...]] = ()
    """Measure this one too: transformers, on the same weights in the dtype we compute in (a batch is padded on the
    left), or llama.cpp, on the same .gguf file, by llama-cpp-python; perhaps with @ and cores."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(default_factory=lambda: SamplingArgs(temperature=0.0, max_tokens=128, seed=0))


@dataclass(frozen=True, kw_only=True)
class Info:
    """Load a model and say what it is and what it takes."""

    json: bool = False
    """Print one JSON object."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)


class RecipeArgs(Recipe):
    """How the draft is trained."""

    def __post_init__(self) -> None:
        """Checked when the recipe is made, so that errors read the same everywhere."""

    def recipe(self) -> Recipe:
        """The checked recipe."""
        return Recipe(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Make a small draft for a target from what the target itself says. The same command again goes on where it
    was interrupted."""

    out: Path
    """Folder for the draft."""
    target: str | None = None
    """A folder, a .gguf file or a Hub id; without it, SmolLM2-135M-Instruct."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    cache_dir: Path | None = None
    """Where the default model is kept."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files of prompts, as for generate; without any, our own."""
    questions: int = 0
    """Prompts that the target is to write itself, beside those."""
    texts: int = 2048
    """Texts the target is to write; prompts are used again where there are fewer."""
    max_tokens: int = 192
    """Most tokens of a text."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Temperatures the texts are sampled at, in turn."""
    chat: bool = True
    """Treat each prompt as a user's message, through the target's chat template."""
    start: str | None = None
    """A draft of this target to go on from, with its layers: a folder, or `default` for the one of the default
    model."""
    layers: int | None = None
    """Layers of the draft: the target's first, last and some between, to begin with; 3 if not given."""
    head: int | None = None
    """Tokens the draft can say: those the target says most often; if not given, 8192 or those of the draft it starts
    from."""
    stored: Literal["half", "int8"] = "half"
    """How its weights are stored: in half precision, or as int8 rows, half as large."""
    evaluate: int = 16
    """Prompts held out, on which the draft is evaluated."""
    lookahead: int = 4
    """Tokens speculated per round when it is evaluated."""
    device: str = "auto"
    """Where target and draft compute."""
    threads: int | None = None
    """CPU threads."""
    batch_rows: int = 16
    """Texts written at a time."""
    recipe: Flat[RecipeArgs] = field(default_factory=RecipeArgs)


@dataclass(frozen=True, kw_only=True)
class ServedEngineArgs(EngineArgs):
    """How the engine is built; some flags have vLLM's names too."""

    max_batch_rows: Annotated[int, tyro.conf.arg(aliases=["--max-num-seqs"])] = EngineConfig.max_batch_rows
    """Most requests decoded together."""
    max_batch_tokens: Annotated[int, tyro.conf.arg(aliases=["--max-num-batched-tokens"])] = (
        EngineConfig.max_batch_tokens
    )
    """Most tokens computed in one step; longer prompts are computed in chunks."""
    page_size: Annotated[int, tyro.conf.arg(aliases=["--block-size"])] = EngineConfig.page_size
    """Tokens per page of KV memory."""


class LimitArgs(Limits):
    """What a request may be, and how long it may take."""

    def __post_init__(self) -> None:
        """Checked when the limits are made, so that errors read the same everywhere."""

    def limits(self) -> Limits:
        """The checked limits."""
        return Limits(**asdict(self))


class ParserArgs(Parsers):
    """How the model's output is read."""

    def __post_init__(self) -> None:
        """Checked when the parsers are made, so that errors read the same everywhere."""

    def parsers(self) -> Parsers:
        """The checked parsers."""
        return Parsers(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve the model over HTTP, as the OpenAI API has it."""

    place: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """The model, as --model names it."""
    named: Flat[ModelArgs] = field(default_factory=ModelArgs)
    generation_config: str = "auto"
    """Where temperature, top_p, top_k, min_p and repetition_penalty of requests that do not say come from: auto, the
    model's generation_config.json; vllm, our own defaults; or the folder of such a file."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one there is."""
    port: int = 8000
    """Port to listen on; 0: any that is free."""
    api_key: Repeatable[tuple[str, ...]] = ()
    """A key that clients must know, or one of several; without any, that of SAGUARO_API_KEY; without that, everybody is
    served. One value per flag, which may be repeated."""
    served_model_name: Repeatable[tuple[str, ...]] = ()
    """A name that clients may call the model by; the first is the one in responses. Without any, the model's own. One
    value per flag, which may be repeated."""
    allowed_origins: Repeatable[tuple[str, ...]] = ()
    """A web origin whose pages may ask; * is any. Without one, only the server's own. One value per flag, which may be
    repeated."""
    allowed_hosts: Repeatable[tuple[str, ...]] = ()
    """Names that the server is reached by, beside IP addresses and names that only a local network knows; *.NAME is
    all below it, * is any. One value per flag."""
    forwarded_allow_ips: str | None = None
    """Addresses of proxies, comma-separated, whose X-Forwarded-For names the client in the log; * is any."""
    access_log: bool = True
    """Log every request."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """What is logged."""
    ssl_certfile: Path | None = None
    """A certificate (PEM), with which the server speaks HTTPS."""
    ssl_keyfile: Path | None = None
    """Its private key (PEM), where the certificate's file does not hold it."""
    parsers: Flat[ParserArgs] = field(default_factory=ParserArgs)
    limits: Flat[LimitArgs] = field(default_factory=LimitArgs)
    engine: Flat[ServedEngineArgs] = field(default_factory=ServedEngineArgs)

    @property
    def which(self) -> ModelArgs:
        """The model, named by its place or by --model."""
        if self.place is None:
            return self.named
        if self.named.model not in (None, self.place):
            raise ConfigError(f"the model is {self.place!r} and --model {self.named.model!r}; give one of them")
        return replace(self.named, model=self.place)


AnyCommand = Generate | Chat | Serve | Compare | Bench | Info | Distill
Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Distill, tyro.conf.subcommand("distill")]
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `saguaro` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe may want an encoding that cannot write every character
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        try:
            status = run(parse(sys.argv[1:] if argv is None else argv))
        except SystemExit as e:  # --help has been printed, or a mistake in the flags explained
            status = e.code if isinstance(e.code, int) else 0
        sys.stdout.flush()
    except SaguaroError as e:
        status = 2
        _explain(str(e))
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader went away, as `| head` does
        status = 1
        _drop_output()
    except OSError as e:
        if e.errno not in FULL:
            raise
        status = 1
        _drop_output()
        _explain(f"the output cannot be written ({e.strerror}); make room, or send it elsewhere")
    sys.exit(status)


def _explain(message: str) -> None:
    with contextlib.suppress(OSError):  # standard error may be full too
        print(f"saguaro: {message}", file=sys.stderr)


def _drop_output() -> None:
    """Let what is left in the buffer go nowhere: the interpreter would try again when it ends, and complain."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def parse(argv: Sequence[str]) -> AnyCommand:
    """The command of an argument list."""
    if list(argv) in (["--version"], ["-V"]):
        from saguaro import __version__

        print(__version__)
        sys.exit(0)
    return tyro.cli(
        Command,
        prog="saguaro",
        description="Exact, low-latency LLM inference by speculative speculative decoding.",
        args=list(argv),
    )


def run(command: AnyCommand) -> int:
    """Carry out a command; its exit status. Only its own module is imported."""
    match command:
        case Generate():
            from saguaro.serve.generate import generate

            status = generate(command)
        case Chat():
            from saguaro.serve.chat import chat

            status = chat(command)
        case Serve():
            from saguaro.serve.serving import serve

            status = serve(command)
        case Compare():
            from saguaro.serve.compare import compare

            status = compare(command)
        case Bench():
            from saguaro.serve.bench import bench

            status = bench(command)
        case Info():
            from saguaro.serve.info import info

            status = info(command)
        case Distill():
            from saguaro.serve.distill import distill

            status = distill(command)
    return status


def load(which: ModelArgs, engine: EngineArgs, *, is_logged: bool = False, **more: Any) -> "LLM":
    """The LLM of these arguments; what takes long is shown on a terminal, and in the log where there is one."""
    settings = asdict(engine.config())
    from saguaro.serve.llm import LLM
    from saguaro.serve.progress import progress_bar

    with progress_bar(is_logged=is_logged) as progress:
        return LLM(**asdict(which), **settings, **more, progress=progress)
