"""Groups of flags: the fields of ModelSource, EngineConfig, SamplingParams, Recipe and the server's limits."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from saguaro.cluster.settings import ClusterSettings
from saguaro.config import EngineConfig, ModelSource, SamplingParams, Structured
from saguaro.distill.recipe import Recipe
from saguaro.errors import ConfigError
from saguaro.method import METHODS
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.tools.parsers import Parsers

T = TypeVar("T")
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
Repeatable = Annotated[T, tyro.conf.UseAppendAction]
Color = Literal["auto", "always", "never"]


def _method_help() -> str:
    """The help text of --method, from the table."""
    known = ", ".join(f"{method.name} ({method.summary})" for method in METHODS.values())
    return f"The decoding method: {known}; or auto: ssd if there is a draft, else ar."


LENGTH = PrimitiveConstructorSpec[int | None](
    nargs=1,
    metavar="INT|auto",
    instance_from_str=lambda words: None if words[0] in ("auto", "None") else int(words[0]),
    is_instance=lambda value: value is None or isinstance(value, int),
    str_from_instance=lambda value: ["auto" if value is None else str(value)],
)


class ModelArgs(ModelSource):
    """Which model."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs(EngineConfig):
    """How the engine is built."""

    method: Annotated[str, tyro.conf.arg(help=_method_help())] = EngineConfig.method
    max_model_len: Annotated[int | None, LENGTH] = None
    """Longest text, prompt and output together; auto or -1: what the model and the KV memory allow."""

    def __post_init__(self) -> None:
        """No checks here: config() checks, so that errors are the same everywhere."""

    def config(self) -> EngineConfig:
        """Build the checked config."""
        return EngineConfig(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class SamplingArgs(SamplingParams):
    """How text is decoded."""

    structured: Annotated[Structured | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    stop: Repeatable[tuple[str, ...]] = ()
    """A string that ends the output; not part of it. One value per flag, which may be repeated."""
    stop_token_ids: Repeatable[tuple[int, ...]] = ()
    """A token id that ends the output, beside the model's own. One value per flag, which may be repeated."""
    prepare: tyro.conf.Suppress[bool] = True  # per request in the API; here --prepare sets it for the engine

    def __post_init__(self) -> None:
        """No checks here: params() checks, so that errors are the same everywhere."""

    def params(self) -> SamplingParams:
        """Build the checked parameters."""
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
        """Read the files and build the checked constraint."""
        schema, grammar = (_read(path) for path in (self.json_schema, self.grammar))
        if schema is None and grammar is None and self.regex is None and not self.choice:
            return None
        return Structured(json=schema, regex=self.regex, choice=self.choice or None, grammar=grammar)


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from e


class RecipeArgs(Recipe):
    """How the draft is trained."""

    def __post_init__(self) -> None:
        """No checks here: recipe() checks, so that errors are the same everywhere."""

    def recipe(self) -> Recipe:
        """Build the checked recipe."""
        return Recipe(**asdict(self))


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


class LimitArgs(ServerLimits):
    """What a request may be, and how long it may take."""

    def __post_init__(self) -> None:
        """No checks here: limits() checks, so that errors are the same everywhere."""

    def limits(self) -> ServerLimits:
        """Build the checked limits."""
        return ServerLimits(**asdict(self))


class ParserArgs(Parsers):
    """How the model's output is read."""

    def __post_init__(self) -> None:
        """No checks here: parsers() checks, so that errors are the same everywhere."""

    def parsers(self) -> Parsers:
        """Build the checked parsers."""
        return Parsers(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class RayArgs(ClusterSettings):
    """How a Ray cluster serves; needs the extra `ray`."""

    ray: bool = False
    """Serve with replicas in a Ray cluster."""
    ray_address: str | None = None
    """HOST:PORT of the cluster; auto: the one that runs on this machine; local: one of its own. Without it, that of
    RAY_ADDRESS, else the one that runs on this machine, else one of its own."""
    ray_every_node: bool = False
    """Listen on every node that has a replica, for a load balancer; else on the head node alone."""
    ray_wait: float = 10.0
    """Seconds that the cluster may take to have room for the replicas, as one that adds nodes does."""

    def __post_init__(self) -> None:
        """No checks here: cluster() checks, so that errors are the same everywhere."""

    def cluster(self) -> ClusterSettings:
        """Build the checked settings."""
        for one in fields(self):
            if not self.ray and getattr(self, one.name) != one.default:
                raise ConfigError(
                    f"--{one.name.replace('_', '-')} is {getattr(self, one.name)}; it is for --ray: add it"
                )
        if not 0 < self.ray_wait <= 86400:
            raise ConfigError(f"ray_wait is {self.ray_wait}; it must be more than 0 and at most 86400 seconds")
        return ClusterSettings(**{one.name: getattr(self, one.name) for one in fields(ClusterSettings)})
