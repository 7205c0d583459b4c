"""A draft that reads features of its target (model/feature_spec.py): the base of Eagle and DFlash.

What its files lack is lent by its target: the embedding, the head, or both. Their weights are not its own.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from saguaro.model.feature_spec import FeatureSpec
from saguaro.model.layout import Layout
from saguaro.model.linear import Linear, Packed
from saguaro.model.norm import Norm
from saguaro.model.transformer import Transformer

AS_IT_IS = nn.Identity()  # the norm of what is normed already


class FeatureDraft(Transformer):
    """A transformer that also reads features."""

    reads: FeatureSpec

    def __init__(
        self,
        reads: FeatureSpec,
        device: torch.device,
        dtype: torch.dtype,
        *,
        token_map: Tensor | None,  # [head rows] int64: the token of each row of its own head; None: the head is lent
        has_fc: bool = True,
        embedding: Tensor | None = None,  # [V, D], if it is lent
        head: Linear | None = None,
        kind: type[Packed] | None = None,  # see Layout
    ) -> None:
        spec = reads.layers
        super().__init__(spec if embedding is None else replace(spec, n_vocab=1), device, dtype, token_map, kind)
        self.spec, self.reads = spec, reads
        layout = Layout(device, dtype, kind)
        self.fc = layout.linear(reads.n_features, {"fc": spec.hidden}) if has_fc else None
        if embedding is not None:
            del self.embedding
            self.embedding = embedding
        if head is not None:
            del self.head
            self.__dict__["head"] = head  # not a module of this model: its weights are the target's
        self.make_own(layout)

    def make_own(self, layout: Layout) -> None:
        """Make the other modules that no other transformer has, with empty weights."""

    def read_features(self, features: Tensor) -> Tensor:  # [T, F] -> [T, D]
        """The target's features as what `forward` is given beside tokens."""
        raise NotImplementedError

    def own_parts(self) -> Iterator[Linear | Norm]:
        """The modules with weights that no other transformer has."""
        yield from () if self.fc is None else (self.fc,)
