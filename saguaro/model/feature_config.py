"""Which kind of draft that reads features a folder holds, and its spec."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saguaro.errors import UnsupportedModel
from saguaro.model.dflash_config import DFlashSpec, is_dflash, read_dflash_spec
from saguaro.model.eagle_config import EagleSpec, is_eagle, read_eagle_spec
from saguaro.model.feature_spec import KIND, FeatureSpec
from saguaro.model.files import brief, is_there, read_json
from saguaro.model.spec import ModelSpec


def reads_features(folder: Path) -> str | None:
    """The kind of draft in this folder, if it reads features of a target."""
    if folder.suffix == ".gguf" or not is_there(folder / "config.json"):
        return None
    return _kind_of(read_json(folder / "config.json"), folder)


def read_feature_spec(folder: Path, target: ModelSpec) -> FeatureSpec:
    """The spec of a draft of this target; errors name what does not fit the target."""
    is_block = reads_features(folder) == DFlashSpec.name
    return read_dflash_spec(folder, target) if is_block else read_eagle_spec(folder, target)


def _kind_of(config: Mapping[str, Any], folder: Path) -> str | None:
    if is_eagle(config):
        return EagleSpec.name
    if is_dflash(config):
        return DFlashSpec.name
    if KIND in config:
        raise UnsupportedModel(
            f"{folder / 'config.json'} is a speculators draft of kind {brief(config[KIND])}; Saguaro reads eagle3 and "
            "dflash"
        )
    return None
