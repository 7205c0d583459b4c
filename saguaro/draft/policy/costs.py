"""What was learnt, for people to read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saguaro.draft.policy.learnt import Learnt


@dataclass(frozen=True)
class LearntCosts:
    """Times in ms, and the value of a speculation."""

    verification_ms: dict[int, float]  # by tokens
    draft_step_ms: dict[int, float]  # by rows
    accepted: float | None  # tokens per speculation of the model
    tokens_per_round: float | None  # of a row, where the model speculates


def costs_of(state: Mapping[str, Any], tokens: tuple[int, ...] = ()) -> LearntCosts | None:
    """What a kept state says (kept.py); None if it is damaged. Verifications of numbers that were measured, and of
    `tokens`.
    """
    learnt = Learnt()
    try:
        learnt.restore(state["policy"]["learnt"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    verification, accepted = learnt.verification, learnt.by_model.accepted
    counts = sorted({*verification.known, *tokens}) if verification.n else []
    drafted = accepted.mean(0.0) if accepted.n else None
    return LearntCosts(
        verification_ms={count: 1e3 * verification.at(count) for count in counts},
        draft_step_ms={size: 1e3 * each.at(1) for size, each in sorted(learnt.drafted_by_rows.items()) if each.n},
        accepted=drafted,
        tokens_per_round=None if drafted is None else 1 + drafted,
    )
