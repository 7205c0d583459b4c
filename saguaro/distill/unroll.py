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


def unroll(head: Eagle, tokens: Tensor, features: Tensor, n_steps: int) -> list[Tensor]:
    """tokens [B, L] int64, features [B, L - 1, F] -> hidden states of each step [B * (L - 1), D]."""
    n_texts, n_places = tokens.shape[0], tokens.shape[1] - 1
    attend = Unrolled(n_places, n_steps, tokens.device)
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


def visible(n_places: int, n_steps: int, device: torch.device) -> Tensor:  # [n, n_steps * n] bool
    """What each place sees at the last of these steps, of the keys of all of them, one step after the other.

    >>> visible(3, 2, torch.device("cpu")).int()
    tensor([[1, 0, 0, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],
            [1, 1, 1, 0, 0, 1]], dtype=torch.int32)
    """
    every = torch.ones(n_places, n_places, dtype=torch.bool, device=device)
    own = torch.eye(n_places, dtype=torch.bool, device=device)
    return torch.cat((every.tril(), *([own] * (n_steps - 1))), 1)


class Unrolled:
    """Attention of the steps, in order: it keeps their keys and values. See Attend."""

    def __init__(self, n_places: int, n_steps: int, device: torch.device) -> None:
        self._visible = visible(n_places, n_steps, device)
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # by layer: keys and values of each step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """See Attend."""
        keys, values = self._kept.setdefault(layer, ([], []))
        keys.append(k)
        values.append(v)
        if len(keys) == 1:
            return causal(layer, q, k, v, scale)
        # Query heads of a key head become rows, since masked kernels know no groups: keys are never repeated.
        n_kv, (n_heads, n) = k.shape[1], q.shape[1:3]
        rows = q.reshape(len(q), n_kv, -1, q.shape[-1])  # [B, H_kv, groups * n, d]
        mask = self._visible[:, : len(keys) * n].repeat(n_heads // n_kv, 1)
        out = F.scaled_dot_product_attention(
            rows, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, scale=scale
        )
        return out.reshape(q.shape)
