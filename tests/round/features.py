"""What tests of drafts that read features of their target share."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saguaro.config import SamplingParams
from saguaro.link.inline import Inline
from saguaro.model.transformer import Taps, Transformer
from saguaro.target.request import Request
from tests.round.eagles import TAPS
from tests.round.test_conformance import Rig
from tests.target.test_round import N_KNOWN, SPEC, Written, new_requests, true_logits

MANY: dict[str, Any] = {"max_rows": 200, "max_tokens": 4000, "n_pages": 2000, "draft_tokens": 9000, "lookahead": 2}
PLAIN = ("greedy", "warm")  # a captured draft knows temperatures, and no other rules
ATTENDED = 1e-5  # the kernels' twins compute attention in float32


def accepted(rig: Rig, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """The outputs, and how many speculated tokens were accepted."""
    for request in requests:
        rig.scheduler.add(request)
    n_accepted = 0
    while rig.scheduler.has_work:
        n_accepted += sum(commit.k for commit in rig.play())
    return [request.output for request in requests], n_accepted


def one(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64)


@torch.inference_mode()
def whole(target: Transformer, text: Sequence[int]) -> Tensor:
    """The features of all tokens of a text but the last, from nothing."""
    n = len(text) - 1
    into = torch.empty(n, len(TAPS) * SPEC.hidden, dtype=torch.float64)
    target(torch.tensor(text[:n]), torch.arange(n), Written(n), None, Taps(TAPS, into))
    return into


class Forgets(Inline):
    """Loses its rows and what was computed meanwhile, from time to time."""

    n_rounds = 0

    def is_fresh(self) -> bool:
        self.n_rounds += 1
        return self.n_rounds % 7 == 0


def check_captured(rig: Rig, truth: list[list[int]], *, prepares: bool) -> None:
    """Steps as on a GPU give the true tokens, and the draft is of use."""
    assert rig.round.verifier.runs_ahead
    outputs, n_accepted = accepted(rig, new_requests(n=len(truth)))
    assert outputs == truth
    assert n_accepted > 0, "it is right now and then"
    assert bool(rig.sources["cache"]) == prepares


def check_law(rig: Rig, target: Transformer, n: int) -> None:
    """The second token of n outputs, the first that is speculated, has the target's law: chi-square, three standard
    deviations; seeds are fixed."""
    prompt = [3, 14, 15]
    requests = [Request(f"r{i}", prompt, SamplingParams(max_tokens=3), 100 + i) for i in range(n)]
    rig.run(requests)
    first = true_logits(target, prompt)[:N_KNOWN].double().softmax(-1)
    second = torch.stack([true_logits(target, [*prompt, t])[:N_KNOWN].double().softmax(-1) for t in range(N_KNOWN)])
    law = first @ second
    seen = Counter(request.output[1] for request in requests)
    common = [token for token in range(N_KNOWN) if law[token] * n >= 5]
    cells = [(seen[token], float(law[token]) * n) for token in common]
    cells.append((n - sum(k for k, _ in cells), n - sum(e for _, e in cells)))
    statistic = sum((k - e) ** 2 / e for k, e in cells)
    assert (statistic - len(common)) / math.sqrt(2 * len(common)) < 3
    assert rig.sources["draft"] > 0
