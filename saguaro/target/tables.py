"""The tables of a captured step's rules on the device (saguaro.kernels.row_rules), and how a row's numbers get there.

A row tells its counts and biases once, when its request takes a seat:

    |seat|n counts|counts ...|biases ...|

Masks are sent for each step. Positions may share one.
"""

from collections.abc import Sequence

import numpy as np
import torch

from saguaro.attention.step import Segment
from saguaro.device.graphs import Mirror
from saguaro.kernels.row_rules import MOST_BIASES, NO_BIAS, Tables
from saguaro.runner.captured import Room

MOST_SEATS, MOST_MASKS = 64, 512


class RuleTables:
    """The tables, at fixed addresses."""

    def __init__(self, room: Room, n_known: int, n_positions: int, device: torch.device) -> None:
        """n_positions: most positions of a step."""
        self.room, self._device = room, device
        counts = torch.zeros(room.seats, n_known, dtype=torch.int16, device=device)
        biases = torch.full((room.seats, MOST_BIASES), NO_BIAS, dtype=torch.int64, device=device)
        self._masks = Mirror((room.masks, -(-n_known // 32)), torch.int32, device)
        self._which = Mirror((n_positions,), torch.int32, device)
        self._words, self._at = self._masks.host.numpy().view(np.uint8), self._which.host.numpy()
        self.on_device = Tables(counts, biases, self._masks.device, self._which.device)

    def write(self, rows: Sequence[Segment], width: int) -> None:
        """Write what these rows tell, of a step of so many positions per row."""
        for row in rows:
            if row.told:
                self._seat(row.told)
        if any(row.masks for row in rows):
            self._send_masks(rows, width)

    def _seat(self, told: Sequence[int]) -> None:
        seat, n_counts = told[:2]
        entries = torch.tensor(told[2:], dtype=torch.int64)
        counts, biases = entries.to(self._device).tensor_split([n_counts])
        own = self.on_device.counts[seat].zero_()
        own[counts & 0xFFFFFFFF] = (counts >> 32).to(torch.int16)
        self.on_device.biases[seat] = NO_BIAS
        self.on_device.biases[seat, : len(biases)] = biases

    def _send_masks(self, rows: Sequence[Segment], width: int) -> None:
        numbers: dict[int, int] = {}  # of each mask: the same one may be of several positions
        for index, row in enumerate(rows):
            for at, mask in enumerate(row.masks, (index + 1) * width - len(row.masks)):
                if mask is not None and id(mask) not in numbers:
                    self._words[len(numbers), : len(mask)] = mask[: self._words.shape[1]]
                    numbers[id(mask)] = len(numbers)
                self._at[at] = -1 if mask is None else numbers[id(mask)]
        self._masks.send(len(numbers))
        self._which.send(len(rows) * width)


def room_for(max_rows: int, n_changes: int, n_positions: int) -> Room:
    """The room of steps of so many rows, whose texts grow by so many tokens at most, and of so many positions."""
    return Room(min(max_rows, MOST_SEATS), n_changes, min(n_positions, MOST_MASKS))


def table_bytes(max_rows: int, n_positions: int, n_known: int) -> int:
    """The bytes of the tables on the device, about.

    >>> round(table_bytes(32, 160, 151936) / 2**20, 1)
    12.4
    """
    room = room_for(max_rows, 1, n_positions)
    return room.seats * (2 * n_known + 8 * MOST_BIASES) + room.masks * n_known // 8
