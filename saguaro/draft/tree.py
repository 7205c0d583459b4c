"""The tree of every row: tokens that may come after its text, grown by a draft. Pure tensor functions, no host syncs.

The root is the last token of the text. An expanded node has a place, its keys and values in the row's scratch memory
at that place, and its W likeliest children. A child that was not expanded is only an entry of its parent:

    root ─┬─ a (place 3) ─┬─ b (place 1) ── ...        node     place * W + rank: the child of this rank at this place
          │               └─ c                         score    log of the estimated probability that the text runs
          └─ d                                                  through the node; falls along every path

Invariants: scores fall strictly from a node to its children, so the N best nodes are always connected. A place's path
lists the places from below the root down to itself. The last place is for entries that are not used: its children
always have the score -inf, and it is never free. A first child is the token that the draft would go on with: the path
of first children below a node is the chain drafted after it.

Under rejection children are draws (draft/ranking.py), and a drawn node must not be left out because of its token. Best
first keeps to that. Nodes have one order: by score, then by the ranks on their paths. A child's score depends on its
rank and on the tokens before it, not on its own token, and does not rise from sibling to sibling. So a node comes after
its parent and its earlier siblings, and its token only changes scores of nodes after it. These decisions look at the
first nodes of the order, or at the best one that may be expanded:

    expand   the first nodes that are not expanded, as many as a step takes
    stop     by the score of the first of them
    keep     the first expanded nodes below a new root, if there are too many for the places
    verify   the first N nodes, or those down to some score

By induction over these decisions, which nodes before x are in the tree does not depend on the token of x, so neither
does whether x is verified. Given the nodes before it, a verified child is therefore distributed as its draw.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

NEVER = float("-inf")
SURE = -1e-3  # largest log-probability of a child: a path's score falls with every node
ROOT = -1  # a node: none, but the root itself
NO_TREE = -2  # a node: the row's tree was not verified
AT_PLACE = -3  # a node at place p is also named AT_PLACE - p
UNLIKELY = -5.0  # log-probability of a child that the draft did not think of
LINEAGES = 2**40  # numbers of paths; those of long paths wrap around


@dataclass
class Trees:
    """The trees of B rows; functions that change a tree change these tensors in place."""

    token: Tensor  # [B, P+1, W] int64: of each child
    score: Tensor  # [B, P+1, W] float32; -inf: no child
    bin: Tensor  # [B, P+1, W] int64: the child's entry in the table of chances
    place: Tensor  # [B, P+1, W] int64: the child's own place; -1: not expanded
    node: Tensor  # [B, P+1] int64: which node is at a place; ROOT for the root
    position: Tensor  # [B, P+1] int64: in the text
    depth: Tensor  # [B, P+1] int64: below the root
    path: Tensor  # [B, P+1, D] int64: places from below the root to this one; -1 beyond
    is_used: Tensor  # [B, P+1] bool
    lineage: Tensor  # [B, P+1] int64: a number of the ranks on the path: the order of nodes with equal scores
    root: Tensor  # [B] int64: its place

    @staticmethod
    def empty(n_rows: int, n_places: int, width: int, depth: int, device: torch.device) -> "Trees":
        """Trees without any place, of P places with W children each and paths of D places."""

        def full(*shape: int, value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((n_rows, *shape), value, dtype=dtype, device=device)

        n = n_places + 1
        trees = Trees(
            token=full(n, width, value=0),
            score=full(n, width, value=NEVER, dtype=torch.float32),
            bin=full(n, width, value=0),
            place=full(n, width, value=-1),
            node=full(n, value=ROOT),
            position=full(n, value=0),
            depth=full(n, value=0),
            path=full(n, depth, value=-1),
            is_used=full(n, value=0, dtype=torch.bool),
            lineage=full(n, value=0),
            root=full(value=0),
        )
        trees.is_used[:, n_places] = True
        return trees

    @property
    def unused(self) -> int:
        """P: the place for what is not used."""
        return self.token.shape[1] - 1

    @property
    def without_root(self) -> list[Tensor]:
        """All tensors but the root."""
        return _tensors(self)[:-1]

    def rows(self, slots: Tensor) -> "Trees":  # [B]
        """A copy of the trees of these slots."""
        return Trees(*(each[slots] for each in _tensors(self)))

    def put(self, slots: Tensor, trees: "Trees") -> None:
        """Store the trees of these slots."""
        for mine, new in zip(_tensors(self), _tensors(trees), strict=True):
            mine[slots] = new


@dataclass(frozen=True)
class Picked:
    """R nodes of each row that are expanded next."""

    index: Tensor  # [B, R] int64: the nodes
    is_real: Tensor  # [B, R] bool; the rest is padding
    place: Tensor  # [B, R] int64: where they go; the unused place for padding
    token: Tensor  # [B, R] int64
    position: Tensor  # [B, R] int64
    depth: Tensor  # [B, R] int64
    path: Tensor  # [B, R, D] int64
    score: Tensor  # [B, R] float32

    def without_padding(self) -> "Picked":
        """Without those that are padding in every row. Looks at values, so it is not for captured code."""
        is_any = self.is_real.any(0)
        if bool(is_any.all()):
            return self
        return Picked(*(getattr(self, field.name)[:, is_any] for field in fields(self)))


def start(trees: Trees, which: Tensor, text: Tensor) -> Picked:  # [B] int64 each: tokens of the text, root included
    """Drop all of these trees. Returns the root as the one node to expand; it gets place 0."""
    trees.score.index_fill_(0, which, NEVER)
    trees.is_used.index_fill_(0, which, False)
    for place in (0, trees.unused):
        trees.is_used[:, place].index_fill_(0, which, True)
    trees.root.index_fill_(0, which, 0)
    zero = torch.zeros_like(text)[:, None]
    path = torch.full((len(text), 1, trees.path.shape[2]), -1, dtype=torch.int64, device=text.device)
    return Picked(zero + ROOT, zero == 0, zero, zero, text[:, None] - 1, zero, path, zero.float())


def pick(trees: Trees, n: int, depth: int, is_chain: bool) -> Picked:
    """The n likeliest nodes that are not expanded, up to this depth; of a chain, first children only.

    >>> trees = Trees.empty(1, 8, 2, 3, torch.device("cpu"))
    >>> first = torch.tensor([[[7, 8]]]), torch.tensor([[[-0.1, -2.0]]]), torch.zeros(1, 1, 2, dtype=torch.int64)
    >>> expand(trees, start(trees, torch.tensor([0]), torch.tensor([5])), first)
    >>> picked = pick(trees, 2, 3, is_chain=False)
    >>> picked.token, picked.place, picked.position
    (tensor([[7, 8]]), tensor([[1, 2]]), tensor([[5, 5]]))
    """
    width = trees.token.shape[2]
    is_open = (trees.place < 0) & (trees.depth < depth)[..., None]
    if is_chain:
        is_open = is_open & (torch.arange(width, device=is_open.device) == 0)
    score, index = _first(trees, trees.score.masked_fill(~is_open, NEVER), n)
    return _picked(trees, index, score > NEVER)


def walk(trees: Trees, tokens: Tensor, length: Tensor) -> Tensor:  # [B, K], [B] -> [B, K+1]
    """The places of the root and of the first `length` of these tokens below it; -1 from the first without one."""
    row = torch.arange(len(tokens), device=tokens.device)
    places = [trees.root]
    for k in range(tokens.shape[1]):
        above = places[-1].clamp(min=0)
        is_it = (trees.token[row, above] == tokens[:, k : k + 1]) & (trees.score[row, above] > NEVER)
        own = torch.where(is_it, trees.place[row, above], -1).amax(1)
        places.append(torch.where((places[-1] >= 0) & (k < length), own, -1))
    return torch.stack(places, 1)


def fork(trees: Trees, above: Tensor, token: Tensor) -> Picked:  # [B, M] each
    """The child with this token at each place, to be expanded next; none at place -1, or if it is expanded."""
    row = torch.arange(len(above), device=above.device)[:, None]
    known = above.clamp(min=0)
    is_it = (trees.token[row, known] == token[..., None]) & (trees.score[row, known] > NEVER)
    is_it &= (above >= 0)[..., None] & (trees.place[row, known] < 0)
    return _picked(trees, known * trees.token.shape[2] + is_it.long().argmax(2), is_it.any(2))


def follow(trees: Trees, picked: Picked) -> Picked:
    """The first child of each of these nodes, to be expanded next."""
    return _picked(trees, picked.place * trees.token.shape[2], picked.is_real)


def _picked(trees: Trees, index: Tensor, is_wanted: Tensor) -> Picked:  # [B, n] each
    """These nodes, each with a free place, as far as there are any."""
    n, width = index.shape[1], trees.token.shape[2]
    score = trees.score.flatten(1).gather(1, index)
    free = trees.is_used.long().argsort(dim=1, stable=True)[:, :n]
    free = torch.nn.functional.pad(free, (0, n - free.shape[1]), value=trees.unused)
    is_real = is_wanted & (score > NEVER) & ~trees.is_used.gather(1, free)
    place = torch.where(is_real, free, trees.unused)
    above = torch.where(is_real, index // width, trees.root[:, None])  # a free place has no depth, path or position
    above_depth = trees.depth.gather(1, above)
    above_path = trees.path.gather(1, above[..., None].expand(-1, -1, trees.path.shape[2]))
    path = above_path.scatter(2, above_depth.clamp(max=trees.path.shape[2] - 1)[..., None], place[..., None])
    return Picked(
        index=index,
        is_real=is_real,
        place=place,
        token=torch.where(is_real, trees.token.flatten(1).gather(1, index), 0),
        position=trees.position.gather(1, above) + 1,
        depth=above_depth + 1,
        path=path,
        score=score.masked_fill(~is_real, NEVER),
    )


def force(trees: Trees, above: Tensor, token: Tensor, is_wanted: Tensor) -> Picked:  # [B] each
    """The child with this token at a place, to be expanded next; if there is none, it takes the last child's entry."""
    row = torch.arange(len(above), device=above.device)
    width = trees.token.shape[2]
    is_it = (trees.token[row, above] == token[:, None]) & (trees.score[row, above] > NEVER)
    is_there = is_it.any(1)
    rank = torch.where(is_there, is_it.long().argmax(1), width - 1)
    node = trees.node[row, above]
    own = torch.where(node < 0, 0.0, trees.score.flatten(1).gather(1, node.clamp(min=0)[:, None])[:, 0])
    score = torch.where(is_there, trees.score[row, above, rank], own + UNLIKELY)
    place = torch.where(is_wanted, trees.is_used.long().argmin(1), trees.unused)
    trees.token[row, above, rank] = torch.where(is_wanted, token, trees.token[row, above, rank])
    trees.score[row, above, rank] = torch.where(is_wanted, score, trees.score[row, above, rank])
    depth = trees.depth[row, above]
    path = trees.path[row, above].scatter(1, depth.clamp(max=trees.path.shape[2] - 1)[:, None], place[:, None])
    return Picked(
        index=(above * width + rank)[:, None],
        is_real=is_wanted[:, None],
        place=place[:, None],
        token=token[:, None],
        position=trees.position[row, above][:, None] + 1,
        depth=depth[:, None] + 1,
        path=path[:, None],
        score=score.masked_fill(~is_wanted, NEVER)[:, None],
    )


def expand(trees: Trees, picked: Picked, ranked: tuple[Tensor, Tensor, Tensor]) -> None:
    """Put the picked nodes at their places, with these children: tokens, log-chances and bins [B, R, W]."""
    token, chance, bins = ranked
    row = torch.arange(len(picked.place), device=picked.place.device)[:, None]
    trees.token[row, picked.place] = token
    trees.score[row, picked.place] = picked.score[..., None] + chance.clamp(max=SURE)
    trees.bin[row, picked.place] = bins
    trees.place[row, picked.place] = torch.full_like(token, -1)
    trees.node[row, picked.place] = picked.index
    trees.position[row, picked.place] = picked.position
    trees.depth[row, picked.place] = picked.depth
    trees.path[row, picked.place] = picked.path
    trees.is_used[row, picked.place] = torch.ones_like(picked.is_real)
    width, known = token.shape[2], picked.index.clamp(min=0)
    lineage = (trees.lineage.gather(1, known // width) * (width + 1) + known % width + 1) % LINEAGES
    trees.lineage[row, picked.place] = torch.where(picked.index < 0, 0, lineage)
    is_child = picked.is_real & (picked.index >= 0)
    index = torch.where(is_child, picked.index, trees.unused * trees.place.shape[2])
    trees.place = trees.place.flatten(1).scatter(1, index, picked.place).view_as(trees.place)


def best(trees: Trees, n: int, depth: int, is_chain: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The n likeliest nodes up to this depth, likeliest first: node, token and parent [B, n], and score [B, n].

    A parent is an index into the n nodes, -1 the root. The score of a missing node is -inf.
    """
    width = trees.token.shape[2]
    is_seen = (trees.depth < depth)[..., None]
    if is_chain:
        is_seen = (is_seen & _is_first(trees)[..., None]) & (torch.arange(width, device=is_seen.device) == 0)
    score, index = _first(trees, trees.score.masked_fill(~is_seen, NEVER), n)
    order = torch.full_like(trees.token.flatten(1), -1)
    order = order.scatter(1, index, torch.arange(n, device=index.device).expand_as(index))
    above = trees.node.gather(1, index // width)
    parent = torch.where(above < 0, -1, order.gather(1, above.clamp(min=0)))
    return index, trees.token.flatten(1).gather(1, index), parent, score


@dataclass(frozen=True)
class Landing:
    """Where the outcome of a verification leads in the trees."""

    is_tree: Tensor  # [B] bool: the row's tree was verified
    is_hit: Tensor  # [B] bool: the new root is an expanded node
    root: Tensor  # [B] int64: its place
    last: Tensor  # [B] int64: the last place of the tree that is text now; its path lies in scratch memory
    chosen: Tensor  # [B, D+1] int64: rank of the child that became text, at the root and at each place on the path; -1


def land(trees: Trees, node: Tensor, bonus: Tensor) -> Landing:  # [B] each
    """Find the outcome: the last accepted node (or ROOT, or NO_TREE), and the target's token after it."""
    width = trees.token.shape[2]
    is_tree = node != NO_TREE
    named = trees.node.gather(1, (AT_PLACE - node).clamp(0, trees.unused)[:, None])[:, 0]
    node = torch.where(node <= AT_PLACE, named, node)
    holder = torch.where(node < 0, trees.root, node.clamp(min=0) // width)  # the place that lists the node
    own = torch.where(node < 0, trees.root, trees.place.flatten(1).gather(1, node.clamp(min=0)[:, None])[:, 0])
    last = torch.where(own < 0, holder, own)
    row = torch.arange(len(node), device=node.device)
    is_next = (trees.token[row, last] == bonus[:, None]) & (trees.score[row, last] > NEVER) & (own >= 0)[:, None]
    rank = torch.where(is_next.any(1), is_next.long().argmax(1), -1)
    root = torch.where(rank >= 0, trees.place[row, last].gather(1, rank.clamp(min=0)[:, None])[:, 0], -1)
    is_hit = is_tree & (root >= 0)
    path, n = trees.path[row, last], trees.depth[row, last]  # [B, D]
    ranks = torch.where(path >= 0, trees.node.gather(1, path.clamp(min=0)) % width, -1)
    ranks = torch.nn.functional.pad(ranks, (0, 1), value=-1)
    final = torch.where(own < 0, node % width, rank)
    ranks = ranks.scatter(1, n.clamp(max=ranks.shape[1] - 1)[:, None], final[:, None])
    return Landing(is_tree, is_hit, torch.where(is_hit, root, 0), last, ranks)


def reroot(trees: Trees, landing: Landing) -> None:
    """Keep what is below the new root; rows without a hit lose everything."""
    row = torch.arange(len(landing.root), device=landing.root.device)
    root = landing.root
    n = torch.where(landing.is_hit, trees.depth[row, root], 0)  # levels that are text now; a free place has no depth
    at = (n - 1).clamp(min=0)[:, None, None].expand(-1, trees.path.shape[1], 1)
    is_below = (trees.path.gather(2, at)[..., 0] == root[:, None]) & landing.is_hit[:, None]
    is_below &= trees.is_used
    own = trees.score.flatten(1).gather(1, trees.node[row, root].clamp(min=0)[:, None])
    trees.score = (trees.score - own[..., None]).masked_fill(~is_below[..., None], NEVER)
    moved = torch.arange(trees.path.shape[2], device=root.device) + n[:, None]
    is_left = moved < trees.path.shape[2]
    moved = moved.clamp(max=trees.path.shape[2] - 1)[:, None].expand_as(trees.path)
    trees.path = trees.path.gather(2, moved).masked_fill(~is_left[:, None], -1)
    trees.depth = (trees.depth - n[:, None]).scatter(1, root[:, None], 0)  # also that of a root that is none
    trees.is_used = is_below
    trees.is_used[:, trees.unused] = True
    trees.root = root
    trees.node = trees.node.scatter(1, root[:, None], ROOT)


def keep_chain(trees: Trees) -> None:
    """Drop all expanded nodes but the first children of first children below the root."""
    is_kept = _is_first(trees) & trees.is_used
    trees.score = trees.score.masked_fill(~is_kept[..., None], NEVER)
    is_kept[:, trees.unused] = True
    trees.is_used = is_kept
    trees.place[..., 1:] = -1


def keep_best(trees: Trees, n: int) -> None:
    """Drop all expanded nodes but the root and the best n - 1 others."""
    own = trees.score.flatten(1).gather(1, trees.node.clamp(min=0))
    own = torch.where(trees.node < 0, float("inf"), own).masked_fill(~trees.is_used, NEVER)
    own[:, trees.unused] = NEVER
    order = trees.lineage.argsort(dim=1, stable=True)
    kept = order.gather(1, own.gather(1, order).argsort(dim=1, descending=True, stable=True))[:, :n]
    is_kept = torch.zeros_like(trees.is_used).scatter(1, kept, value=True) & trees.is_used
    is_kept[:, trees.unused] = False
    trees.score = trees.score.masked_fill(~is_kept[..., None], NEVER)
    is_there = is_kept.gather(1, trees.place.clamp(min=0).flatten(1)).view_as(trees.place)
    trees.place = torch.where(is_there, trees.place, -1)
    is_kept[:, trees.unused] = True
    trees.is_used = is_kept


def _is_first(trees: Trees) -> Tensor:  # [B, P+1] bool
    """Whether a place is the root, or a first child of first children."""
    ranks = trees.node.gather(1, trees.path.clamp(min=0).flatten(1)).view_as(trees.path) % trees.token.shape[2]
    return ((ranks == 0) | (trees.path < 0)).all(2)


def _first(trees: Trees, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:  # [B, P+1, W] -> [B, n] twice
    """The n largest scores and their nodes; of equal ones, by lineage, and of siblings the better rank first."""
    width = scores.shape[2]
    places = trees.lineage.argsort(dim=1, stable=True)
    nodes = (places[..., None] * width + torch.arange(width, device=places.device)).flatten(1)
    score, at = scores.flatten(1).gather(1, nodes).sort(dim=1, descending=True, stable=True)
    return score[:, :n], nodes.gather(1, at[:, :n])


NAMES = tuple(field.name for field in fields(Trees))  # of the tensors


def _tensors(trees: Trees) -> list[Tensor]:
    return [getattr(trees, name) for name in NAMES]
