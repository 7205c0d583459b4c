"""Page tables on the device: a tensor with one row per slot."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from saguaro.device.graphs import Mirror


class PageTables:
    """The pages of every slot. The row after the last slot (`padding_slot`) is for padding rows."""

    def __init__(self, n_slots: int, longest: int, page_size: int, device: torch.device) -> None:
        self._mirror = Mirror((n_slots + 1, -(-longest // page_size)), torch.int32, device)
        self._host = self._mirror.host.numpy()
        self._written: list[list[int]] = [[] for _ in range(n_slots)]
        self.padding_slot = n_slots

    @property
    def device(self) -> Tensor:  # [slots + 1, P] int32
        """The tensor on the device."""
        return self._mirror.device

    def write(self, tables: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Set the pages of these slots; the tensor is sent only if a table changed."""
        is_changed = False
        for slot, pages in tables:
            old = self._written[slot]
            if old == pages:
                continue
            n_same = len(old) if old == pages[: len(old)] else 0
            self._host[slot, n_same : len(pages)] = pages[n_same:]
            self._written[slot] = list(pages)
            is_changed = True
        if is_changed:
            self._mirror.send(len(self._host))
