"""The config of an EAGLE-3 draft, in the layouts of SafeAILab and SpecForge, and of speculators.

A draft reads features: the residual stream of its target that enters some layers (`taps`). The layouts number layers in
two ways, so an id alone does not say which layer it means:

    layout                      field                                               id i is
    SafeAILab, SpecForge        eagle_config.eagle_aux_hidden_state_layer_ids       the output of layer i: tap i + 1
    speculators                 eagle_aux_hidden_state_layer_ids                    the input of layer i: tap i
    either, without the field                                                       taps 2, L // 2 and L - 3
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro.errors import CorruptModel, UnsupportedModel
from saguaro.model.feature_spec import (
    KIND,
    FeatureSpec,
    architectures_of,
    draft_vocab_of,
    flag_in,
    inner_config,
    layers_of,
    object_in,
    read_as,
    refuse_tied,
    taps_of,
    target_hidden_of,
)
from saguaro.model.files import brief
from saguaro.model.spec import ModelSpec

IDS = "eagle_aux_hidden_state_layer_ids"
LEAST_LAYERS = 5  # of a target, for the default taps: 2 <= L // 2 <= L - 3
NOT_COMPUTED = {"norm_before_fc": "a norm before fc", "parallel_drafting": "parallel drafting"}
A_DRAFT = "an EAGLE-3 draft"


@dataclass(frozen=True, kw_only=True)
class EagleSpec(FeatureSpec):
    """An EAGLE-3 draft for one target."""

    name = "EAGLE-3"

    norm_before_residual: bool  # the residual stream of its first layer begins normed
    feeds_normed: bool  # a drafted token is fed the state behind the last norm (EAGLE-3.1)
    norms_features: bool  # each layer's feature is normed (EAGLE-3.1)
    logit_scale: float


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of an EAGLE-3 draft."""
    if KIND in config:
        return bool(config[KIND] == "eagle3")
    return any("eagle3" in name for name in architectures_of(config))


def default_taps(n_layers: int) -> tuple[int, ...] | None:
    """The taps of a draft that names none; None: the target is too small for them.

    >>> default_taps(32), default_taps(4)
    ((2, 16, 29), None)
    """
    return (2, n_layers // 2, n_layers - 3) if n_layers >= LEAST_LAYERS else None


def read_eagle_spec(folder: Path, target: ModelSpec) -> EagleSpec:
    """The spec of an EAGLE-3 draft of this target; errors name what does not fit the target."""
    return read_as(_parse, folder, target, EagleSpec.name, A_DRAFT)


def _parse(config: Mapping[str, Any], target: ModelSpec, source: Path) -> EagleSpec:
    inner, heads, scale = inner_config(config), object_in(config, "eagle_config"), config.get("logit_scale")
    _refuse_unknown(config, heads, source)
    refuse_tied(config, inner, source, A_DRAFT)
    taps, n_aux = _taps(config, heads, target, source), config.get("num_aux_hidden_states")
    if n_aux is not None and n_aux != len(taps):
        raise CorruptModel(f"{source} says num_aux_hidden_states is {brief(n_aux)} and names {len(taps)} layers")
    return EagleSpec(
        layers=layers_of(inner, target, source, "llama"),
        taps=taps,
        target_hidden=target_hidden_of(config, target, source, A_DRAFT),
        n_draft_vocab=draft_vocab_of(config),
        norm_before_residual=flag_in(config, "norm_before_residual"),
        feeds_normed=flag_in(config, "norm_output"),
        norms_features=flag_in(config, "fc_norm"),
        logit_scale=1.0 if scale is None else float(scale),
    )


def _taps(config: Mapping[str, Any], heads: Mapping[str, Any], target: ModelSpec, source: Path) -> tuple[int, ...]:
    """See the module's docstring."""
    name, is_nested = IDS, KIND in config
    ids = config.get(name) if is_nested else heads.get(name, config.get(name))
    n_layers = target.n_layers
    if ids is not None:
        return taps_of(ids, name, n_layers, source, is_output=not is_nested)
    found = default_taps(n_layers)
    if found is None:
        raise UnsupportedModel(
            f"{source} names no layers of its target, and its target has {n_layers}; the default layers, 2, L // 2 "
            f"and L - 3, need at least {LEAST_LAYERS}: name them as {name}"
        )
    return found


def _refuse_unknown(config: Mapping[str, Any], heads: Mapping[str, Any], source: Path) -> None:
    """Refuse what would change the result if ignored."""
    if heads.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel(
            f"{source} says use_aux_hidden_state is false: it reads the target's last state only, as EAGLE-1 and -2; "
            "Saguaro computes EAGLE-3"
        )
    for name, what in NOT_COMPUTED.items():
        if config.get(name) or heads.get(name):
            raise UnsupportedModel(f"{source} says {name}; {A_DRAFT} with {what} is not computed")
