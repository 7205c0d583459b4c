"""Weights in 8 bits for a GPU: e4m3, with a float32 scale for each output and GROUP inputs.

A scale belongs to one output, so a row of a matrix is stored alike whether the matrix is whole or a rank's part, alone
or beside others in a fused weight. A checkpoint in FP8 keeps its steps and scales if its blocks are whole groups.

Invariant: row i of a result is a function of row i of the input, bit for bit, up to MAX_ROWS rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.model.scaled import Scaled
from saguaro.model.split import Cut
from saguaro.model.stored import Found, decoded

GROUP = 128  # inputs that share a scale
LARGEST = 448.0  # of e4m3
LEAST = 2.0**-100  # scale
MAX_ROWS = 64  # more are bound by arithmetic: the weight is decoded, and multiplied by torch
CHUNK = 4096  # outputs that are decoded at once


class FP8Weight:
    """A matrix in e4m3; see saguaro.model.linear.Packed."""

    packs_head = False  # logits are computed from the head's own weights, in float32

    def __init__(self, weight: Tensor) -> None:  # [out, in]
        self._allocate(weight.shape[0], weight.shape[1], weight.device)
        self.fill(0, weight)

    @classmethod
    def empty(cls, n_out: int, n_in: int, device: torch.device) -> "FP8Weight":
        """See Packed."""
        made = cls.__new__(cls)
        made._allocate(n_out, n_in, device)
        return made

    def _allocate(self, n_out: int, n_in: int, device: torch.device) -> None:
        self.steps = torch.empty(n_out, n_in, dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(n_groups(n_in), n_out, device=device)  # [groups, out]: those of a tile side by side
        self.n_params, self.n_bytes = n_out * n_in, n_out * n_in + 4 * self.scales.numel()

    def fill(self, first: int, rows: Found) -> None:
        """See Packed."""
        device = self.steps.device
        found = rows.to(device) if isinstance(rows, Scaled) else decoded(rows, device).to(device)
        for at in range(0, found.shape[0], CHUNK):
            cut = Cut(at, min(at + CHUNK, found.shape[0]))
            part = found.part(cut) if isinstance(found, Scaled) else cut.of(found)
            steps, scales = kept(part) if isinstance(part, Scaled) and keeps(part) else quantised(decoded(part, device))
            place = slice(first + cut.first, first + cut.last)
            self.steps[place], self.scales[:, place] = steps, scales

    @staticmethod
    def decode(found: Found, place: Tensor) -> None:
        """See Packed."""
        place.copy_(decoded(found, place.device))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See Packed."""
        if len(x) > MAX_ROWS:
            return multiply_many(x, self.steps, self.scales, bias)
        if x.device.type != "cuda":
            return multiply_plain(x, self.steps, self.scales, bias)
        from saguaro.kernels.fp8_rows import multiply  # needs Triton

        return multiply(x, self.steps, self.scales, bias)


def n_groups(n_in: int) -> int:
    """Groups of so many inputs; the last may be smaller."""
    return -(-n_in // GROUP)


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:  # [n, in] -> [n, in] e4m3, [groups, n] float32
    """Quantise rows; a group's largest value becomes the largest of e4m3.

    >>> steps, scales = quantised(torch.tensor([[1.0, -7.0]]))
    >>> steps.float(), scales
    (tensor([[  64., -448.]]), tensor([[0.0156]]))
    """
    n, n_in = rows.shape
    groups = F.pad(rows.float(), (0, n_groups(n_in) * GROUP - n_in)).view(n, -1, GROUP)
    scales = (groups.abs().amax(2) / LARGEST).clamp(min=LEAST)  # [n, groups]
    steps = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return steps.view(n, -1)[:, :n_in], scales.t()


def keeps(found: Scaled) -> bool:
    """Whether a matrix of a checkpoint needs no other scales: every group lies in one of its blocks."""
    is_whole = found.block[1] % GROUP == 0 or found.scales.shape[1] == 1
    return found.steps.dtype == torch.float8_e4m3fn and found.first[1] == 0 and is_whole


def kept(found: Scaled) -> tuple[Tensor, Tensor]:  # [n, in] e4m3, [groups, n] float32
    """Its own steps and scales."""
    (n, n_in), (height, width), device = found.shape, found.block, found.steps.device
    rows = (found.first[0] + torch.arange(n, device=device)) // height
    groups = torch.arange(n_groups(n_in), device=device) * GROUP // width
    return found.steps, found.scales[rows[None, :], groups[:, None]]


def weights_of(steps: Tensor, scales: Tensor) -> Tensor:  # [n, in] e4m3, [groups, n] -> [n, in] float32
    """Every step times its scale."""
    values = steps.float()
    for group, each in enumerate(scales):
        values[:, group * GROUP : (group + 1) * GROUP] *= each[:, None]
    return values


def multiply_many(x: Tensor, steps: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:  # [T, in] -> [T, out]
    """x @ W + bias, W decoded to the dtype of x, some outputs at a time."""
    y = torch.empty(len(x), len(steps), dtype=x.dtype, device=x.device)
    for at in range(0, len(steps), CHUNK):
        to = slice(at, at + CHUNK)
        weight = weights_of(steps[to], scales[:, to]).to(x.dtype).t()
        y[:, to] = torch.mm(x, weight) if bias is None else torch.addmm(bias[to], x, weight)
    return y


def multiply_plain(x: Tensor, steps: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:  # [T, in] -> [T, out]
    """x @ W + bias in float32, rounded once. Row by row: torch.mm adds in an order that depends on their number."""
    weight = weights_of(steps, scales)
    rows = torch.stack([torch.mv(weight, row.float()) for row in x]) if len(x) else x.new_empty(0, len(steps))
    return (rows if bias is None else rows + bias.float()).to(x.dtype)
