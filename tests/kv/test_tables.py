"""Page tables on the device are those of the host, whatever grew, shrank or changed hands."""

import random

import torch

from saguaro.device.graphs import Mirror
from saguaro.kv.tables import PageTables


def test_every_slot_has_its_pages_after_every_write() -> None:
    chance = random.Random(1)
    tables = PageTables(4, longest=40, page_size=4, device=torch.device("cpu"))
    lists: list[list[int]] = [[] for _ in range(4)]
    for _ in range(200):
        slot = chance.randrange(4)
        kept = lists[slot][: chance.randrange(len(lists[slot]) + 1)]  # trimmed, or given to another request
        lists[slot] = kept + [chance.randrange(100) for _ in range(chance.randrange(11 - len(kept)))]
        tables.write(list(enumerate(lists)))
        for at, pages in enumerate(lists):
            assert tables.device[at, : len(pages)].tolist() == pages


def test_a_list_that_is_changed_in_place_is_seen() -> None:
    tables = PageTables(1, longest=16, page_size=4, device=torch.device("cpu"))
    pages = [3]
    tables.write([(0, pages)])
    pages.append(5)
    tables.write([(0, pages)])
    assert tables.device[0, :2].tolist() == [3, 5]


def test_nothing_is_sent_where_nothing_changed() -> None:
    tables = PageTables(2, longest=16, page_size=4, device=torch.device("cpu"))
    sent: list[int] = []
    tables._mirror.send = sent.append  # type: ignore[assignment,method-assign]
    tables.write([(0, [1, 2]), (1, [3])])
    tables.write([(0, [1, 2]), (1, [3])])
    assert len(sent) == 1


def test_without_a_device_both_sides_are_one() -> None:
    mirror = Mirror((2, 3), torch.int64, torch.device("cpu"))
    mirror.host[1, 2] = 7
    mirror.send(2)
    assert mirror.device[1, 2] == 7
    mirror.device[0, 0] = 5
    mirror.fetch(1)
    assert mirror.host[0, 0] == 5
