"""The base of a layer's modules."""

from typing import Any

from torch import nn


class Block(nn.Module):
    """A module whose modules and weights are plain attributes too. They are changed in place, never replaced.

    torch's look-up of such an attribute takes as long as a small operation, and a step on a CPU has hundreds of them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value
