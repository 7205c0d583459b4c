"""An EAGLE-3 head at every place of a text at once, several steps of drafting in a row (training-time test).

    text      t0  t1  t2  t3  t4        place j is that of token t[j + 1], which is read with the feature of t[j]
    place         0   1   2   3

    step 0 at place j    reads t[j + 1] with the feature of t[j]
    step k at place j    reads t[j + 1 + k] with the state of step k - 1 at place j, as if it had been drafted
                         at rotary position j + k
                         sees step 0 of the places 0 .. j, and steps 1 .. k of its own place
                         is learnt from what the target says after t[j + 1 + k]

Invariant: step k at place j computes what drafting computes k steps after a text that ends at t[j + 1], if the tokens
drafted so far are the text's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from saguaro.distill.parallel import Parallel, causal
from saguaro.model.eagle import Eagle

BLOCK = (
    128  # places that attend together, each to the later keys of all of them: fewer waste less, more are fewer kernels
)


def unroll(head: Eagle, tokens: Tensor, features: Tensor, n_steps: int) -> list[Tensor]:
    """tokens [B, L] int64, features [B, L - 1, F] -> hidden states of each step [B * (L - 1), D]."""
    n_texts, n_places = tokens.shape[0], tokens.shape[1] - 1
    attend = Unrolled()
    place = torch.arange(n_places, device=tokens.device)
    state = head.read_features(features.flatten(0, 1)).to(head.dtype)
    found: list[Tensor] = []
    for step in range(n_steps):
        if found:
            state = head.state_of(found[-1])
        by = Parallel(n_texts, head.spec.softmax_scale, attend)
        positions = (place + step).clamp(max=n_places - 1).repeat(n_texts)  # beyond are no tokens
        found.append(head(ahead(tokens, step).flatten(), positions, by, by, state))
    return found


def ahead(tokens: Tensor, step: int) -> Tensor:  # [B, L] -> [B, L - 1]
    """The token that each place reads at a step; 0 beyond the text.

    >>> ahead(torch.tensor([[10, 11, 12, 13]]), 1)
    tensor([[12, 13,  0]])
    """
    return F.pad(tokens[:, 1 + step :], (0, min(step, tokens.shape[1] - 1)))


def places_before(at: Tensor, length: int, n_steps: int) -> tuple[Tensor, Tensor]:  # [n] -> [n_steps, n] both
    """The places, into the flat B * (L - 1), whose logits at each step are for the token after position `at`, into the
    flat B * L; and whether there is one.

    >>> places_before(torch.tensor([1, 2, 4 + 3]), 4, 2)[0]
    tensor([[0, 1, 5],
            [0, 0, 4]])
    >>> places_before(torch.tensor([1, 2, 4 + 3]), 4, 2)[1].int()
    tensor([[1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    row, column = at // length, at % length
    place = column - 1 - torch.arange(n_steps, device=at.device)[:, None]
    return row * (length - 1) + place.clamp(min=0), place >= 0


def visible(first: int, last: int, n_steps: int, device: torch.device) -> Tensor:  # [c, last + (n_steps - 1) * c] bool
    """What the c places from `first` to before `last` see in the last of these steps: of the keys of step 0 to `last`,
    then of the c places' own keys of each later step.

    >>> visible(1, 3, 2, torch.device("cpu")).int()
    tensor([[1, 1, 0, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    before = torch.ones(last - first, last, dtype=torch.bool, device=device).tril(first)
    own = torch.eye(last - first, dtype=torch.bool, device=device)
    return torch.cat((before, *([own] * (n_steps - 1))), 1)


class Unrolled:
    """Attention of the steps, in order: it keeps their keys and values. See Attend."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by layer: keys and values of each step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See Attend."""
        keys, values = self._kept.setdefault(layer, ([], []))
        keys.append(k)
        values.append(v)
        if len(keys) == 1:
            return causal(layer, q, k, v, scale)
        n = q.shape[2]
        blocks = [(first, min(n, first + BLOCK)) for first in range(0, n, BLOCK)]
        return torch.cat([_block(q, keys, values, first, last, scale) for first, last in blocks], 2)


def _block(q: Tensor, keys: list[Tensor], values: list[Tensor], first: int, last: int, scale: float) -> Tensor:
    """Attention of the places from `first` to before `last`: [B, H, c, d]."""

    def seen(every: list[Tensor]) -> Tensor:  # [B, H_kv, n, d] of each step
        return torch.cat((every[0][:, :, :last], *(later[:, :, first:last] for later in every[1:])), 2)

    # Query heads of a key head become rows, since masked kernels know no groups: keys are never repeated.
    own, n_kv = q[:, :, first:last], keys[0].shape[1]
    rows = own.reshape(len(q), n_kv, -1, q.shape[-1])  # [B, H_kv, groups * c, d]
    mask = visible(first, last, len(keys), q.device).repeat(q.shape[1] // n_kv, 1)
    out = F.scaled_dot_product_attention(rows, seen(keys), seen(values), attn_mask=mask, scale=scale)
    return out.reshape(own.shape)
