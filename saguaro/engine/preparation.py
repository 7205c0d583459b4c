"""Whether outcomes are prepared, and why. Decided once per engine."""

from dataclasses import dataclass

from saguaro.engine.placement import Placed
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


def choose_preparation(method: Method, placed: Placed, *, on_cpu: bool, n_cores: int) -> Preparation:
    """Decide for this machine. on_cpu: the target computes on the CPU.

    >>> from saguaro.engine.placement import Placement
    >>> from saguaro.method import find_method
    >>> print(choose_preparation(find_method("ssd"), Placed(Placement(), "tuned"), on_cpu=True, n_cores=2))
    Nothing is prepared: between the target's steps, just in time, is where `saguaro tune` found the draft fastest.
    >>> apart = Placed(Placement("process", 2), "tuned")
    >>> print(choose_preparation(find_method("ssd"), apart, on_cpu=True, n_cores=4))
    Outcomes are prepared by the draft's own process (2 cores, as `saguaro tune` found fastest), where that is faster.
    """
    if not method.drafts:
        return Preparation("never", f"Nothing is prepared: method {method.name} speculates nothing.")
    if not method.prepares:
        return Preparation("never", f"Nothing is prepared: method {method.name} drafts just in time.")
    if method.prepare == "always":
        return Preparation("always", f"Every round prepares, as method {method.name} is set to.")
    if placed.placement.is_apart:
        cores = _cores(placed.placement.threads)
        tuned = f" ({cores}, as `saguaro tune` found fastest)" if placed.why == "tuned" else ""
        whose = "the draft service" if placed.placement.is_service else f"the draft's own process{tuned}"
        return Preparation("measured", f"Outcomes are prepared by {whose}, where that is faster.")
    if not on_cpu:
        return Preparation("measured", "Outcomes are prepared while the target computes, where that is faster.")
    return Preparation("never", f"Nothing is prepared: {_why_inline(placed.why, n_cores)}.")


def _why_inline(why: str, n_cores: int) -> str:
    if why == "asked":
        return "with --link inline the draft works between the target's steps, just in time"
    if why == "tuned":
        return "between the target's steps, just in time, is where `saguaro tune` found the draft fastest"
    if why == "untuned":
        return (
            "the draft works between the target's steps, just in time; whether cores of its own make it faster has not "
            "been measured here: `saguaro tune` measures it"
        )
    cores = f"of {_cores(n_cores)} the target needs all"
    return f"{cores}, so the draft works between its steps, just in time"


def _cores(n: int) -> str:
    return "1 core" if n == 1 else f"{n} cores"
