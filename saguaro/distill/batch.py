"""Pieces of texts that are trained on together: a function of (seed, step) and of the texts."""

import hashlib
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from saguaro import rng
from saguaro.distill.corpus import Text
from saguaro.distill.recipe import Recipe
from saguaro.errors import ConfigError


class Texts(Protocol):
    """A list of texts, or a Corpus."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Text:
        """One of them."""


@dataclass(frozen=True)
class Batch:
    """B pieces and the positions to learn at: those that have a next token.

    piece       |--- prompt ---|----- continuation -----|  padding
    learnt at   |-- prompt_weight --|------- 1 -------|
    """

    tokens: Tensor  # [B, L] int64, padded behind
    at: Tensor  # [n] int64 into the flat B * L
    weight: Tensor  # [n] float32
    is_said: Tensor  # [n] bool: the next token is the target's own
    share: float = 1.0  # its tokens over an average batch's: so much its gradient counts, and every token alike


POOL = 16  # batches whose texts are sorted by length among themselves, so that little is padded


class Batches:
    """The batches of a training. Every text comes once before one comes again, with others of about its length."""

    def __init__(self, texts: Texts, recipe: Recipe) -> None:
        self._texts, self._recipe = texts, recipe
        self._usable: list[int] = []  # texts with a continuation to learn
        self._lengths: list[int] = []  # of these, as far as a batch takes them
        digest = hashlib.sha256()
        for index in range(len(texts)):
            text = texts[index]
            if len(text.tokens) > max(text.n_prompt, 1):
                self._usable.append(index)
                self._lengths.append(min(len(text.tokens), recipe.length))
            digest.update(torch.tensor([text.n_prompt, *text.tokens], dtype=torch.int32).numpy().tobytes())
        if not self._usable:
            raise ConfigError(f"none of {len(texts)} texts has a continuation to learn from; sample the target first")
        self._mean_length = sum(self._lengths) / len(self._lengths)
        self.digest = digest.hexdigest()[:16]  # of all texts, in order
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # of one pass over the texts

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        recipe = self._recipe
        draw = torch.Generator().manual_seed(rng.derive_seed(recipe.seed, 2 * step + 1))
        first = step * recipe.batch_texts
        texts = [self._texts[self._pick(first + row)] for row in range(recipe.batch_texts)]
        pieces = [crop(text, recipe.length, float(torch.rand((), generator=draw))) for text in texts]
        n_usual = recipe.batch_texts * self._mean_length
        share = sum(len(piece.tokens) for piece in pieces) / n_usual
        return replace(collate(pieces, recipe.prompt_weight), share=share)

    def _pick(self, number: int) -> int:
        """The text that is the number-th to be seen."""
        n = len(self._usable)
        if self._order[0] != number // n:
            draw = torch.Generator().manual_seed(rng.derive_seed(self._recipe.seed, 2 * (number // n) + 2))
            self._order = (number // n, order_of(self._lengths, self._recipe.batch_texts, draw))
        return self._usable[int(self._order[1][number % n])]


def order_of(lengths: list[int], n_batch: int, draw: torch.Generator) -> Tensor:  # [n] int64
    """An order of n texts in which those of a batch are about equally long, and the batches come in any order.

    >>> order_of([5, 1, 4, 2, 3, 6], 2, torch.Generator().manual_seed(0))
    tensor([1, 3, 0, 5, 4, 2])
    """
    order, length = torch.randperm(len(lengths), generator=draw), torch.tensor(lengths)
    pools = [pool[length[pool].argsort(stable=True)] for pool in order.split(POOL * n_batch)]
    batches = [batch for pool in pools for batch in pool.split(n_batch)]
    whole, rest = [one for one in batches if len(one) == n_batch], [one for one in batches if len(one) < n_batch]
    mixed = [whole[i] for i in torch.randperm(len(whole), generator=draw)]
    return torch.cat([*mixed, *rest])  # the last pool's remainder last: what comes before keeps to its batches


def crop(text: Text, length: int, share: float) -> Text:
    """A piece of at most `length` tokens that holds some of the continuation; share in [0, 1) says which.

    >>> crop(Text([1, 2, 3, 4, 5], n_prompt=3), 3, share=0.0), crop(Text([1, 2], n_prompt=1), 3, share=0.9)
    (Text(tokens=[2, 3, 4], n_prompt=2), Text(tokens=[1, 2], n_prompt=1))
    """
    last = max(0, len(text.tokens) - length)
    first = min(last, max(0, text.n_prompt + 1 - length))
    start = first + int(share * (last - first + 1))
    return Text(text.tokens[start : start + length], max(0, text.n_prompt - start))


def collate(pieces: list[Text], prompt_weight: float) -> Batch:
    """Pieces side by side; positions of no weight are left out."""
    length = max(len(piece.tokens) for piece in pieces)
    tokens = torch.zeros(len(pieces), length, dtype=torch.int64)
    weight = torch.zeros(len(pieces), length)
    is_said = torch.zeros(len(pieces), length, dtype=torch.bool)
    for row, piece in enumerate(pieces):
        n = len(piece.tokens)
        tokens[row, :n] = torch.tensor(piece.tokens)
        weight[row, : n - 1] = prompt_weight
        said = slice(max(0, piece.n_prompt - 1), n - 1)
        weight[row, said], is_said[row, said] = 1.0, True
    at = weight.flatten().nonzero().flatten()
    return Batch(tokens, at, weight.flatten()[at], is_said.flatten()[at])
