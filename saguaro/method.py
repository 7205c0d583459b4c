"""The decoding methods, one row each.

Under shared noise every method gives the same tokens as the target alone; under rejection the same distribution.
"""

import difflib
from dataclasses import dataclass

from saguaro.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """A decoding method: what is prepared while the target verifies, and what drafts on a miss."""

    name: str
    summary: str
    planner: str  # which outcomes are prepared: a name in draft.planner, or grow: those that a tree grows to
    fallback: str  # what drafts on a miss: a name in FALLBACKS
    verification: str = "shared"
    prepare: str = "always"  # or measured: prepare only if measurements show a gain
    trees: bool = False  # speculate trees, under shared noise
    cut: float = 0.0  # end a speculation before the first token with a smaller lead; 0: never

    @property
    def is_tree(self) -> bool:
        """Whether it may speculate trees."""
        return self.trees and self.verification == "shared"

    @property
    def drafts(self) -> bool:
        """Whether the method speculates."""
        return self.fallback != "empty" or self.planner != "nothing"

    @property
    def needs_model(self) -> bool:
        """Whether a draft model is needed."""
        return self.planner != "nothing" or self.fallback in ("draft", "batch", "measured")


METHODS = {
    method.name: method
    for method in (
        Method("ar", "the target alone, one token per round", "nothing", "empty"),
        Method("sd", "speculative decoding: draft, then verify", "nothing", "draft", trees=True),
        Method("ngram", "drafts from the text so far, without a model", "nothing", "ngram"),
        Method("amusd", "drafts on as if all were accepted", "last", "draft"),
        Method("pearl", "the same, and on a miss one token while drafting anew", "continuation", "empty"),
        Method("specbranch", "speculates up to the first doubt, branches there", "branch", "draft", cut=1.0),
        Method("ssd-uniform", "every number accepted, equally many bonus tokens", "uniform", "draft"),
        Method("saguaro", "the paper: geometric fan-out, rejection, by batch size", "geometric", "batch", "rejection"),
        Method(
            "ssd",
            "grows a tree while the target verifies; our best",
            "grow",
            "measured",
            prepare="measured",
            trees=True,
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of this name.

    >>> find_method("ar").fallback
    'empty'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(METHODS)}"
        raise ConfigError(f"method is {name!r}; {hint}")
    return METHODS[name]
