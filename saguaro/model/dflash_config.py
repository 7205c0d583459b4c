"""The config of a DFlash draft, in the layouts of z-lab and of speculators.

    layout         field                               id i is
    z-lab          dflash_config.target_layer_ids      the output of layer i: tap i + 1
    speculators    aux_hidden_state_layer_ids          the input of layer i: tap i

The block and the mask token are named beside them: block_size and mask_token_id, at the top or in dflash_config.
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
    inner_config,
    layers_of,
    object_in,
    read_as,
    taps_of,
    target_hidden_of,
)
from saguaro.model.files import brief
from saguaro.model.spec import ModelSpec

A_DRAFT = "a DFlash draft"
SETTINGS = "dflash_config"
# Fields that change the result, with the only value that is computed.
COMPUTED = {
    "sample_from_anchor": False,
    "shift_label": False,
    "is_causal": False,
    "causal": False,
    "projector_type": "dflash",
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(FeatureSpec):
    """A DFlash draft for one target."""

    name = "DFlash"

    block_size: int  # most tokens of a block, its known first token included
    mask_token: int  # stands for a token that is drafted

    @property
    def most_drafted(self) -> int:
        """See FeatureSpec."""
        return self.block_size - 1


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether this is the config of a DFlash draft, or of a variant, which is refused by name."""
    if KIND in config:
        return bool(config[KIND] == "dflash")
    return SETTINGS in config or any("dflash" in name or "dspark" in name for name in architectures_of(config))


def read_dflash_spec(folder: Path, target: ModelSpec) -> DFlashSpec:
    """The spec of a DFlash draft of this target; errors name what does not fit the target."""
    spec = read_as(_parse, folder, target, DFlashSpec.name, A_DRAFT)
    source = folder / "config.json"
    if not 0 <= spec.mask_token < target.n_vocab:
        raise CorruptModel(f"{source} says mask_token_id is {spec.mask_token}; the target has {target.n_vocab} tokens")
    return spec


def _parse(config: Mapping[str, Any], target: ModelSpec, source: Path) -> DFlashSpec:
    inner, own = inner_config(config), {**config, **object_in(config, SETTINGS)}
    _refuse_unknown(config, own, source)
    n_target = own.get("num_target_layers")
    if n_target is not None and n_target != target.n_layers:
        raise UnsupportedModel(
            f"{source} was made for a target of {brief(n_target)} layers (num_target_layers); this target has "
            f"{target.n_layers}: take {A_DRAFT} of this target"
        )
    is_nested = KIND in config
    name = "aux_hidden_state_layer_ids" if is_nested else "target_layer_ids"
    taps = taps_of(own.get(name), name, target.n_layers, source, is_output=not is_nested)
    if target.n_layers in taps:
        raise UnsupportedModel(
            f"{source} reads the output of the target's last layer ({name}), which some programs return behind a norm "
            "and some before it; Saguaro computes drafts that read earlier layers"
        )
    return DFlashSpec(
        layers=layers_of(inner, target, source, "qwen3"),
        taps=taps,
        target_hidden=target_hidden_of(config, target, source, A_DRAFT),
        n_draft_vocab=draft_vocab_of(config),
        block_size=_whole(own, "block_size", 2),
        mask_token=_whole(own, "mask_token_id", 0),
    )


def _whole(fields: Mapping[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {brief(value)}; it must be a whole number of at least {least}")
    return value


def _refuse_unknown(config: Mapping[str, Any], own: Mapping[str, Any], source: Path) -> None:
    """Refuse what would change the result if ignored."""
    variants = [name for name in architectures_of(config) if "dflash2" in name or "dspark" in name]
    if variants:
        raise UnsupportedModel(f"{source} is a {variants[0]}; of block drafts Saguaro computes DFlash")
    for name, value in COMPUTED.items():
        if own.get(name) not in (None, value):
            raise UnsupportedModel(f"{source} says {name} is {brief(own[name])}; {A_DRAFT} with that is not computed")
