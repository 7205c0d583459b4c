"""From a step's logits to the target's own tokens, with each request's parameters as tensor rows.

A sampling row with a speculation of length n has n + 1 logits; logit j is after the text and the first j speculated
tokens, so penalties and limits count those tokens as output.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saguaro.algo import sampling, tree
from saguaro.algo.sampling import NEVER, Rules, choose, penalise
from saguaro.algo.verification import BROKEN, is_broken
from saguaro.config import SamplingParams
from saguaro.kernels.best import Ranker
from saguaro.target.grammar import forbid
from saguaro.target.request import Request
from saguaro.types import TokenLogprobs

Context = tuple[Request, Sequence[int]]  # a request, and the speculated tokens before this logit

Limiter = Callable[..., tuple[Tensor, Tensor]]  # see saguaro.kernels.limits

MANY = 2**31  # larger than any vocabulary, limits top_k


class Sampler:
    """Chooses tokens. Holds only the vocabulary size, and a kernel for plain requests if there is one."""

    def __init__(self, n_known: int, kernel: Ranker | None = None, limits: Limiter | None = None) -> None:
        """limits: with it, the kernel also takes requests with top-k, top-p and min-p."""
        self.n_known = n_known  # number of tokenizer ids; later rows of the head are padding
        self._kernel, self._limits = kernel, limits

    def __call__(self, logits: Tensor, places: Sequence[Context]) -> Tensor:  # [L, V] -> [L] int64
        """The target's token at every position, BROKEN if logits are not finite. The code path depends on the request
        alone, not on the other rows."""
        each = rules(places, logits.device)
        if self._kernel is None or logits.dtype != torch.float32:
            broken = is_broken(logits[:, : self.n_known])
            return choose(self.shape(logits, places), each).masked_fill_(broken, BROKEN)
        given = (logits, each.temperature, each.seeds, each.positions, self.n_known, 1)
        if self._limits is None:
            (ranked, scores), takes = self._kernel(*given), is_plain
        else:
            restricted = each.temperature, each.top_k, each.top_p, each.min_p.log(), self.n_known
            (ranked, scores), takes = self._kernel(*given, self._limits(logits, *restricted)), is_unadjusted
        tokens = ranked[:, 0]
        at, odd = _others(places, takes, logits.device)
        if odd:
            tokens[at] = choose(self.shape(logits[at], odd), each.select(at))
        return tokens.masked_fill_(scores[:, 0].isnan(), BROKEN)

    def rank(
        self, logits: Tensor, places: Sequence[Context], n: int
    ) -> tuple[Tensor, Tensor]:  # [L, V] -> [L, n] twice
        """The n most likely target tokens at every position, best first, and their scores. May change the logits."""
        each, n = rules(places, logits.device), min(n, self.n_known)
        if self._kernel is None or logits.dtype != torch.float32:
            return sampling.rank(self.shape(logits, places)[:, : self.n_known], each, n)
        tokens, scores = self._kernel(logits, each.temperature, each.seeds, each.positions, self.n_known, n)
        at, odd = _others(places, is_plain, logits.device)
        if odd:
            tokens[at], scores[at] = sampling.rank(self.shape(logits[at], odd)[:, : self.n_known], each.select(at), n)
        return tokens, scores

    def shape(self, logits: Tensor, places: Sequence[Context]) -> Tensor:  # [L, V], changed in place
        """Apply grammars, penalties, bias, bans and allowed tokens, and mask the padding of the vocabulary."""
        if logits.shape[1] > self.n_known:
            logits[:, self.n_known :] = NEVER
        masked = [(index, r.grammar, [*r.output, *before]) for index, (r, before) in enumerate(places) if r.grammar]
        if masked:
            masks = [grammar.mask(output) for _, grammar, output in masked]
            forbid(logits, [index for index, _, _ in masked], masks, self.n_known)
        for index, (request, before) in enumerate(places):
            adjust(logits[index], request, before)
        return logits


def _others(
    places: Sequence[Context], takes: Callable[[SamplingParams], bool], device: torch.device
) -> tuple[Tensor, list[Context]]:
    """The positions of requests that the kernel does not take: their indices and contexts."""
    odd = [index for index, (request, _) in enumerate(places) if not takes(request.params)]
    return torch.tensor(odd, device=device), [places[index] for index in odd]


def is_plain(params: SamplingParams) -> bool:
    """Whether a token is the argmax of noise plus unmodified logits, independent of earlier tokens.

    >>> is_plain(SamplingParams(temperature=0.7)), is_plain(SamplingParams(top_p=0.9))
    (True, False)
    """
    is_free = params.temperature == 0 or (params.top_k <= 0 and params.top_p == 1 and params.min_p == 0)
    return is_free and is_unadjusted(params)


def is_unadjusted(params: SamplingParams) -> bool:
    """Whether a token depends on the logits alone, and not on earlier tokens, a bias or allowed tokens.

    >>> is_unadjusted(SamplingParams(top_p=0.9)), is_unadjusted(SamplingParams(presence_penalty=1.0))
    (True, False)
    """
    is_fresh = params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
    is_open = params.structured is None and not params.allowed_token_ids
    return is_fresh and is_open and not params.logit_bias and params.min_tokens == 0


def contexts(request: Request, tokens: Sequence[int], parents: Sequence[int] | None) -> list[Context]:
    """What is before each logit of a row: the text, and the tokens on the path to a node."""
    if parents is None:
        return [(request, tokens[:n]) for n in range(len(tokens) + 1)]
    paths = ([tokens[node] for node in path] for path in tree.paths(parents))
    return [(request, ()), *((request, path) for path in paths)]


def rules(places: Sequence[Context], device: torch.device) -> Rules:
    """The sampling rules of every position."""
    params = [request.params for request, _ in places]
    floats = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float32).to(device)
    whole = torch.tensor(
        [[min(r.params.top_k, MANY), r.seed, len(r.tokens) + len(before)] for r, before in places], dtype=torch.int64
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
    """Apply penalties, bias, allowed tokens and min_tokens to one position."""
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
    if p.allowed_token_ids:
        allowed = torch.tensor(p.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(NEVER)
        logits[allowed] = kept
    if request.n_output + len(before) < p.min_tokens and request.stop_ids:
        ends = torch.tensor(sorted(request.stop_ids), device=logits.device)
        before_ban = logits[ends]
        logits[ends] = NEVER
        is_bound = request.grammar is not None or bool(p.allowed_token_ids)
        if is_bound and bool(logits.isneginf().all()):  # the output is complete and nothing else is allowed
            logits[ends] = before_ban


def logprobs(logits: Tensor, tokens: Tensor, n_top: int) -> tuple[TokenLogprobs, ...]:  # [n, V], [n]
    """Log-probabilities of these tokens and of the n_top most likely, under the unmodified distribution."""
    all_logprobs = logits.log_softmax(-1)
    chosen = all_logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = all_logprobs.topk(min(n_top, logits.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(tokens.tolist(), chosen, tops, strict=True)
    )


def prompt_logprobs(logits: Tensor, tokens: Tensor, n_top: int) -> tuple[TokenLogprobs, ...]:  # [n, V], [n]
    """The same for prompt tokens, with ranks. A token beyond the vocabulary has logprob -inf and the last rank.

    Logits that are not finite give NaN.
    """
    n_vocab = logits.shape[1]
    all_logprobs = logits.log_softmax(-1)
    own = all_logprobs.gather(1, tokens[:, None].clamp(max=n_vocab - 1))
    own = torch.where(tokens[:, None] < n_vocab, own, NEVER).masked_fill_(is_broken(logits)[:, None], float("nan"))
    ranks = ((all_logprobs > own).sum(-1) + 1).tolist()
    best = all_logprobs.topk(min(n_top, n_vocab), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, (ids, values), rank in zip(tokens.tolist(), own[:, 0].tolist(), tops, ranks, strict=True)
    )
