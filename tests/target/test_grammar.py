"""Masks in logits: what is written on a CPU is what is written on a device."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saguaro.algo.sampling import NEVER
from saguaro.target.grammar import Guide, Mask, forbid, together


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(n_vocab=st.integers(1, 40), n_padding=st.integers(0, 9), seed=st.integers(0, 99), is_reduced=st.booleans())
def test_only_what_a_mask_allows_is_left(n_vocab: int, n_padding: int, seed: int, is_reduced: bool) -> None:
    """Rows without a mask stay as they are, and so does one of which the mask would leave nothing."""
    chance = np.random.default_rng(seed)
    logits = torch.from_numpy(chance.normal(size=(4, n_vocab + n_padding))).float()
    logits[:, n_vocab:] = NEVER
    if is_reduced:
        logits[torch.from_numpy(chance.random(logits.shape) < 0.5)] = NEVER
    rows = [0, 1, 3]
    may = chance.random((3, n_vocab)) < 0.5
    wanted = logits.clone()
    for row, each in zip(rows, may, strict=True):
        kept = [v if ok else NEVER for v, ok in zip(logits[row].tolist(), each.tolist(), strict=False)]
        if max(kept) > NEVER:
            wanted[row, :n_vocab] = torch.tensor(kept)
    masks = list(np.packbits(may, axis=1, bitorder="little"))
    for way in (forbid, together):
        found = logits.clone()
        way(found, rows, masks, n_vocab)
        assert found.equal(wanted)


class Slow:
    """Whose third mask takes long."""

    def __init__(self) -> None:
        self.is_slow, self.n_asked = False, 0

    def mask(self, output: Sequence[int]) -> Mask:
        self.n_asked += 1
        self.is_slow = self.n_asked == 3
        return np.array([1, 2], np.uint8)

    def accepts(self, output: Sequence[int]) -> bool:
        return len(output) == 1


def test_a_draft_gives_up_a_grammar_that_takes_long() -> None:
    slow = Slow()
    guide = Guide(slow)
    for n_asked in range(1, 6):
        assert guide.mask([]).tolist() == ([1, 2] if n_asked <= 3 else [255, 255])
        assert guide.is_slow == (n_asked >= 3)
    assert slow.n_asked == 3
    assert guide.accepts([1])
    assert not guide.accepts([])
