"""The decoding methods, one row each.

Under shared noise every method gives the same tokens as the target alone; under rejection the same distribution.
"""

import difflib
from dataclasses import dataclass

from saguaro.errors import ConfigError

FAN_OUTS = ("uniform", "geometric", "general", "list")  # F_k outcomes after k accepted tokens
MODEL_FALLBACKS = ("draft", "batch", "batch-random", "measured")  # fallbacks that draft with the model
GROWTHS = ("nothing", "continuation", "branch", *FAN_OUTS, "best")


@dataclass(frozen=True)
class Method:
    """A decoding method: what is prepared while the target verifies, and what drafts on a miss."""

    name: str
    summary: str
    growth: str  # what is prepared: nothing, best (the likeliest nodes), or chains after outcomes (see GROWTHS)
    fallback: str  # what drafts on a miss: a name in FALLBACKS
    verification: str = "shared"
    prepare: str = "always"  # or measured: prepare only if measurements show a gain
    trees: bool = False  # may speculate trees
    cut: float = 0.0  # end a speculation before the first token less likely than this; 0: never

    @property
    def drafts(self) -> bool:
        """Whether the method speculates."""
        return self.fallback != "empty" or self.prepares

    @property
    def needs_model(self) -> bool:
        """Whether a draft model is needed."""
        return self.prepares or self.fallback in MODEL_FALLBACKS

    @property
    def is_measured(self) -> bool:
        """Whether everything that a draft does is measured, so that a draft elsewhere is asked only where that pays."""
        return self.prepare == "measured" and self.fallback == "measured"

    @property
    def prepares(self) -> bool:
        """Whether it prepares for outcomes."""
        return self.growth != "nothing"

    @property
    def has_fan_out(self) -> bool:
        """Whether it prepares numbers of outcomes that may be set."""
        return self.growth in FAN_OUTS


METHODS = {
    method.name: method
    for method in (
        Method("ar", "the target alone, one token per round", "nothing", "empty"),
        Method("sd", "speculative decoding: draft, then verify", "nothing", "draft", trees=True),
        Method("ngram", "drafts from the text so far, without a model", "nothing", "ngram"),
        Method("amusd", "drafts on as if all were accepted", "continuation", "draft"),
        Method("pearl", "the same, and on a miss one token while drafting anew", "continuation", "empty"),
        Method("specbranch", "speculates up to the first doubt, branches there", "branch", "draft", cut=0.6),
        Method("ssd-uniform", "every number accepted, equally many bonus tokens", "uniform", "draft"),
        Method("swiftspec", "keeps growing one tree, verifies its best part", "best", "draft", trees=True),
        Method("saguaro", "the paper: geometric fan-out, rejection, by batch size", "geometric", "batch", "rejection"),
        Method(
            "ssd",
            "grows a tree while the target verifies; our best",
            "best",
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
