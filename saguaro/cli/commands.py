"""The commands of `saguaro`, such as `generate`, `serve` and `tune`, with their flags."""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from saguaro.cli.args import (
    Color,
    EngineArgs,
    Flat,
    LimitArgs,
    ModelArgs,
    ParserArgs,
    RayArgs,
    RecipeArgs,
    Repeatable,
    SamplingArgs,
    ServedEngineArgs,
    StructuredArgs,
)
from saguaro.errors import ConfigError
from saguaro.method import find_method

if TYPE_CHECKING:
    from saguaro.llm import LLM

STARTED = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts and print what comes."""

    prompt: str | None = None
    """The text to continue."""
    prompts: Path | None = None
    """A file of prompts: JSONL with `prompt` (and `id`), or plain text, one per line. Or a public set, fetched on first
    use: humaneval, gsm8k, alpaca, ultrafeedback, mt-bench or spec-bench."""
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

    url: str | None = None
    """Talk with a server that has the OpenAI API instead, such as http://127.0.0.1:8000/v1; --model is its model's
    name, else the first that it lists."""
    key_env: str | None = None
    """The variable of the environment that holds the server's API key."""
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
    ar@1,sd:3@2,ssd:2:16. Without it: sd,ssd if there is a draft, else ngram. With peers by URL, none: only those."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files or public sets of prompts, as for generate; of several, prompts are taken in turn. Without any, 20 of our
    own."""
    num_prompts: int = 20
    """Most prompts to take."""
    batch: int = 1
    """Prompts decoded together."""
    concurrency: tuple[int, ...] = ()
    """Measure over HTTP, with this many requests at a time, such as 1 4 16; each method is served by a saguaro serve
    of its own."""
    chat: bool = True
    """Through the model's chat template, where it has one."""
    json: Path | None = None
    """Write results and circumstances to this file."""
    peer: Repeatable[tuple[str, ...]] = ()
    """Measure this one too: transformers, on the same weights in the dtype we compute in (a batch is padded on the
    left), or llama.cpp, on the same .gguf file, by llama-cpp-python; perhaps with @ and cores. Or a server with the
    OpenAI API, and ours over HTTP too: openai=http://HOST:PORT/v1, perhaps with ,model=NAME ,key-env=VARIABLE
    ,name=LABEL ,timeout=SECONDS behind it. One value per flag, which may be repeated."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(default_factory=lambda: SamplingArgs(temperature=0.0, max_tokens=128, seed=0))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Redo the paper's experiments on this machine, and write one HTML page. The same command again goes on where it
    was interrupted."""

    out: Path = Path("report")
    """Folder for the page (report.html), the figures as JSON (report.json), and what is finished."""
    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small: about ten minutes on two quiet cores. This is what runs without a flag."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """More prompts, longer outputs, larger batches: hours on two cores."""
    gpu: tyro.conf.FlagCreatePairsOff[bool] = False
    """Grown pairs, with the costs of 32B, 8B and 0.6B models, on one GPU."""
    only: str | None = None
    """Comma-separated experiments, such as fig5,fig3; without it, all."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """List the experiments, and measure nothing."""
    page_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure nothing; write the page from what is finished."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files or public sets of prompts, as for generate, each a set of its own; built-in: ours. Without any, two small
    built-in sets."""
    pair: Repeatable[tuple[str, ...]] = ()
    """Another pair for the tables, TARGET=DRAFT, as --model and --draft name them; default: the default model or its
    draft. One value per flag, which may be repeated."""
    chat: bool = True
    """Through the model's chat template, where it has one."""
    draft: str | None = None
    """The draft, as for generate; without it, that of the default model."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    dtype: str = "auto"
    """Of the weights, as for generate."""
    threads: int | None = None
    """CPU threads."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Measure what the engine would otherwise learn while it serves: where the draft runs best on this machine, and
    what verifying and drafting take. The next start with the same model and settings begins with it."""

    place: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """The model, as --model names it."""
    named: Flat[ModelArgs] = field(default_factory=ModelArgs)
    batches: tuple[int, ...] = ()
    """Batch sizes; without any, 1, 2, 4 ... up to --max-batch-rows."""
    seconds: float = 6.0
    """Time for each batch size and each place where the draft may run; large batches may take longer."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files or public sets of prompts, as for generate; without any, 20 of our own."""
    chat: bool = True
    """Through the model's chat template, where it has one."""
    json: bool = False
    """Print one JSON object."""
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)
    sampling: Flat[SamplingArgs] = field(default_factory=lambda: SamplingArgs(temperature=0.7, max_tokens=64, seed=0))

    @property
    def which(self) -> ModelArgs:
        """The model, given as an argument or by --model."""
        return _named(self.place, self.named)


@dataclass(frozen=True, kw_only=True)
class Info:
    """Load a model and say what it is and what it takes."""

    json: bool = False
    """Print one JSON object."""
    which: Flat[ModelArgs] = field(default_factory=ModelArgs)
    engine: Flat[EngineArgs] = field(default_factory=EngineArgs)


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Make a draft for a target from what the target itself says. The same command again goes on where it was
    interrupted."""

    out: Path
    """Folder for the draft."""
    kind: Literal["model", "eagle3"] = "model"
    """What is trained: a small language model, or an EAGLE-3 head, which reads the target's hidden states."""
    target: str | None = None
    """A folder, a .gguf file or a Hub id; without it, SmolLM2-135M-Instruct."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    cache_dir: Path | None = None
    """Where the default model is kept."""
    prompts: Repeatable[tuple[tuple[Path, ...], ...]] = ()
    """Files or public sets of prompts, as for generate; without any, our own."""
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
    """A draft of this kind and target to go on from, with its layers: a folder, or of kind model `default` for the
    one of the default model."""
    layers: int | None = None
    """Of kind model: layers of the draft, the target's first, last and some between, to begin with; 3 if not given."""
    head: int | None = None
    """Tokens the draft can say: those the target says most often; if not given, 8192 (eagle3: 32000) or those of the
    draft it starts from."""
    feature_layers: tuple[int, ...] | None = None
    """Of kind eagle3: layers of the target whose input the head reads; if not given, 2, L // 2 and L - 3 of L."""
    stored: Literal["half", "int8"] = "half"
    """How its weights are stored: in half precision, or of kind model as int8 rows, half as large."""
    evaluate: int = 16
    """Prompts held out, on which the draft is evaluated; 0: it is not evaluated."""
    lookahead: int = 4
    """Tokens speculated per round when it is evaluated."""
    device: str = "auto"
    """Where target and draft compute."""
    threads: int | None = None
    """CPU threads."""
    batch_rows: int = 16
    """Texts written at a time."""
    recipe: Flat[RecipeArgs] = field(default_factory=RecipeArgs)

    def check(self) -> None:
        """Refuse settings of another kind of draft."""
        foreign: dict[str, Any] = {"layers": self.layers, "stored": None if self.stored == "half" else self.stored}
        if self.kind == "model":
            recipe = self.recipe
            foreign = {"unroll": recipe.unroll, "unroll_decay": recipe.unroll_decay}
            foreign |= {"feature_layers": self.feature_layers}
        for name, value in foreign.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, which a draft of kind {self.kind} does not have; leave {name} out"
                )


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
    ray: Flat[RayArgs] = field(default_factory=RayArgs)

    @property
    def which(self) -> ModelArgs:
        """The model, given as an argument or by --model."""
        return _named(self.place, self.named)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Serve a draft model to targets, on this machine or on others: they name it as --draft tcp://HOST:PORT."""

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """The draft: a folder, a .gguf file, a Hub id, or drop:I,J,... of --target; without it, the default
    model's."""
    target: str | None = None
    """The target's folder, .gguf file or Hub id, for a draft that uses weights of its target."""
    listen: str = "127.0.0.1:7117"
    """Address and port to listen on, HOST:PORT; 0.0.0.0:PORT is every address there is, port 0 any that is free. What
    other machines can reach needs a key."""
    key_file: Path | None = None
    """A file with the key that targets must know, such as `openssl rand -hex 32` makes."""
    max_sessions: int = 8
    """Most targets that are served at once."""
    max_rows: int = 64
    """Most requests that a target may decode together."""
    max_tokens: int = 131072
    """Most tokens of KV memory that a target's session may take."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU if there is one."""
    dtype: str = "auto"
    """Of the weights, as for the other commands."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    status_seconds: float = 10.0
    """Seconds between two lines about sessions, where something has happened."""
    cache_dir: Path | None = None
    """Where the default model is kept."""


def _named(place: str | None, named: ModelArgs) -> ModelArgs:
    """The model of an argument, which may also be named by --model."""
    if place is None:
        return named
    if named.model not in (None, place):
        raise ConfigError(f"the model is {place!r} and --model {named.model!r}; give one of them")
    return replace(named, model=place)


AnyCommand = Generate | Chat | Serve | Draft | Compare | Bench | Report | Tune | Info | Distill
Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Chat, tyro.conf.subcommand("chat")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[Draft, tyro.conf.subcommand("draft")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Distill, tyro.conf.subcommand("distill")]
)


def check(command: AnyCommand) -> None:
    """Refuse settings that are never valid. This needs no torch, whose import takes a second."""
    if isinstance(command, Distill):
        command.check()
    for part in vars(command).values():
        match part:
            case EngineArgs():
                if part.config().method != "auto":
                    find_method(part.method)
            case SamplingArgs():
                part.params()
            case RecipeArgs():
                part.recipe()
            case LimitArgs():
                part.limits()
            case ParserArgs():
                part.parsers()
            case RayArgs():
                part.cluster()


def load(which: ModelArgs, engine: EngineArgs, *, is_logged: bool = False, **more: Any) -> "LLM":
    """Build the LLM of these arguments. Shows progress on a terminal, and in the log if there is one."""
    settings = asdict(engine.config())
    from saguaro.cli.progress import progress_bar
    from saguaro.llm import LLM

    with progress_bar(is_logged=is_logged) as progress:
        return LLM(**asdict(which), **settings, **more, progress=progress)
