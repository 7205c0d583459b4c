"""The default draft with noise: the same cost, and a lower acceptance.

Every row of its matrices, the head's excepted, is scaled by 1 + epsilon times a normal number.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from saguaro.model.default import DRAFT


def write_noisy(folder: Path, epsilon: float, seed: int = 0) -> Path:
    """Write the draft with so much noise into a folder that does not exist yet."""
    shutil.copytree(DRAFT, folder)
    weights = load_file(folder / "model.safetensors")
    chance = torch.Generator().manual_seed(seed)
    for name, weight in weights.items():
        if name.endswith("weight_scale") and not name.startswith("lm_head"):
            weights[name] = weight * (1 + epsilon * torch.randn(weight.shape, generator=chance))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
