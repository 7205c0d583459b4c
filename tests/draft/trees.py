"""Trees as tests read them: followed from the root, with every invariant of draft/tree.py checked on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.draft.grow import TreeDrafter
from saguaro.draft.rows import DraftRow, Wanted
from saguaro.draft.tree import NEVER, ROOT, Trees

Path = tuple[int, ...]  # tokens from below the root down


@dataclass(frozen=True)
class Entry:
    """A listed node: its number (place of its parent * W + rank), its score, and its own place; -1: not expanded."""

    node: int
    score: float
    place: int


def entries(trees: Trees, row: int) -> dict[Path, Entry]:
    """Every node below a row's root, by the tokens that lead to it; fails if an invariant does not hold."""
    root, width = int(trees.root[row]), trees.token.shape[2]
    tensors = (trees.node, trees.depth, trees.position, trees.path, trees.token, trees.score, trees.place)
    node_of, depth, position, paths, token, score, place_of = (tensor[row].tolist() for tensor in tensors)
    assert node_of[root] == ROOT
    assert depth[root] == 0
    text = position[root] + 1
    found: dict[Path, Entry] = {}
    used = {root, trees.unused}
    todo: list[tuple[Path, int, list[int], float]] = [((), root, [], 0.0)]
    while todo:
        path, place, places, own = todo.pop()
        assert depth[place] == len(path)
        assert position[place] == text - 1 + len(path)
        assert paths[place] == [*places, *[-1] * (len(paths[place]) - len(places))]
        tokens, scores = token[place], score[place]
        listed = [rank for rank in range(width) if scores[rank] > NEVER]
        assert len({tokens[rank] for rank in listed}) == len(listed), "siblings with the same token"
        for rank in listed:
            assert scores[rank] < own, "a score that does not fall"
            child, node = place_of[place][rank], place * width + rank
            found[*path, tokens[rank]] = Entry(node, scores[rank], child)
            if child >= 0:
                assert child not in used, "two nodes at one place"
                assert node_of[child] == node
                used.add(child)
                todo.append(((*path, tokens[rank]), child, [*places, child], scores[rank]))
    assert used == {place for place, is_used in enumerate(trees.is_used[row].tolist()) if is_used}
    assert all(each == NEVER for each in score[trees.unused])
    listing = {place for place in range(trees.unused) if max(score[place]) > NEVER}
    assert listing <= used, "children of a place that is free"
    return found


def expanded(found: dict[Path, Entry]) -> dict[Path, int]:
    """The places of the nodes that have one."""
    return {path: entry.place for path, entry in found.items() if entry.place >= 0}


class Deepening:
    """Grows whatever was prepared by up to so many steps, in turn none, one, two ..."""

    least = 0.0

    def __init__(self, drafter: TreeDrafter, most: int) -> None:
        self._drafter, self._most = drafter, most
        self.steps = self.n_grown = self._left = 0

    def deepen(self, hits: Sequence[Wanted], asked: Sequence[DraftRow]) -> None:
        self.steps = (self.steps + 1) % (self._most + 1)
        if hits and self.steps:
            self._left = self.steps
            self._drafter.deepen(hits, self)
            assert self._drafter.n_steps <= self.steps
            self.n_grown += self._drafter.n_steps > 0

    def goes_on(self, rows: Sequence[DraftRow], worth: Sequence[float]) -> bool:
        self._left -= 1
        return self._left >= 0
