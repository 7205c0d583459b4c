"""What a growth step and a verified node must bring, at what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from saguaro.draft.policy.learnt import Learnt
from saguaro.draft.rows import DraftRow


@dataclass(frozen=True)
class MeasuredBudget:
    """A GrowthBudget.

    >>> budget = MeasuredBudget(least=0.1, step=0.3)
    >>> budget.goes_on([], [0.2, 0.2]), budget.goes_on([], [0.2])
    (True, False)
    """

    least: float  # tokens that pay for verifying a node
    step: float  # tokens that pay for another step
    steps: int | None = None

    def goes_on(self, rows: Sequence[DraftRow], worth: Sequence[float]) -> bool:
        """See GrowthBudget."""
        return sum(worth) > self.step


def budget_at(rate: float, learnt: Learnt, n_rows: int, steps: int | None = None) -> MeasuredBudget:
    """The budget of a draft for so many rows, where so many tokens per second are generated.

    A step pays if it adds an accepted token with a probability above what is generated while it runs and while one node
    more per row is verified.
    """
    a_node, a_step = rate * learnt.verification.slope(), rate * learnt.drafting(n_rows).slope()
    return MeasuredBudget(a_node, a_step + n_rows * a_node, steps)
