"""DFlash: a block draft. One pass gives candidates for all positions of a block (model/dflash_config.py).

    text     c = norm(fc(feature)): in every layer the keys and values of a token of the text are those of its c
    block    [last token, mask, mask, ...] through all layers, as in any transformer; its tokens see the text's keys and
             values, and all of each other
    logits   head(norm(h)): at a mask, those of the token at that very position

So tokens of a text have keys and values only, and `forward` is of two kinds, by what it is given beside tokens.
Invariant: a token's position is that in the text, in both.
"""

from collections.abc import Iterator

from torch import Tensor

from saguaro.model.attention import Attends, Attention
from saguaro.model.dflash_config import DFlashSpec
from saguaro.model.feature_draft import AS_IT_IS, FeatureDraft
from saguaro.model.layout import Layout
from saguaro.model.linear import Linear
from saguaro.model.norm import Norm
from saguaro.model.products import Products, QKNormRope
from saguaro.model.transformer import Taps


class DFlash(FeatureDraft):
    """A DFlash draft."""

    reads: DFlashSpec

    def make_own(self, layout: Layout) -> None:
        """See FeatureDraft."""
        self.hidden_norm = layout.norm(self.spec.hidden, self.spec.norm_eps, "hidden_norm")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attends: Attends,
        by: Products | None = None,
        beside: Taps | Tensor | None = None,
    ) -> Tensor:
        """A block: tokens [T] int64, positions [T] int64 -> hidden states [T, D]. Or, with what `read_features` gives
        of T tokens of texts [T, D], their keys and values: returns what it is given."""
        if not isinstance(beside, Tensor):
            return super().forward(tokens, positions, attends, by, beside)
        by, rope = by or self.products, self._angles(positions)
        for index, layer in enumerate(self.layers):
            attention = layer.get_submodule("attention")
            assert isinstance(attention, Attention)
            turn = QKNormRope(attention.n_heads, attention.q_norm, attention.k_norm, *rope)
            by.read_heads(by.begin(beside, AS_IT_IS), attention.qkv, turn, attends.place(index))
        return beside

    def read_features(self, features: Tensor) -> Tensor:  # [T, F] -> [T, D]
        """See FeatureDraft: c."""
        assert self.fc is not None
        found: Tensor = self.hidden_norm(self.fc(features.to(self.dtype)))
        return found

    def own_parts(self) -> Iterator[Linear | Norm]:
        """See FeatureDraft."""
        yield from super().own_parts()
        yield self.hidden_norm
