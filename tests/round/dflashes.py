"""DFlash drafts for the loop: a random one, and one that is made to be right now and then."""

from dataclasses import replace

import torch

from saguaro.model.dflash import DFlash
from saguaro.model.dflash_config import DFlashSpec
from saguaro.model.transformer import Layer, Transformer
from tests.round.eagles import LACKING, TAPS
from tests.target.test_round import CPU, N_KNOWN, SPEC

MASK = SPEC.n_vocab - 1  # no token that the target says
DFLASH = DFlashSpec(
    layers=replace(SPEC, n_layers=1, n_kv_heads=SPEC.n_heads),
    taps=TAPS,
    target_hidden=SPEC.hidden,
    n_draft_vocab=N_KNOWN - LACKING,
    block_size=8,
    mask_token=MASK,
)


def random_dflash(target: Transformer, seed: int) -> DFlash:
    """Random weights; the embedding is the target's, but for the mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(N_KNOWN, generator=generator)[: N_KNOWN - LACKING].sort().values
    embedding = target.embedding.data.clone()
    embedding[MASK].zero_()
    model = DFlash(DFLASH, CPU, torch.float64, token_map=tokens, embedding=embedding)
    own = [weight for name, weight in model.named_parameters() if name != "embedding"]
    for weight in own:
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(std=2 / weight.shape[0] ** 0.5, generator=generator)
    return model


def near_dflash(target: Transformer) -> DFlash:
    """A mask asks for nothing, so it sees all keys alike: it says what the target's head says of the tokens of the
    block. Features have a small part in everything."""
    model = random_dflash(target, seed=2)
    (layer,) = model.layers
    assert isinstance(layer, Layer)
    assert model.token_map is not None
    model.hidden_norm.weight.fill_(0.03)
    layer.mlp.down.weight.mul_(1e-3)  # type: ignore[operator, union-attr]
    one = torch.eye(SPEC.hidden, dtype=torch.float64)
    layer.attention.qkv.matrix[:, -SPEC.hidden :] = one
    layer.attention.out.matrix.copy_(one)
    model.head.matrix.copy_(target.head.matrix[:, model.token_map])
    return model
