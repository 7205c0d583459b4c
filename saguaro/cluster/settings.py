"""Settings of a cluster: how many replicas there are, and what each of them takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.config import EngineConfig
from saguaro.errors import ConfigError
from saguaro.serve.http.limits import ServerLimits

MAX_REPLICAS = 1000


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How many replicas serve."""

    replicas: str = "1"
    """How many replicas serve, such as 2; or between how many, such as 1-4, by the number of requests."""
    target_requests: float | None = None
    """With a range of replicas: requests per replica at which another one is started; None: half of
    --max-num-seqs."""

    draft_services: int = 0
    """Draft services that replicas share, each an actor with the draft model; 0: every replica has a draft of its
    own."""

    def __post_init__(self) -> None:
        if not 0 <= self.draft_services <= MAX_REPLICAS:
            raise ConfigError(
                f"draft_services is {self.draft_services}; it must be between 0 (none) and {MAX_REPLICAS}"
            )
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            raise ConfigError(
                f"replicas is {self.replicas!r}; it must be a number from 1 to {MAX_REPLICAS}, or a range such as 1-4"
            )
        if self.target_requests is not None and not 0 < self.target_requests < 1e6:
            raise ConfigError(f"target_requests is {self.target_requests}; it must be more than 0, or None")
        if self.target_requests is not None and not self.is_range:
            raise ConfigError(
                f"target_requests is {self.target_requests:g} and replicas {self.replicas!r}; it is for a range of "
                "replicas such as 1-4: leave it out"
            )

    @property
    def least(self) -> int:
        """The least number of replicas; 0 if there is no such number."""
        return self._bounds[0]

    @property
    def most(self) -> int:
        """The largest number of replicas.

        >>> one, some = ClusterSettings(), ClusterSettings(replicas="2-4")
        >>> (one.least, one.most), (some.least, some.most)
        ((1, 1), (2, 4))
        """
        return self._bounds[1]

    @property
    def is_range(self) -> bool:
        """Whether the number of replicas changes."""
        return "-" in self.replicas

    @property
    def _bounds(self) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", self.replicas)
        return (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))


PROXYS = ("max_connections", "header_timeout")  # limits of connections, which are Ray Serve's


def check_limits(limits: ServerLimits, proxys: Sequence[str] = PROXYS) -> None:
    """Refuse limits that a replica cannot keep, because connections end at Ray Serve's proxies."""
    for name in proxys:
        value = getattr(limits, name)
        if value != getattr(ServerLimits(), name):
            raise ConfigError(f"{name} is {value}; connections end at Ray Serve's proxies, so leave it out")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a replica takes of a node. All of it is on one node, because it belongs to one actor."""

    cpus: int
    gpus: int = 0

    def __str__(self) -> str:
        """
        >>> str(Resources(cpus=1)), str(Resources(cpus=4, gpus=2))
        ('1 CPU', '4 CPUs and 2 GPUs')
        """
        cpus, gpus = _count(self.cpus, "CPU"), _count(self.gpus, "GPU")
        return f"{cpus} and {gpus}" if self.gpus else cpus


def resources_of(engine: EngineConfig, has_gpus: bool) -> Resources:
    """What a replica takes. has_gpus: whether a node of the cluster has a GPU.

    >>> resources_of(EngineConfig(threads=4, link="process", draft_threads=2), has_gpus=False)
    Resources(cpus=6, gpus=0)
    >>> resources_of(EngineConfig(tensor_parallel_size=2), has_gpus=True)
    Resources(cpus=2, gpus=2)
    """
    for name in ("device", "draft_device"):
        if ":" in getattr(engine, name):
            raise ConfigError(f"{name} is {getattr(engine, name)!r}; in a cluster Ray chooses the GPU: use cuda")
    n_draft = (engine.draft_threads or 1) if engine.link == "process" else 0
    if device_of(engine, has_gpus) == "cuda":
        n_ranks = engine.tensor_parallel_size
        return Resources(cpus=(engine.threads or n_ranks) + n_draft, gpus=n_ranks)
    if engine.threads is None:
        raise ConfigError(
            "threads is None; in a cluster it says how many CPUs a replica takes: give threads, such as 4"
        )
    return Resources(cpus=engine.threads + n_draft, gpus=1 if engine.draft_device == "cuda" else 0)


def device_of(engine: EngineConfig, has_gpus: bool) -> str:
    """The device of a replica's target, cpu or cuda."""
    if engine.device != "auto":
        return engine.device
    return "cuda" if has_gpus else "cpu"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
