"""The tables of a captured step's rules on the device (saguaro.kernels.row_rules), and how a row's numbers get there.

A row tells its counts and biases once, when its request takes a seat:

    |seat|n counts|counts ...|biases ...|
"""

from collections.abc import Sequence

import torch

from saguaro.attention.step import Segment
from saguaro.kernels.row_rules import MOST_BIASES, NO_BIAS, Tables
from saguaro.runner.captured import Room

MOST_SEATS = 64


class RuleTables:
    """The tables, at fixed addresses."""

    def __init__(self, room: Room, n_known: int, device: torch.device) -> None:
        self.room, self._device = room, device
        counts = torch.zeros(room.seats, n_known, dtype=torch.int16, device=device)
        biases = torch.full((room.seats, MOST_BIASES), NO_BIAS, dtype=torch.int64, device=device)
        masks = torch.zeros(1, -(-n_known // 32), dtype=torch.int32, device=device)
        self.on_device = Tables(counts, biases, masks, torch.zeros(1, dtype=torch.int32, device=device))

    def write(self, rows: Sequence[Segment], width: int) -> None:
        """Write what these rows tell, of a step of so many positions per row."""
        for row in rows:
            if row.told:
                self._seat(row.told)

    def _seat(self, told: Sequence[int]) -> None:
        seat, n_counts = told[:2]
        entries = torch.tensor(told[2:], dtype=torch.int64)
        counts, biases = entries.to(self._device).tensor_split([n_counts])
        own = self.on_device.counts[seat].zero_()
        own[counts & 0xFFFFFFFF] = (counts >> 32).to(torch.int16)
        self.on_device.biases[seat] = NO_BIAS
        self.on_device.biases[seat, : len(biases)] = biases


def room_for(max_rows: int, n_changes: int) -> Room:
    """The room of a step of so many rows, whose texts grow by so many tokens at most."""
    return Room(min(max_rows, MOST_SEATS), n_changes, 0)


def table_bytes(max_rows: int, n_known: int) -> int:
    """The bytes of the tables on the device.

    >>> table_bytes(32, 151936) / 2**20
    9.5234375
    """
    return min(max_rows, MOST_SEATS) * (2 * n_known + 8 * MOST_BIASES)
