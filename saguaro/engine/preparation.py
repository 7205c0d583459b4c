"""Whether outcomes are prepared, and why. Decided once per engine."""

from dataclasses import dataclass

from saguaro.method import Method


@dataclass(frozen=True)
class Preparation:
    """When outcomes are prepared."""

    when: str  # always, measured or never
    why: str  # one sentence

    def __str__(self) -> str:
        return self.why

    @property
    def why_not(self) -> str | None:
        """Why outcomes are never prepared; None if they may be."""
        return self.why if self.when == "never" else None

    def explain(self, is_any: bool) -> str | None:
        """Why nothing was prepared, in one sentence; None if something was."""
        if is_any:
            return None
        if self.when == "measured":
            return "Nothing was prepared: drafting just in time has been measured to be faster here so far."
        return self.why_not


def choose_preparation(method: Method, *, link: str, is_apart: bool, on_cpu: bool, n_cores: int) -> Preparation:
    """Decide for this machine. is_apart: the draft has its own process; on_cpu: the target computes on the CPU.

    >>> from saguaro.method import find_method
    >>> ssd = find_method("ssd")
    >>> print(choose_preparation(ssd, link="auto", is_apart=False, on_cpu=True, n_cores=2))
    Nothing is prepared: of 2 CPU cores the target needs all, so the draft works between its steps, just in time.
    >>> choose_preparation(ssd, link="auto", is_apart=True, on_cpu=True, n_cores=4).when
    'measured'
    """
    if not method.drafts:
        return Preparation("never", f"Nothing is prepared: method {method.name} speculates nothing.")
    if not method.prepares:
        return Preparation("never", f"Nothing is prepared: method {method.name} drafts just in time.")
    if method.prepare == "always":
        return Preparation("always", f"Every round prepares, as method {method.name} is set to.")
    if is_apart:
        return Preparation("measured", "Outcomes are prepared by the draft's own process, where that is faster.")
    if not on_cpu:
        return Preparation("measured", "Outcomes are prepared while the target computes, where that is faster.")
    if link == "inline":
        why = "with --link inline the draft works between the target's steps"
    else:
        cores = "1 CPU core" if n_cores == 1 else f"{n_cores} CPU cores"
        why = f"of {cores} the target needs all, so the draft works between its steps"
    return Preparation("never", f"Nothing is prepared: {why}, just in time.")
