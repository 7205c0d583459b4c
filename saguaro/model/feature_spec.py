"""Drafts that read features of their target: what their configs have in common (model/eagle_config.py and
model/dflash_config.py).

A feature of a token is the residual stream of the target that enters some of its layers (`taps`), one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from saguaro.errors import ConfigError, CorruptModel, TokenizerMismatch, UnsupportedModel
from saguaro.model.files import AGAIN, brief, read_json
from saguaro.model.hf_config import parse_spec
from saguaro.model.spec import ModelSpec

LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # model_type of a draft's layers -> family
S = TypeVar("S", bound="FeatureSpec")
KIND, NESTED = "speculators_model_type", "transformer_layer_config"  # of the layout of speculators


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """A draft that reads features of one target."""

    name: ClassVar[str]  # of the kind of draft, for messages

    layers: ModelSpec  # of its layers; n_vocab: the rows of its embedding
    taps: tuple[int, ...]  # tap i: the residual stream that enters layer i of the target; L: that leaves the last
    target_hidden: int
    n_draft_vocab: int | None = None  # rows of its own head; None: the config names none

    @property
    def n_features(self) -> int:
        """F: numbers of a token's feature."""
        return len(self.taps) * self.target_hidden

    @property
    def most_drafted(self) -> int | None:
        """Tokens that can be drafted after a text; None: any number."""
        return None


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """The names of a config's architectures, in small letters."""
    named = config.get("architectures")
    return [name.lower() for name in named if isinstance(name, str)] if isinstance(named, list) else []


def inner_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the draft's layers: nested in the layout of speculators."""
    return object_in(config, NESTED) if KIND in config and NESTED in config else config


def layers_of(inner: Mapping[str, Any], target: ModelSpec, source: Path, usual: str) -> ModelSpec:
    """The spec of the draft's layers; usual: their type if the config says none. Texts are as long as the target's: the
    length in the file bounds training, not use. Without a rope of its own the draft has the target's."""
    kind = inner.get("model_type", usual)
    if kind not in LAYERS:
        raise UnsupportedModel(f"{source} has layers of type {brief(kind)}; Saguaro computes {', '.join(LAYERS)}")
    fields = {"vocab_size": target.n_vocab, **inner, "architectures": [LAYERS[kind]]}
    spec = parse_spec(fields, source=str(source))
    has_rope = any(inner.get(name) is not None for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    rope = spec.rope if has_rope else target.rope
    return replace(spec, rope=rope, max_length=target.max_length, is_tied=False, eos_ids=())


def taps_of(ids: object, name: str, n_layers: int, source: Path, *, is_output: bool) -> tuple[int, ...]:
    """The taps of layer ids in the field of this name: of outputs, or of inputs of a target's layers."""
    shift = 1 if is_output else 0
    if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
        raise ValueError(f"{name} is {brief(ids)}; it must be a list of layers")
    if not all(0 <= each <= n_layers - shift for each in ids):
        raise UnsupportedModel(
            f"{source} reads the layers {brief(ids)} of its target ({name}), and the target has the layers 0 to "
            f"{n_layers - 1}; it was made for another target"
        )
    return tuple(each + shift for each in ids)


def draft_vocab_of(config: Mapping[str, Any]) -> int | None:
    """The rows of the draft's own head, if the config names them."""
    n = config.get("draft_vocab_size")
    if n is not None and (type(n) is not int or n < 1):
        raise ValueError(f"draft_vocab_size is {brief(n)}; it must be a whole number of at least 1")
    return n


def target_hidden_of(config: Mapping[str, Any], target: ModelSpec, source: Path, kind: str) -> int:
    """The hidden size of the target, which the config may name."""
    said = config.get("target_hidden_size")
    if said is not None and said != target.hidden:
        raise UnsupportedModel(
            f"{source} was made for a target of hidden size {brief(said)} (target_hidden_size); this target has "
            f"{target.hidden}: take {kind} of this target"
        )
    return target.hidden


def refuse_tied(config: Mapping[str, Any], inner: Mapping[str, Any], source: Path, kind: str) -> None:
    """Refuse a head that is the draft's own embedding."""
    if inner.get("tie_word_embeddings") or config.get("tie_word_embeddings"):
        raise UnsupportedModel(f"{source} says tie_word_embeddings; {kind} has a head of its own or its target's")


def check_vocab(spec: FeatureSpec, target: ModelSpec, source: Path, kind: str) -> None:
    """Raise unless the draft has the target's vocabulary, or a part of it."""
    n_vocab, n_own = spec.layers.n_vocab, spec.n_draft_vocab
    if n_vocab != target.n_vocab:
        raise TokenizerMismatch(
            f"{source} was made for a target of {n_vocab} tokens; this target has {target.n_vocab}: take {kind} of "
            "this target"
        )
    if n_own is not None and n_own > n_vocab:
        raise CorruptModel(f"{source} says draft_vocab_size is {n_own}, and vocab_size {n_vocab}; {AGAIN}")


def object_in(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A field that is an object; a missing one is empty."""
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} is {brief(value)}; it must be an object")
    return value


def flag_in(fields: Mapping[str, Any], key: str) -> bool:
    """A field that is true or false; a missing one is false."""
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {brief(value)}; it must be true or false")
    return bool(value)


def read_as(
    parse: Callable[[Mapping[str, Any], ModelSpec, Path], S], folder: Path, target: ModelSpec, name: str, kind: str
) -> S:
    """What `parse` finds in a folder's config. Raises CorruptModel if fields are not what they must be, and what
    check_vocab raises; name and kind: of such a draft, for messages."""
    source = folder / "config.json"
    config = read_json(source)
    try:
        spec = parse(config, target, source)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as e:
        raise CorruptModel(f"{source} is no {name} config ({e}); {AGAIN}") from e
    check_vocab(spec, target, source, kind)
    return spec
