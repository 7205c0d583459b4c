"""EAGLE-3 drafts for the loop: a random one, and one that is made to be right most of the time."""

from dataclasses import replace

import torch
from torch import Tensor

from saguaro.model.eagle import Eagle, EagleLayer
from saguaro.model.eagle_config import EagleSpec
from saguaro.model.transformer import Transformer
from tests.target.test_round import CPU, N_KNOWN, SPEC, new_model

TAPS = (0, 1, 2)
LACKING = 4  # tokens that the draft's head lacks
EAGLE = EagleSpec(
    layers=replace(SPEC, n_layers=1, n_kv_heads=SPEC.n_heads),
    taps=TAPS,
    target_hidden=SPEC.hidden,
    n_draft_vocab=N_KNOWN - LACKING,
    norm_before_residual=False,
    feeds_normed=False,
    norms_features=False,
    logit_scale=1.0,
)


def calm_model(seed: int) -> Transformer:
    """A target whose next token depends mostly on the last one."""
    model = new_model(seed)
    for layer in model.layers:
        for part in (layer.attention.out, layer.mlp.down):  # type: ignore[union-attr]
            part.weight.mul_(0.15)  # type: ignore[operator, union-attr]
    return model


def random_eagle(target: Transformer, seed: int) -> Eagle:
    """Random weights; the embedding is the target's."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(N_KNOWN, generator=generator)[: N_KNOWN - LACKING].sort().values
    model = Eagle(EAGLE, CPU, torch.float64, token_map=tokens, embedding=target.embedding)
    own = [weight for name, weight in model.named_parameters() if name != "embedding"]
    for weight in own:
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(std=2 / weight.shape[0] ** 0.5, generator=generator)
    return model


def near_eagle(target: Transformer) -> Eagle:
    """Its attention finds the token that it reads, copies its embedding and says what the target's head says of it.
    Features have a small part in everything."""
    model = random_eagle(target, seed=2)
    (layer,) = model.layers
    assert isinstance(layer, EagleLayer)
    assert model.fc is not None
    assert model.token_map is not None
    model.fc.matrix.mul_(0.02)
    layer.mlp.down.weight.mul_(0.05)  # type: ignore[operator, union-attr]
    one = torch.eye(SPEC.hidden, dtype=torch.float64)
    into: list[Tensor] = [3 * one, 3 * one, one]  # queries, keys and values
    layer.attention.qkv.matrix.mul_(0.05)
    layer.attention.qkv.matrix[: SPEC.hidden] = torch.cat(into, 1)
    layer.attention.out.matrix.copy_(one)
    model.head.matrix.copy_(target.head.matrix[:, model.token_map])
    return model
