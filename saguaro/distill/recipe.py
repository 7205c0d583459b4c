"""The hyperparameters of training. Together with the target and the texts they determine the result."""

import math
from dataclasses import dataclass

from saguaro.errors import ConfigError

LOSSES = ("kl", "tv", "kl+tv")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The knobs of training."""

    steps: int = 2000
    """Batches to train on."""
    batch_texts: int = 16
    """Texts in a batch."""
    length: int = 512
    """Most tokens of a text in a batch; of longer texts a piece is taken."""
    learning_rate: float = 5e-4
    """The highest rate, after warm-up."""
    warmup: int = 50
    """Steps in which the rate rises; then it falls as a cosine."""
    final_rate: float = 0.02
    """What is left of the rate at the end, as a share of the highest."""
    weight_decay: float = 0.01
    """Of matrices, as AdamW has it."""
    clip: float = 1.0
    """Longest gradient; 0 leaves it."""
    loss: str = "kl"
    """kl (forward KL from the target), tv (tokens that speculation would reject) or kl+tv."""
    tv_weight: float = 1.0
    """Of tv beside kl."""
    prompt_weight: float = 0.1
    """Of a position inside the prompt, against 1 in the continuation; 0 leaves prompts out."""
    unroll: int | None = None
    """Of an EAGLE-3 head: steps of drafting that training runs in a row, each on the states of the one before; 7 if not
    given."""
    unroll_decay: float | None = None
    """Of an EAGLE-3 head: weight of each of these steps beside the one before; 0.8 if not given."""
    seed: int = 0
    """Fixes which texts and which pieces of them a step sees."""

    def __post_init__(self) -> None:
        finite = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        limits = [
            *((name, math.isfinite(value) and value >= 0, "0 or more") for name, value in finite.items()),
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("steps", "batch_texts")),
            ("length", self.length >= 2, "at least 2"),
            ("warmup", self.warmup >= 0, "0 or more"),
            ("learning_rate", self.learning_rate > 0, "more than 0"),
            ("final_rate", self.final_rate <= 1, "at most 1"),
            ("unroll", self.unroll is None or self.unroll >= 1, "at least 1"),
            ("unroll_decay", self.unroll_decay is None or self.unroll_decay <= 1, "at most 1"),
            ("loss", self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
        ]
        for name, ok, limit in limits:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {limit}")

    def rate(self, step: int) -> float:
        """The learning rate of a step.

        >>> [round(Recipe(steps=6, warmup=2, learning_rate=1.0, final_rate=0.0).rate(step), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        share = self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * share
