"""Arguments of the Ray Serve application, as a config file or `serve run saguaro.cluster:app KEY=VALUE` gives them.

The keys are the flags of `saguaro serve` with underscores: the fields of the settings below, in one mapping.
"""

import difflib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, model_validator

from saguaro.cluster.settings import ClusterSettings
from saguaro.config import EngineConfig, ModelSource
from saguaro.errors import short
from saguaro.serve.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What every replica is made of."""

    which: ModelSource = field(default_factory=ModelSource)
    generation_config: str = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerSettings = field(default_factory=ServerSettings)
    access_log: bool = True
    log_level: str = "info"


class ClusterArgs(BaseModel):
    """The arguments of `saguaro.cluster:app`."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True, coerce_numbers_to_str=True)

    replica: ReplicaSettings = Field(default_factory=ReplicaSettings)
    cluster: ClusterSettings = Field(default_factory=ClusterSettings)

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Sort flat keys into the settings that have them."""
        left = dict(given)
        found = {"replica": _taken(ReplicaSettings, left), "cluster": _taken(ClusterSettings, left)}
        for key in left:
            near = difflib.get_close_matches(key, [*names(ReplicaSettings), *names(ClusterSettings)], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "it must be a flag of `saguaro serve`, with underscores"
            raise ValueError(f"unknown key {short(key)}; {hint}")
        return found


def names(kind: Any) -> list[str]:
    """The flat keys of a settings class.

    >>> names(ClusterSettings)
    ['replicas', 'target_requests', 'draft_services']
    """
    hints = get_type_hints(kind)
    parts = [(one.name, hints[one.name]) for one in fields(kind)]
    return [key for name, hint in parts for key in (names(hint) if is_dataclass(hint) else [name])]


def _taken(kind: Any, left: dict[str, Any]) -> dict[str, Any]:
    """Take the keys of a settings class, and of those within it; a text stands for a list with one text."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            found[one.name] = _taken(hints[one.name], left)
        elif one.name in left:
            value = left.pop(one.name)
            found[one.name] = [value] if one.default == () and isinstance(value, str) else value
    return found
