"""From a step's logits to the target's own tokens: each request's parameters as rows of tensors.

A sampling row with a speculation of length n has n + 1 logits; logit j is after the text and the first j speculated
tokens, so penalties and limits count those as written.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from saguaro.algo.sampling import NEVER, Rules, choose, penalise
from saguaro.engine.request import Request
from saguaro.types import TokenLogprobs

Place = tuple[Request, Sequence[int]]  # a request, and the speculated tokens before this logit


class Sampler:
    """Chooses tokens; holds nothing but the vocabulary's size."""

    def __init__(self, n_known: int) -> None:
        self.n_known = n_known  # ids the tokenizer knows; rows of the head beyond it are padding

    def __call__(self, logits: Tensor, places: Sequence[Place]) -> Tensor:  # [L, V] -> [L] int64
        """The target's token at every place."""
        return choose(self.shape(logits, places), rules(places, logits.device))

    def shape(self, logits: Tensor, places: Sequence[Place]) -> Tensor:  # [L, V], changed in place
        """Penalties, bias and bans applied, and padding of the vocabulary struck out."""
        if logits.shape[1] > self.n_known:
            logits[:, self.n_known :] = NEVER
        for index, (request, before) in enumerate(places):
            adjust(logits[index], request, before)
        return logits


def rules(places: Sequence[Place], device: torch.device) -> Rules:
    """The sampling rules of every place."""
    params = [request.params for request, _ in places]
    floats = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float32).to(device)
    whole = torch.tensor(
        [[r.params.top_k, r.seed, len(r.tokens) + len(before)] for r, before in places], dtype=torch.int64
    ).to(device)
    return Rules(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=whole[:, 0],
        seeds=whole[:, 1],
        positions=whole[:, 2],
    )


def adjust(logits: Tensor, request: Request, before: Sequence[int]) -> None:  # [V], changed in place
    """Penalties, bias and the ban on ending early, of one place."""
    p = request.params
    if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0:
        text = [*request.tokens, *before]
        written = Counter(text[len(request.prompt) :])
        penalise(
            logits,
            torch.tensor(sorted(set(text)), device=logits.device),
            torch.tensor(list(written), dtype=torch.int64, device=logits.device),
            torch.tensor(list(written.values()), dtype=torch.float32, device=logits.device),
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        )
    if p.logit_bias:
        tokens = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[tokens] += torch.tensor(list(p.logit_bias.values()), dtype=torch.float32, device=logits.device)
    if request.n_output + len(before) < p.min_tokens and request.stop_ids:
        logits[torch.tensor(sorted(request.stop_ids), device=logits.device)] = NEVER


def logprobs(logits: Tensor, tokens: Tensor, n_top: int) -> tuple[TokenLogprobs, ...]:  # [n, V], [n]
    """Log-probabilities of these tokens and of the n_top likeliest, under the model's own distribution."""
    all_logprobs = logits.log_softmax(-1)
    chosen = all_logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = all_logprobs.topk(min(n_top, logits.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens.tolist(), chosen, tops, strict=True)
    )
