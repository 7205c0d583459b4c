"""A matrix stored in 8 bits, with a scale for each block: read, and multiplied where it goes.

A scheme says which blocks have a scale: so many rows and columns of the stored matrix. The last ones may be smaller.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate

import torch
from torch import Tensor

from saguaro.model.rounded import SCALE, Shape
from saguaro.model.split import Cut


@dataclass(frozen=True)
class Modules:
    """Modules that a config lists: by their names, those of modules around them, or wildcards. As ModelOpt writes it, a
    star at the end of a name stands for what is inside that module.

    >>> kept = Modules(frozenset({"model.layers.1"}), ("*head", "model.layers.2*"))
    >>> [f"model.layers.{name}.mlp" in kept for name in (1, 10, 2, 20)], "lm_head" in kept
    ([True, False, True, False], True)
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def __contains__(self, module: str) -> bool:
        around = accumulate(module.split("."), "{}.{}".format)
        return not self.names.isdisjoint(around) or any(self._matches(module, each) for each in self.patterns)

    @staticmethod
    def _matches(module: str, pattern: str) -> bool:
        tree = pattern.removesuffix("*")
        if tree == pattern or tree.endswith((".", "*")) or not tree:
            return fnmatchcase(module, pattern)
        return fnmatchcase(module, tree) or fnmatchcase(module, f"{tree}.*")


@dataclass(frozen=True)
class Scheme:
    """How the matrices of a checkpoint are stored in 8 bits."""

    name: str  # for people
    dtype: str  # of the matrices, as safetensors names it
    scale: str  # what follows a matrix's name in that of its scales
    block: tuple[int | None, int | None]  # rows and columns that share a scale; None: all
    unread: tuple[str, ...] = ()  # ends of the names of tensors that are not needed
    kept: Modules = Modules()  # that are not stored so

    def block_of(self, shape: Shape) -> tuple[int, int]:
        """The rows and columns of a block of a matrix.

        >>> Scheme("rows", "I8", "_scale", (1, None)).block_of((4, 64))
        (1, 64)
        """
        rows, columns = (max(min(each or n, n), 1) for each, n in zip(self.block, shape, strict=True))
        return rows, columns

    def grid(self, shape: Shape) -> tuple[int, int]:
        """How many blocks a matrix has, downwards and across.

        >>> Scheme("blocks", "F8_E4M3", "_scale_inv", (128, 128)).grid((300, 128))
        (3, 1)
        """
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def fits(self, shape: Shape, scales: Shape) -> bool:
        """Whether this is the shape of such a matrix's scales. Sizes of 1 at the end may be left out, and each size may
        be followed by a 1.

        >>> rows = Scheme("rows", "I8", "_scale", (1, None))
        >>> rows.fits((4, 64), (4, 1)), rows.fits((4, 64), (4,)), rows.fits((4, 64), (1, 4))
        (True, True, False)
        """
        if len(scales) == 4 and scales[1] == scales[3] == 1:
            scales = scales[::2]
        return len(scales) <= 2 and (*scales, 1, 1)[:2] == self.grid(shape)


INT8_ROWS = Scheme("int8, a scale per row", "I8", SCALE, (1, None))


@dataclass(frozen=True)
class Scaled:
    """A matrix, or some of its rows or columns, that was read and not multiplied by its scales."""

    steps: Tensor  # [n, m] float8_e4m3fn or int8
    scales: Tensor  # [blocks downwards, blocks across] float32: of the whole matrix
    block: tuple[int, int]  # rows and columns of a block
    first: tuple[int, int] = (0, 0)  # row and column of the whole matrix at which steps begins

    @property
    def shape(self) -> Shape:
        """[n, m]."""
        return tuple(self.steps.shape)

    def part(self, cut: Cut) -> "Scaled":
        """Some rows or columns."""
        row, column = self.first
        first = (row + cut.first, column) if cut.dim == 0 else (row, column + cut.first)
        return replace(self, steps=cut.of(self.steps), first=first)

    def to(self, device: torch.device) -> "Scaled":
        """The same on a device."""
        return replace(self, steps=self.steps.to(device), scales=self.scales.to(device))

    def decoded(self) -> Tensor:
        """The matrix in float32: every step times the scale of its block.

        >>> Scaled(torch.tensor([[1, 2, 3]], dtype=torch.int8), torch.tensor([[0.5, 10.0]]), (1, 2)).decoded()
        tensor([[ 0.5000,  1.0000, 30.0000]])
        """
        (n, m), (row, column), (height, width) = self.shape, self.first, self.block
        values = self.steps.float()
        scales = self.scales[torch.arange(row, row + n, device=values.device) // height]  # [n, blocks across]
        for across in range(column // width, -(-(column + m) // width)):
            first, last = max(across * width - column, 0), min((across + 1) * width - column, m)
            values[:, first:last] *= scales[:, across : across + 1]
        return values
