"""A model's recommended sampling parameters, from its generation_config.json."""

from pathlib import Path
from typing import Any

from saguaro.config import SamplingParams, build
from saguaro.errors import ConfigError, ModelNotFound
from saguaro.model.files import is_there, read_json

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # fields that are used


def generation_defaults(wanted: str, model: Path) -> dict[str, Any]:
    """Defaults of SamplingParams. wanted: auto (the model's), vllm (none), or a folder with the file."""
    if wanted == "vllm" or (wanted == "auto" and model.suffix == ".gguf"):
        return {}
    folder = model if wanted == "auto" else Path(wanted).expanduser()
    file = folder / FILE
    if not is_there(file):
        if wanted == "auto":
            return {}
        raise ModelNotFound(f"generation_config is {wanted!r}, which holds no {FILE}; give auto, vllm or a folder")
    found = read_json(file)
    defaults = {name: found[name] for name in NAMES if found.get(name) is not None}
    try:
        build(SamplingParams, **defaults)
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}; correct it, or leave it out with generation_config vllm") from e
    return defaults
