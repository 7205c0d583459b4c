"""EAGLE-3: a draft that reads features of its target (model/eagle_config.py) beside tokens.

    x = fc(feature of the token before)            for text; for a drafted token: the state of the token before
    h = attention([norm(embedding of the token), norm(x)]) + x,  then the MLP and further layers, as in any transformer
    logits = head(norm(h));  the state of this token is h

Invariant: a token's position is that of the feature it comes with, one less than its own in the text.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from saguaro.model.attention import Attends
from saguaro.model.eagle_config import EagleSpec
from saguaro.model.feature_draft import AS_IT_IS, FeatureDraft
from saguaro.model.layout import Layout
from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import Products, Residual
from saguaro.model.spec import ModelSpec
from saguaro.model.transformer import Layer, Taps


class EagleLayer(Layer):
    """The first layer: its attention reads the token's embedding beside the state."""

    def __init__(self, spec: ModelSpec, layout: Layout) -> None:
        super().__init__(spec, layout, 2 * spec.hidden)
        self.hidden_norm = layout.norm(spec.hidden, spec.norm_eps, "hidden_norm")

    def enter(
        self,
        embedded: Tensor,  # [T, D]
        x: Tensor,  # [T, D]
        rope: tuple[Tensor, Tensor],
        attends: Attends,
        by: Products,
        norm: nn.Module,
        *,
        begins_normed: bool,
    ) -> Residual:
        """The residual stream after this layer. It begins with x, or if begins_normed with norm(x)."""
        normed = self.hidden_norm(x)
        stream = Residual(normed if begins_normed else x, self.mlp_norm)
        read = by.begin(torch.cat((self.attention_norm(embedded), normed), 1), AS_IT_IS)
        stream = self.attention.forward(0, stream, rope, attends, by, self.mlp_norm, read)
        found: Residual = self.mlp(stream, by, norm)
        return found


class Eagle(FeatureDraft):
    """An EAGLE-3 draft."""

    reads: EagleSpec
    is_plain = False

    def make_own(self, layout: Layout) -> None:
        """See FeatureDraft."""
        reads = self.reads
        n_norms = len(reads.taps) if reads.norms_features else 0
        norms = (layout.norm(reads.target_hidden, self.spec.norm_eps, f"fc_norm.{at}") for at in range(n_norms))
        self.fc_norms = nn.ModuleList(norms)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attends: Attends,
        by: Products | None = None,
        beside: Taps | Tensor | None = None,
    ) -> Tensor:
        """tokens [T] int64, positions [T] int64, and the states before them [T, D] -> hidden states [T, D]."""
        assert isinstance(beside, Tensor), "an EAGLE-3 draft reads a state beside every token"
        by, rope, first = by or self.products, self._angles(positions), self.layers[0]
        assert isinstance(first, EagleLayer)
        embedded = self.embedding.index_select(0, tokens).to(self.dtype)  # a lent one may have another while training
        begins_normed = self.reads.norm_before_residual
        stream = first.enter(embedded, beside, rope, attends, by, self._norms[1], begins_normed=begins_normed)
        for index, layer in enumerate(self.layers[1:], 1):
            stream = layer(index, stream, rope, attends, by, self._norms[index + 1])
        return stream.x

    def read_features(self, features: Tensor) -> Tensor:  # [T, F] -> [T, D]
        """The target's features as states."""
        x = features.to(self.dtype)
        if len(self.fc_norms):
            parts = zip(self.fc_norms, x.chunk(len(self.fc_norms), 1), strict=True)
            x = torch.cat([norm(part) for norm, part in parts], 1)
        return x if self.fc is None else self.fc(x)

    def state_of(self, hidden: Tensor) -> Tensor:  # [T, D] -> [T, D]
        """The state that the next token is fed, from the hidden states of `forward`."""
        found: Tensor = self.norm(hidden) if self.reads.feeds_normed else hidden
        return found

    def head_logits(self, hidden: Tensor, by: Products | None = None) -> Tensor:
        """See Transformer."""
        said = super().head_logits(hidden, by)
        return said if self.reads.logit_scale == 1 else said * self.reads.logit_scale

    def own_parts(self) -> Iterator[Linear | Norm]:
        """See FeatureDraft."""
        yield from super().own_parts()
        for norm in self.fc_norms:
            assert isinstance(norm, Norm)
            yield norm

    @staticmethod
    def _layer(index: int, spec: ModelSpec, layout: Layout) -> Layer:
        return Layer(spec, layout) if index else EagleLayer(spec, layout)
