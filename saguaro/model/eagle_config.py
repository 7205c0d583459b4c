"""The config of an EAGLE-3 draft, in the layouts of SafeAILab and SpecForge, and of speculators.

A draft reads features: the residual stream of its target that enters some layers (`taps`). The layouts number layers in
two ways, so an id alone does not say which layer it means:

    layout                      field                                               id i is
    SafeAILab, SpecForge        eagle_config.eagle_aux_hidden_state_layer_ids       the output of layer i: tap i + 1
    speculators                 eagle_aux_hidden_state_layer_ids                    the input of layer i: tap i
    either, without the field                                                       taps 2, L // 2 and L - 3
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saguaro.errors import ConfigError, CorruptModel, TokenizerMismatch, UnsupportedModel
from saguaro.model.files import AGAIN, brief, is_there, read_json
from saguaro.model.hf_config import parse_spec
from saguaro.model.spec import ModelSpec

LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # model_type of a draft's layers -> family
IDS = "eagle_aux_hidden_state_layer_ids"
LEAST_LAYERS = 5  # of a target, for the default taps: 2 <= L // 2 <= L - 3
NOT_COMPUTED = {"norm_before_fc": "a norm before fc", "parallel_drafting": "parallel drafting"}


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """An EAGLE-3 draft for one target."""

    layers: ModelSpec  # of its layers; n_vocab: the rows of its embedding
    taps: tuple[int, ...]  # tap i: the residual stream that enters layer i of the target; L: that leaves the last
    target_hidden: int
    n_draft_vocab: int | None  # rows of its own head; None: the config names none
    norm_before_residual: bool  # the residual stream of its first layer begins normed
    feeds_normed: bool  # a drafted token is fed the state behind the last norm (EAGLE-3.1)
    norms_features: bool  # each layer's feature is normed (EAGLE-3.1)
    logit_scale: float

    @property
    def n_features(self) -> int:
        """F: numbers of a token's feature."""
        return len(self.taps) * self.target_hidden


def is_eagle(path: Path) -> bool:
    """Whether this is the folder of an EAGLE-3 draft."""
    if path.suffix == ".gguf" or not is_there(path / "config.json"):
        return False
    config = read_json(path / "config.json")
    if "speculators_model_type" in config:
        return True  # eagle3, or refused by name
    named = config.get("architectures")
    return isinstance(named, list) and any(isinstance(name, str) and "eagle3" in name.lower() for name in named)


def default_taps(n_layers: int) -> tuple[int, ...] | None:
    """The taps of a draft that names none; None: the target is too small for them.

    >>> default_taps(32), default_taps(4)
    ((2, 16, 29), None)
    """
    return (2, n_layers // 2, n_layers - 3) if n_layers >= LEAST_LAYERS else None


def read_eagle_spec(folder: Path, target: ModelSpec) -> EagleSpec:
    """The spec of an EAGLE-3 draft of this target; errors name what does not fit the target."""
    source = folder / "config.json"
    config = read_json(source)
    try:
        spec = _parse(config, target, source)
    except (TypeError, ValueError, AttributeError) as e:
        if isinstance(e, ConfigError):
            raise
        raise CorruptModel(f"{source} is no EAGLE-3 config ({e}); {AGAIN}") from e
    _check_target(spec, config, target, source)
    return spec


def _parse(config: Mapping[str, Any], target: ModelSpec, source: Path) -> EagleSpec:
    is_nested = "speculators_model_type" in config
    if is_nested and config["speculators_model_type"] != "eagle3":
        raise UnsupportedModel(
            f"{source} is a speculators draft of kind {brief(config['speculators_model_type'])}; Saguaro reads eagle3"
        )
    inner = config["transformer_layer_config"] if is_nested and "transformer_layer_config" in config else config
    _refuse_unknown(config, inner, source)
    heads = _object(config, "eagle_config")
    n_draft_vocab = config.get("draft_vocab_size")
    if n_draft_vocab is not None and (type(n_draft_vocab) is not int or n_draft_vocab < 1):
        raise ValueError(f"draft_vocab_size is {brief(n_draft_vocab)}; it must be a whole number of at least 1")
    scale = config.get("logit_scale")
    return EagleSpec(
        layers=_layers(inner, target, source),
        taps=_taps(config, heads, target, is_nested, source),
        target_hidden=_target_hidden(config, target, source),
        n_draft_vocab=n_draft_vocab,
        norm_before_residual=_flag(config, "norm_before_residual"),
        feeds_normed=_flag(config, "norm_output"),
        norms_features=_flag(config, "fc_norm"),
        logit_scale=1.0 if scale is None else float(scale),
    )


def _layers(inner: Mapping[str, Any], target: ModelSpec, source: Path) -> ModelSpec:
    """The spec of the draft's layers. Texts are as long as the target's: the length in the file bounds training, not
    use. Without a rope of its own the draft has the target's."""
    kind = inner.get("model_type", "llama")
    if kind not in LAYERS:
        raise UnsupportedModel(f"{source} has layers of type {brief(kind)}; Saguaro computes {', '.join(LAYERS)}")
    fields = {"vocab_size": target.n_vocab, **inner, "architectures": [LAYERS[kind]]}
    spec = parse_spec(fields, source=str(source))
    has_rope = any(inner.get(name) is not None for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    rope = spec.rope if has_rope else target.rope
    return replace(spec, rope=rope, max_length=target.max_length, is_tied=False, eos_ids=())


def _taps(
    config: Mapping[str, Any], heads: Mapping[str, Any], target: ModelSpec, is_nested: bool, source: Path
) -> tuple[int, ...]:
    """See the module's docstring."""
    name = IDS
    ids = config.get(name) if is_nested else heads.get(name, config.get(name))
    n_layers, shift = target.n_layers, 0 if is_nested else 1
    if ids is None:
        found = default_taps(n_layers)
        if found is None:
            raise UnsupportedModel(
                f"{source} names no layers of its target, and its target has {n_layers}; the default layers, 2, L // 2 "
                f"and L - 3, need at least {LEAST_LAYERS}: name them as {name}"
            )
        return found
    if not isinstance(ids, list) or not ids or any(type(each) is not int for each in ids):
        raise ValueError(f"{name} is {brief(ids)}; it must be a list of layers")
    if not all(0 <= each <= n_layers - shift for each in ids):
        raise UnsupportedModel(
            f"{source} reads the layers {brief(ids)} of its target ({name}), and the target has the layers 0 to "
            f"{n_layers - 1}; it was made for another target"
        )
    return tuple(each + shift for each in ids)


def _target_hidden(config: Mapping[str, Any], target: ModelSpec, source: Path) -> int:
    said = config.get("target_hidden_size")
    if said is not None and said != target.hidden:
        raise UnsupportedModel(
            f"{source} was made for a target of hidden size {brief(said)} (target_hidden_size); this target has "
            f"{target.hidden}: take an EAGLE-3 draft of this target"
        )
    return target.hidden


def _refuse_unknown(config: Mapping[str, Any], inner: Mapping[str, Any], source: Path) -> None:
    """Refuse what would change the result if ignored."""
    if _object(config, "eagle_config").get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel(
            f"{source} says use_aux_hidden_state is false: it reads the target's last state only, as EAGLE-1 and -2; "
            "Saguaro computes EAGLE-3"
        )
    for name, what in NOT_COMPUTED.items():
        if config.get(name) or _object(config, "eagle_config").get(name):
            raise UnsupportedModel(f"{source} says {name}; an EAGLE-3 draft with {what} is not computed")
    if inner.get("tie_word_embeddings") or config.get("tie_word_embeddings"):
        raise UnsupportedModel(
            f"{source} says tie_word_embeddings; an EAGLE-3 draft has a head of its own or its target's"
        )


def _check_target(spec: EagleSpec, config: Mapping[str, Any], target: ModelSpec, source: Path) -> None:
    n_vocab, n_own = spec.layers.n_vocab, spec.n_draft_vocab
    if n_vocab != target.n_vocab:
        raise TokenizerMismatch(
            f"{source} was made for a target of {n_vocab} tokens; this target has {target.n_vocab}: take an EAGLE-3 "
            "draft of this target"
        )
    if n_own is not None and n_own > n_vocab:
        raise CorruptModel(f"{source} says draft_vocab_size is {n_own}, and vocab_size {n_vocab}; {AGAIN}")
    n_aux = config.get("num_aux_hidden_states")
    if n_aux is not None and n_aux != len(spec.taps):
        raise CorruptModel(f"{source} says num_aux_hidden_states is {brief(n_aux)} and names {len(spec.taps)} layers")


def _object(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise TypeError(f"{key} is {brief(value)}; it must be an object")
    return value


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {brief(value)}; it must be true or false")
    return bool(value)
