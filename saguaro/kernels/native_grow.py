"""The bookkeeping of trees on a CPU, by cpu.c: the functions of saguaro.kernels.grow, which documents them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saguaro.kernels.native import at, library

_P, _I, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Trees(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("token", "score", "bin", "place", "node", "position", "depth", "path", "is_used")),
        *((name, _P) for name in ("lineage", "root", "which")),
        *((name, _I) for name in ("n_rows", "n_places", "width", "n_path")),
    )


class _Nodes(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("index", "is_real", "place", "token", "position", "depth", "path", "score")),
        ("n", _I),
    )


class _Chances(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("rate", "edges", "base")),
        *((name, _I) for name in ("n_edges", "n_bins")),
        *((name, _F) for name in ("least", "most", "sure")),
    )


def advance(
    trees: Sequence[Tensor],
    before: Sequence[Tensor] | None,
    ranked: tuple[Tensor, Tensor] | None,
    table: tuple[Tensor, Tensor, Tensor, int],
    root: Tensor,
    which: Tensor,
    temperature: Tensor,
    scratch: Tensor,
    limits: tuple[float, float, float],
    lineages: int,
    n: int,
    depth: int,
    is_chain: bool,
    falls: bool,
) -> tuple[Tensor, ...] | None:
    """See saguaro.kernels.grow.advance. Columns that are padding in every row are left out."""
    b, n_path = len(which), trees[7].shape[2]
    old, tokens, scores = None, None, None
    if before is not None and ranked is not None:
        index, is_real, place, position, own_depth, own_path, score = (each.contiguous() for each in before)
        old = _Nodes(
            at(index), at(is_real), at(place), None, at(position), at(own_depth), at(own_path), at(score),
            index.shape[1],
        )  # fmt: skip
        tokens, scores = ranked[0].contiguous(), ranked[1].float().contiguous()
    rate, edges, base, n_bins = table
    chances = _Chances(at(rate), at(edges), at(base), len(edges), n_bins, *limits)
    whole = torch.empty(5, b, n, dtype=torch.int64)
    real, best = torch.empty(b, n, dtype=torch.bool), torch.empty(b, n)
    paths = torch.empty(b, n, n_path, dtype=torch.int64)
    index, place, chosen, position, deep = whole
    new = _Nodes(
        at(index), at(real), at(place), at(chosen), at(position), at(deep), at(paths), at(best), n
    )  # fmt: skip
    n_real = library().advance(
        _by(_trees(trees, root, which)), _by(old), at(tokens), at(scores), _by(chances), at(temperature),
        lineages, depth, is_chain, falls, _by(new) if n else None,
    )  # fmt: skip
    if n == 0:
        return None
    kept = [index, real, place, chosen, position, deep, paths, best]
    if n_real < n:
        kept = [each[:, :n_real].contiguous() for each in kept]
    place, position, paths = kept[2], kept[4], kept[6]
    kv_index, seen = scratch[:, None] + place, (position + 1).int()
    return *kept, kv_index, seen, (scratch[:, None, None] + paths.clamp(min=0)).int()


class _Settling(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("is_tree", "is_hit", "root", "last", "chosen", "hits", "trials", "rate", "prior")),
        *((name, _P) for name in ("scratch", "pages", "sources", "goes_to")),
        *((name, _I) for name in ("n_bins", "n_pages", "page_size")),
        *((name, _F) for name in ("kept", "strength")),
    )


def settle(
    trees: Sequence[Tensor],
    root: Tensor,
    which: Tensor,
    landed: Sequence[Tensor],  # as `land` returns them
    counts: Tensor,  # [2, bins] float32: hits and trials
    rates: tuple[Tensor, Tensor],  # [bins] float32: the rates, and what they are before any trial
    memory: tuple[float, float],  # share of the counts that is kept per row, and weight of the prior in trials
    scratch: Tensor,  # [B] int64: KV index of place 0
    pages: Tensor,  # [B, P] int32
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Learn from outcomes, in counts and rates. Returns from where to where keys and values are to be moved."""
    sources, goes_to = torch.empty(2, len(which) * trees[7].shape[2], dtype=torch.int64)
    pages, landed = pages.contiguous(), [each.contiguous() for each in landed]
    settling = _Settling(
        *map(at, landed), at(counts[0]), at(counts[1]), at(rates[0]), at(rates[1]), at(scratch), at(pages),
        at(sources), at(goes_to), counts.shape[1], pages.shape[1], page_size, *memory,
    )  # fmt: skip
    n = library().settle(_by(_trees(trees, root, which)), _by(settling))
    return sources[:n], goes_to[:n]


def land(
    trees: Sequence[Tensor], root: Tensor, which: Tensor, node: Tensor, bonus: Tensor, names: tuple[int, int]
) -> tuple[Tensor, ...]:
    """See saguaro.kernels.grow.land."""
    b, n_path = len(which), trees[7].shape[2]
    flags, places = torch.empty(2, b, dtype=torch.bool), torch.empty(2, b, dtype=torch.int64)
    chosen, node, bonus = torch.empty(b, n_path + 1, dtype=torch.int64), node.contiguous(), bonus.contiguous()
    library().land(
        _by(_trees(trees, root, which)), at(node), at(bonus), *names, at(flags[0]), at(flags[1]), at(places[0]),
        at(places[1]), at(chosen),
    )  # fmt: skip
    return flags[0], flags[1], places[0], places[1], chosen


def show(
    trees: Sequence[Tensor],
    root: Tensor,
    which: Tensor,
    is_shown: Tensor,
    n: int,
    depth: int,
    is_chain: bool,
    out: Tensor,
) -> None:
    """See saguaro.kernels.grow.show."""
    root = root.contiguous()
    assert out.stride(1) == 1, out.stride()
    library().show(
        _by(_trees(trees, root, which)), at(root), at(is_shown), n, depth, is_chain, out.data_ptr(), out.stride(0)
    )  # fmt: skip


def worth(trees: Sequence[Tensor], root: Tensor, which: Tensor, is_drawn: bool, least: float) -> list[float]:  # [B]
    """The probability that expanding each row's likeliest open node adds an accepted token, as estimated."""
    found = (ctypes.c_double * len(which))()
    library().worth(_by(_trees(trees, root, which)), is_drawn, least, ctypes.addressof(found))
    return list(found)


def _trees(trees: Sequence[Tensor], root: Tensor, which: Tensor) -> _Trees:
    return _Trees(*map(at, trees), at(root), at(which), len(which), *trees[0].shape[1:], trees[7].shape[2])


def _by(struct: Any) -> Any:
    """A pointer to a struct, which keeps it alive."""
    return None if struct is None else ctypes.byref(struct)
