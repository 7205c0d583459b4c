"""The decoding methods, one row each (DESIGN section 2). Every method gives the target's own tokens."""

import difflib
from dataclasses import dataclass

from saguaro.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """A way to decode: what is prepared while the target verifies, and what happens when that was not foreseen."""

    name: str
    summary: str
    planner: str  # which outcomes are prepared
    fallback: str  # who drafts a row whose outcome was not prepared

    @property
    def drafts(self) -> bool:
        """Whether there is any speculation."""
        return self.fallback != "empty" or self.planner != "nothing"


METHODS = {
    method.name: method
    for method in (
        Method("ar", "the target alone, one token per round", planner="nothing", fallback="empty"),
        Method("ngram", "drafts from the text so far, without a model", planner="nothing", fallback="ngram"),
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
