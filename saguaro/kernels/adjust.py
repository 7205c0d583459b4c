"""Penalties, biases and allowed tokens, applied to a step's logits in place, as saguaro.target.sampler does.

In this order: tokens that are not allowed, repetition, presence and frequency penalties, then biases. A token that is
not allowed stays so, since nothing is added to -inf. NaN and +inf stay where they are, so that the row is still broken.

A row brings the counts that have changed since its last step (saguaro.kernels.row_rules), as they are now, so to write
them twice does no harm. The tokens on the path to a node count as output.

The first kernel, one program per row of logits, writes what has changed and finds out whether any allowed token is
left. The second one changes blocks of tokens. Rows without such rules end both at once.
"""

# Triton kernels have their own annotations, not types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from saguaro.algo.sampling import NEVER, penalise
from saguaro.kernels.launch import early, follow
from saguaro.kernels.limits import width_of
from saguaro.kernels.row_rules import (
    BIASED,
    CHANGED,
    FREQUENCY,
    KINDS,
    MASKED,
    NOTHING,
    PENALISED,
    PRESENCE,
    REPETITION,
    SEAT,
    STRICT,
    Tables,
    Texts,
)

BLOCK = 4096  # tokens per program of the second kernel
N_WARPS = 8
_KINDS, _SEAT, _REPETITION = tl.constexpr(KINDS), tl.constexpr(SEAT), tl.constexpr(REPETITION)
_PRESENCE, _FREQUENCY, _CHANGED = tl.constexpr(PRESENCE), tl.constexpr(FREQUENCY), tl.constexpr(CHANGED)
_PENALISED, _BIASED, _MASKED, _STRICT = (
    tl.constexpr(PENALISED), tl.constexpr(BIASED), tl.constexpr(MASKED), tl.constexpr(STRICT)
)  # fmt: skip


def adjust(
    logits: Tensor,  # [L, V] float32, rows contiguous, changed in place; L = R * (N + 1)
    rules: Tensor,  # [R, CHANGED + C] int64: see saguaro.kernels.row_rules
    texts: Texts,
    tables: Tables,  # counts are changed
    n_known: int,  # columns that are tokens; other columns are ignored
) -> None:
    """Apply the rules of each row to the logits after its text and after each of its nodes."""
    width, paths = width_of(logits, rules, texts.n), texts.paths
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == rules.stride(1) == 1, (logits.stride(), rules.stride())
    assert tables.counts.shape[1] == n_known <= 32 * tables.masks.shape[1], (n_known, tables.masks.shape)
    assert paths is None or paths.is_contiguous(), paths.stride()
    n_changed, n_words = rules.shape[1] - CHANGED, tables.masks.shape[1]
    is_left = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    given = (logits, logits.stride(0), rules, rules.stride(0), width)
    launch = {"BLOCK": BLOCK, "num_warps": N_WARPS, "enable_fp_fusion": False, **early(logits.device)}
    _begin_kernel[(len(logits),)](
        *given, tables.counts, tables.masks, tables.which, is_left, n_known, n_words, n_changed,
        C_PAD=triton.next_power_of_2(n_changed), **launch,
    )  # fmt: skip
    _adjust_kernel[(triton.cdiv(n_known, BLOCK), len(logits))](
        *given, texts.n, texts.n.stride(0), texts.tokens, texts.tokens if paths is None else paths,
        *tables, is_left, n_known, n_words,
        D=0 if paths is None else paths.shape[2], N_BIASES=tables.biases.shape[1], **launch,
    )  # fmt: skip


def adjust_plain(logits: Tensor, rules: Tensor, texts: Texts, tables: Tables, n_known: int) -> None:
    """The twin of `adjust`."""
    width, lines = width_of(logits, rules, texts.n), rules.tolist()
    for row, (kinds, seat, *_, changed) in enumerate((*line[:CHANGED], line[CHANGED:]) for line in lines):
        if kinds & PENALISED:
            for each in changed:
                if each != NOTHING:
                    tables.counts[seat, each & 0xFFFFFFFF] = each >> 32
        first = width - 1 - int(texts.n[row])
        for column in range(first, width) if kinds else ():
            own, node = logits[row * width + column, :n_known], column - first - 1
            if kinds & MASKED:
                _forbid_plain(own, tables, int(tables.which[row * width + column]), bool(kinds & STRICT))
            if kinds & PENALISED:
                nodes = list(range(node + 1)) if texts.paths is None or node < 0 else texts.paths[row, node].tolist()
                before = [int(texts.tokens[row * width + first + 1 + at]) for at in nodes if at >= 0]
                _penalise_plain(own, tables.counts[seat], before, rules[row])
            if kinds & BIASED:
                pairs = tables.biases[seat][tables.biases[seat] >> 32 < n_known]
                own[pairs >> 32] += pairs.view(torch.float32)[::2]


def _forbid_plain(logits: Tensor, tables: Tables, which: int, is_strict: bool) -> None:  # [V]
    if which < 0:
        return
    at = torch.arange(len(logits), device=logits.device)
    may = (tables.masks[which][at // 32] >> (at % 32).int()) & 1 == 1
    if is_strict or bool((logits[may] > NEVER).any()):
        logits[~may & (logits < float("inf"))] = NEVER


def _penalise_plain(logits: Tensor, counts: Tensor, before: list[int], rules: Tensor) -> None:  # [V], [V]
    n_path = torch.zeros_like(logits)
    for token in before:
        if token < len(logits):
            n_path[token] += 1
    seen = ((counts > 0) | (n_path > 0)).nonzero()[:, 0]
    n_written = (counts.float() - 1).clamp(min=0) + n_path
    written = n_written.nonzero()[:, 0]
    floats = rules[REPETITION:CHANGED].contiguous().view(torch.float32)[::2].tolist()
    penalise(logits, seen, written, n_written[written], *floats)


@triton.jit
def _may(masks, which, at, n_words, is_known):
    """Whether these tokens are allowed by a mask."""
    words = tl.load(masks + which.to(tl.int64) * n_words + at // 32, mask=is_known, other=0)
    return ((words >> (at % 32)) & 1) == 1


@triton.jit(do_not_specialize=["width"])
def _begin_kernel(
    logits, stride, rules, rule_stride, width, counts, masks, masks_at, is_left, n_known, n_words, n_changed,
    C_PAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: of one row of logits, whether any allowed token is left; the first of a text writes its counts."""
    position = tl.program_id(0).to(tl.int64)
    own = rules + position // width * rule_stride
    follow(EARLY)
    kinds = tl.load(own + _KINDS)
    if ((kinds & _PENALISED) != 0) & (position % width == 0):
        at = tl.arange(0, C_PAD)
        changed = tl.load(own + _CHANGED + at, mask=at < n_changed, other=-1)
        token, seat = changed & 0xFFFFFFFF, tl.load(own + _SEAT)
        tl.store(counts + seat * n_known + token, (changed >> 32).to(tl.int16), mask=changed >= 0)
    if ((kinds & _MASKED) != 0) & ((kinds & _STRICT) == 0):
        which, found = tl.load(masks_at + position), tl.full([], 0, tl.int32)
        if which >= 0:
            for begin in range(0, n_known, BLOCK):
                if found == 0:
                    at = begin + tl.arange(0, BLOCK)
                    given = tl.load(logits + position * stride + at, mask=at < n_known, other=float("-inf"))
                    is_good = _may(masks, which, at, n_words, at < n_known) & (given > float("-inf"))
                    found = tl.max(is_good.to(tl.int32), axis=0)
        tl.store(is_left + position, found)


@triton.jit
def _on_path(tokens, paths, row, first, node, width, at, begin, D: tl.constexpr, BLOCK: tl.constexpr):
    """How often each of these tokens is on the path to a node; -1: the text's last token, before all nodes."""
    found = tl.zeros([BLOCK], tl.int32)
    n = (node + 1).to(tl.int32)
    if D > 0:
        n = tl.where(node >= 0, D, 0)
    for i in range(0, n):
        other = node * 0 + i
        if D > 0:
            other = tl.load(paths + (row * (width - 1) + node) * D + i)
        if other >= 0:
            token = tl.load(tokens + row * width + first + 1 + other)
            if (token >= begin) & (token < begin + BLOCK):
                found += (at == token).to(tl.int32)
    return found


@triton.jit(do_not_specialize=["width"])
def _adjust_kernel(
    logits, stride, rules, rule_stride, width, ns, n_stride, tokens, paths, counts, biases, masks, masks_at, is_left,
    n_known, n_words, D: tl.constexpr, N_BIASES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one block of tokens of one row of logits."""
    begin, position = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    row = position // width
    own = rules + row * rule_stride
    follow(EARLY)
    kinds = tl.load(own + _KINDS)
    first = width - 1 - tl.load(ns + row * n_stride)  # the column of the text's last token
    node = position % width - first - 1
    if (kinds != 0) & (node >= -1):
        seat = tl.load(own + _SEAT)
        at = begin + tl.arange(0, BLOCK)
        is_known = at < n_known
        given = tl.load(logits + position * stride + at, mask=is_known, other=0.0)
        found = given
        if (kinds & _MASKED) != 0:
            which, holds = tl.load(masks_at + position), kinds & _STRICT
            if holds == 0:
                holds = tl.load(is_left + position).to(tl.int64)
            if (which >= 0) & (holds != 0):
                stays = _may(masks, which, at, n_words, is_known) | ~(given < float("inf"))
                found = tl.where(stays, found, float("-inf"))
        if (kinds & _PENALISED) != 0:
            count = tl.load(counts + seat * n_known + at, mask=is_known, other=0).to(tl.int32)
            more = _on_path(tokens, paths, row, first, node, width, at, begin, D, BLOCK)
            written = (tl.maximum(count - 1, 0) + more).to(tl.float32)
            repetition = tl.load(own + _REPETITION).to(tl.int32).to(tl.float32, bitcast=True)
            presence = tl.load(own + _PRESENCE).to(tl.int32).to(tl.float32, bitcast=True)
            frequency = tl.load(own + _FREQUENCY).to(tl.int32).to(tl.float32, bitcast=True)
            repeated = tl.where(found > 0, tl.div_rn(found, tl.zeros_like(found) + repetition), found * repetition)
            found = tl.where((count > 0) | (more > 0), repeated, found)
            found = tl.where(written > 0, found - (presence + frequency * written), found)
        if (kinds & _BIASED) != 0:
            of = tl.load(biases + seat * N_BIASES + tl.arange(0, N_BIASES)) >> 32
            low, high = tl.sum((of < begin).to(tl.int32)), tl.sum((of < begin + BLOCK).to(tl.int32))
            for i in range(low, high):
                pair = tl.load(biases + seat * N_BIASES + i)
                bias = pair.to(tl.int32).to(tl.float32, bitcast=True)
                found = tl.where(at == (pair >> 32), found + bias, found)
        is_new = found.to(tl.int32, bitcast=True) != given.to(tl.int32, bitcast=True)
        tl.store(logits + position * stride + at, found, mask=is_known & is_new)
