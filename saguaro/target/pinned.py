"""CPU affinity of the target's steps, for a draft that has its own cores."""

from dataclasses import dataclass

from saguaro.device.affinity import Affinity

LONG = 48  # steps of at least this many tokens use all cores: they read prompts, and the draft has little to do


@dataclass(frozen=True)
class Pins:
    """Short steps run on the target's cores and long ones on all cores. The results are the same."""

    beside: Affinity
    everywhere: Affinity

    def __call__(self, n_tokens: int) -> Affinity:
        """Where a step of so many tokens of text runs."""
        return self.everywhere if n_tokens >= LONG else self.beside
