"""Checkpoints of a training run: the tensors of a step, and a small file that names them once they are complete.

checkpoint.json                       step, recipe, reports so far; replaced last, atomically
checkpoint-00000200.safetensors       weights, and the optimizer's two averages of each
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from saguaro.errors import ConfigError, CorruptModel
from saguaro.model.files import read_json
from saguaro.model.weights import save_tensors, write_whole

FILE = "checkpoint.json"
AVERAGES = ("exp_avg", "exp_avg_sq")  # AdamW's names


@dataclass(frozen=True)
class StepReport:
    """Figures of one training step, over positions of the target's own tokens; the loss is over all positions."""

    loss: float
    agreement: float  # share of positions where both have the same argmax
    acceptance: float  # mean of sum(min(p, q))


class Checkpoint:
    """The state of a training run on disk."""

    def __init__(self, folder: Path, made_by: dict[str, Any]) -> None:
        self._folder = folder
        self._made_by = made_by  # must be equal to resume

    def save(
        self, weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, reports: list[StepReport]
    ) -> None:
        """Write the state after len(reports) steps, and remove older ones."""
        name = f"checkpoint-{len(reports):08d}.safetensors"
        tensors: dict[str, Tensor] = dict(weights)
        for weight_name, weight in weights.items():
            tensors |= {f"{weight_name}:{which}": optimizer.state[weight][which] for which in AVERAGES}
        save_tensors(tensors, self._folder / name)
        content = {"file": name, "made_by": self._made_by, "reports": [list(asdict(one).values()) for one in reports]}
        write_whole(self._folder / FILE, lambda partial: partial.write_text(json.dumps(content) + "\n"))
        for path in self._folder.glob("checkpoint-*.safetensors"):
            if path.name != name:
                path.unlink()

    def restore(self, weights: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[StepReport]:
        """Restore the saved state and return its reports; without a saved state, return [] and change nothing."""
        if not (self._folder / FILE).exists():
            return []
        content = read_json(self._folder / FILE)
        try:
            self._refuse_another(content["made_by"])
            saved = load_file(self._folder / content["file"])
            reports = [StepReport(*one) for one in content["reports"]]
            for name, weight in weights.items():
                state = {which: torch.empty_like(weight).copy_(saved[f"{name}:{which}"]) for which in AVERAGES}
                optimizer.state[weight] = {"step": torch.tensor(float(len(reports))), **state}
                weight.data.copy_(saved[name])
        except (SafetensorError, OSError, KeyError, TypeError, RuntimeError) as e:
            raise CorruptModel(
                f"the checkpoint in {self._folder} is damaged ({e}); remove its checkpoint files to begin anew"
            ) from e
        return reports

    def _refuse_another(self, theirs: dict[str, Any]) -> None:
        for name in self._made_by.keys() | theirs.keys():
            old, new = theirs.get(name), self._made_by.get(name)
            if old != new:
                raise ConfigError(
                    f"{name} is {new!r}, and the training begun in {self._folder} has {old!r}; set it as it was to go "
                    "on, remove the checkpoint files there to begin anew, or choose another folder"
                )
