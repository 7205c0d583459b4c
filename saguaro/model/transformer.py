"""Every family of families.py as one module. It computes on tokens and positions, without requests or pages.

A step is flat: T tokens of any number of sequences. The caller passes in attention, which decides what a token may see,
and the products (saguaro.model.products).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from saguaro.model.attention import Attends, Attention
from saguaro.model.block import Block
from saguaro.model.families import FAMILIES
from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.layout import Layout
from saguaro.model.linear import Linear, Packed
from saguaro.model.products import COMPOSED, Products, Residual
from saguaro.model.spec import ModelSpec
from saguaro.model.split import ALONE, Cut, Split, own_spec, shares
from saguaro.types import Progress


@runtime_checkable
class Loads(Protocol):
    """A module with weights of a checkpoint, such as Linear and Norm."""

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name, within the layer -> the view that the tensor fills."""


class Layer(Block):
    """One transformer layer: the attention block and the MLP block, each with a pre-norm and a residual connection."""

    def __init__(self, spec: ModelSpec, layout: Layout, n_in: int | None = None) -> None:
        """n_in: see Attention."""
        super().__init__()
        self.attention = Attention(spec, layout, n_in)
        self.mlp = FAMILIES[spec.architecture].mlp(spec, layout)
        self.attention_norm = layout.norm(spec.hidden, spec.norm_eps, "input_layernorm")
        self.mlp_norm = layout.norm(spec.hidden, spec.norm_eps, "post_attention_layernorm")

    def forward(
        self, index: int, stream: Residual, rope: tuple[Tensor, Tensor], attends: Attends, by: Products, norm: nn.Module
    ) -> Residual:
        """The residual stream after this layer; norm: that of the next layer, or of the head."""
        stream = self.attention.forward(index, stream, rope, attends, by, self.mlp_norm)
        found: Residual = self.mlp.forward(stream, by, norm)
        return found

    def places(self) -> dict[str, Tensor]:
        """See Loads; of all modules in this layer."""
        found: dict[str, Tensor] = {}
        for part in self.modules():
            if part is not self and isinstance(part, Loads):
                found |= part.places()
        return found


@dataclass(frozen=True)
class Taps:
    """The layers whose input is kept, and where: layer i stands for the residual stream that enters it, n_layers for
    the one that leaves the last."""

    layers: Sequence[int]
    into: Tensor  # [T, len(layers) * D], in the order of `layers`

    def keep(self, index: int, x: Tensor) -> None:  # [T, D]
        """Copy the residual stream that enters this layer, if it is wanted."""
        for at, layer in enumerate(self.layers):
            if layer == index:
                self.into[:, at * x.shape[1] : (at + 1) * x.shape[1]] = x


class Transformer(nn.Module):
    """A decoder-only language model, or one rank's part of it. Its weights are empty until saguaro.model.weights fills
    them."""

    reads: FeatureSpec | None = None  # what it reads of a target beside tokens
    is_plain = True  # without features, `forward` is that of a language model

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        token_map: Tensor | None = None,  # [head rows] int64: the token of each row of a reduced head
        kind: type[Packed] | None = None,  # see Layout
        split: Split = ALONE,
    ) -> None:
        super().__init__()
        self.spec, self.device, self.dtype, self.split = spec, device, dtype, split
        self.own_spec = own_spec(spec, split)  # with this rank's heads
        self.products: Products = COMPOSED  # that read these weights
        self.format = str(dtype).removeprefix("torch.")  # of the weights; see saguaro.kernels.formats
        self.token_map = None if token_map is None else token_map.to(device)
        n_head = spec.n_vocab if token_map is None else len(token_map)
        layout = Layout(device, dtype, kind, split)
        self._head_shares, self._words = shares(n_head, split.size), split.share(spec.n_vocab)
        of_head = layout if kind is None or kind.packs_head else replace(layout, kind=None)
        self.head = of_head.linear(spec.hidden, {"lm_head": self._head_shares[split.rank]})
        self.is_tied = spec.is_tied and token_map is None
        self.embedding: Tensor  # [V, D]: a view of a plain head when tied
        if self.is_tied and of_head.kind is None:
            self.embedding = self.head.matrix.t()
        else:
            self.embedding = nn.Parameter(
                torch.empty(self._words.n, spec.hidden, device=device, dtype=dtype), requires_grad=False
            )
        self.layers = nn.ModuleList(self._layer(index, spec, layout) for index in range(spec.n_layers))
        self.norm = layout.norm(spec.hidden, spec.norm_eps, "model.norm")
        self._norms = self._read_through()
        self.frequencies = spec.rope.frequencies(spec.head_dim).to(device)  # [d / 2]
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sin of all positions, made on first use

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attends: Attends,
        by: Products | None = None,
        beside: Taps | Tensor | None = None,
    ) -> Tensor:
        """tokens [T] int64, positions [T] int64 -> hidden states [T, D], before the last norm; beside: what else is
        kept."""
        assert not isinstance(beside, Tensor), "this model reads tokens only"
        by, rope, taps = by or self.products, self._angles(positions), beside
        stream = by.begin(self._embed(tokens), self._norms[0])
        for index, layer in enumerate(self.layers):
            if taps is not None:
                taps.keep(index, stream.x)
            stream = layer(index, stream, rope, attends, by, self._norms[index + 1])
        if taps is not None:
            taps.keep(len(self.layers), stream.x)
        return stream.x

    def logits(self, hidden: Tensor, by: Products | None = None) -> Tensor:  # [L, D] -> [L, V] float32
        """Next-token logits of these hidden states; -inf for tokens that a reduced head lacks."""
        said = self.head_logits(hidden, by)
        if self.token_map is None:
            return said
        full = said.new_full((len(said), self.spec.n_vocab), float("-inf"))
        return full.scatter_(1, self.token_map.expand(said.shape), said)  # a third of index_copy_'s time on a CPU

    def head_logits(self, hidden: Tensor, by: Products | None = None) -> Tensor:  # [L, D] -> [L, head rows] float32
        """Logits of the tokens that the head has, in the head's order."""
        by = by or self.products
        said = by.read(by.begin(hidden, self.norm), self.head, torch.float32)
        return said if self.split.size == 1 else self.split.join(said, [cut.n for cut in self._head_shares])

    def _embed(self, tokens: Tensor) -> Tensor:  # [T] -> [T, D]
        """The embedding of tokens. A rank knows some of them; the others contribute zeros."""
        if self.split.size == 1:
            return self.embedding.index_select(0, tokens)
        own = tokens - self._words.first
        is_own = (own >= 0) & (own < self._words.n)
        found = self.embedding.index_select(0, own.clamp(0, self._words.n - 1))
        return self.split.sum(found.masked_fill_(~is_own[:, None], 0))

    @property
    def embedding_cut(self) -> Cut:
        """The rows of the embedding that are held here."""
        return self._words

    @property
    def packed(self) -> list[Packed]:
        """The packed weights."""
        return [
            part.weight for part in self.modules() if isinstance(part, Linear) and not isinstance(part.weight, Tensor)
        ]

    def pack(self, kind: type[Packed], products: Products, name: str, progress: Progress = lambda *_: None) -> None:
        """Pack all matrices that are plain, one at a time, to the format of this name, which these products read."""
        if self.is_tied and kind.packs_head and isinstance(self.head.weight, Tensor):
            self.embedding = nn.Parameter(self.head.matrix.t().contiguous(), requires_grad=False)
        plain = [part for part in self.modules() if isinstance(part, Linear) and isinstance(part.weight, Tensor)]
        plain = [part for part in plain if part is not self.head or kind.packs_head]
        for n_done, linear in enumerate(plain, 1):
            linear.pack(kind)
            progress("packing weights", n_done, len(plain))
        self.products, self.format = products, name

    def without(self, dropped: Sequence[int]) -> "Transformer":
        """The same model without some layers; weights are shared."""
        twin = Transformer.__new__(Transformer)
        nn.Module.__init__(twin)
        kept = [layer for index, layer in enumerate(self.layers) if index not in dropped]
        twin.spec, twin.device, twin.dtype = replace(self.spec, n_layers=len(kept)), self.device, self.dtype
        twin.token_map, twin.head, twin.embedding = self.token_map, self.head, self.embedding
        twin.is_tied, twin.format, twin.products = self.is_tied, self.format, self.products
        twin.split, twin.own_spec = self.split, replace(self.own_spec, n_layers=len(kept))
        twin._head_shares, twin._words = self._head_shares, self._words
        twin.layers, twin.norm, twin.frequencies = nn.ModuleList(kept), self.norm, self.frequencies
        twin._norms, twin._table = twin._read_through(), None
        return twin

    @staticmethod
    def _layer(index: int, spec: ModelSpec, layout: Layout) -> Layer:
        """Layer `index`, with empty weights."""
        return Layer(spec, layout)

    def _read_through(self) -> list[nn.Module]:
        """The norms applied to the residual stream between layers: of each layer, then of the head."""
        return [*(layer.get_submodule("attention_norm") for layer in self.layers), self.norm]

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin [T, 1, d]; on a GPU from a table, to save kernel launches."""
        if positions.device.type == "cpu":
            return self.turns(positions)
        if self._table is None:
            self._table = self.turns(torch.arange(self.spec.max_length, device=positions.device))
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, d] of positions [T]; sin is negative on the first half (see products.apply_rope_)."""
        angle = positions[:, None].float() * self.frequencies  # [T, d / 2]
        cos, sin = angle.cos(), angle.sin()
        return (
            torch.cat((cos, cos), -1)[:, None].to(self.dtype),
            torch.cat((-sin, sin), -1)[:, None].to(self.dtype),
        )
