"""The same loop on tables with the engine's own random numbers: frequencies of texts against the target's law.

test_exact proves what the loop does with noise that is as it should be; this is a look at the noise itself, at its keys
and its domains. Seeds are fixed, so nothing here fails by chance.
"""

import math
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from saguaro import rng
from saguaro.config import SamplingParams
from saguaro.draft.policy import learnt
from saguaro.target.request import Request
from tests.clock import Clock
from tests.round.tabular import (
    N_POSITIONS,
    PROMPTS,
    RULES,
    Setting,
    draft_of,
    new_law,
    new_rig,
    text_law,
    under,
)

N_TEXTS, FIRST_SEED = 1500, 10_000
TARGET = new_law(5, width=3)
DRAFT = draft_of(TARGET, 5)


def chi_square(setting: Setting) -> tuple[float, Counter[str]]:
    """How far the texts of many seeds are from the target's law, in standard deviations; and who drafted."""
    params = SamplingParams(max_tokens=setting.max_tokens)
    requests = [Request(f"r{i}", PROMPTS[0], params, FIRST_SEED + i) for i in range(N_TEXTS)]
    with patch.object(learnt, "clock", Clock()):
        commits = new_rig(setting).run(requests)
    law = text_law(setting.target, setting.max_tokens)
    seen = Counter(tuple(request.output) for request in requests)
    assert seen.keys() <= law.keys(), "a text that cannot be"
    statistic = sum((seen[text] - N_TEXTS * p) ** 2 / (N_TEXTS * p) for text, p in law.items())
    n_free = len(law) - 1
    return (statistic - n_free) / math.sqrt(2 * n_free), Counter(commit.source for commit in commits)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["sd", "saguaro", "ssd"])
def test_texts_are_as_frequent_as_they_should_be(method: str, rule: str) -> None:
    setting = Setting(under(rule, method), TARGET, DRAFT, lookahead=2, n_rows=250, n_pages=1000)
    if rule == "rejection":
        setting = replace(setting, saguaro_c=0.5)
    sigmas, sources = chi_square(setting)
    assert sigmas < 3
    assert sources["draft"] > 0
    assert bool(sources["cache"]) == (method != "sd")


def simple(p: list[float], q: list[float]) -> Setting:
    """Speculative decoding with the same two laws everywhere."""
    laws = [torch.tensor(law, dtype=torch.float64).expand(N_POSITIONS, 3, 3) for law in (p, q)]
    return Setting(under("rejection", "sd"), laws[0], laws[1], max_tokens=2, n_rows=250, n_pages=1000)


def test_noise_used_twice_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above could not fail: a bonus drawn with the noise that chose the rejected token."""
    setting = simple([0.5, 0.5, 0.0], [0.3, 0.0, 0.7])
    assert chi_square(setting)[0] < 3
    monkeypatch.setattr(rng, "derive_seeds", lambda seeds, indices: seeds)
    assert chi_square(setting)[0] > 10


def test_coins_of_the_noises_own_domain_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin is the first word of a block: were its domain not its own, it would be the noise of token 0."""
    setting = simple([0.25, 0.5, 0.25], [0.0, 1.0, 0.0])
    assert chi_square(setting)[0] < 3
    monkeypatch.setattr(rng, "COIN_DOMAIN", rng.DOMAIN)
    assert chi_square(setting)[0] > 10
