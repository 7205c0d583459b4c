"""Changes of a model's files."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def changed(folder: Path, **fields: Any) -> None:
    """Other fields of the config."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without(folder: Path, name: str) -> None:
    """One tensor less."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)


def having(folder: Path, **tensors: Tensor) -> None:
    """More tensors, or others."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
