"""The experiments of a report, in the order of the page."""

import difflib

from saguaro.errors import ConfigError
from saguaro.report.experiment import Experiment
from saguaro.report.experiments.drafters import DRAFTERS_COMPARED
from saguaro.report.experiments.exact import EXACT
from saguaro.report.experiments.fig3 import FIG3
from saguaro.report.experiments.fig4 import FIG4
from saguaro.report.experiments.fig5 import FIG5
from saguaro.report.experiments.fig6 import FIG6
from saguaro.report.experiments.fig7 import FIG7
from saguaro.report.experiments.policy import POLICY_AGAINST_FIXED
from saguaro.report.experiments.tables import TABLES
from saguaro.report.experiments.theory import THEORY
from saguaro.report.experiments.trees import TREES

EXPERIMENTS = {
    one.name: one
    for one in (
        FIG3,
        FIG4,
        FIG5,
        FIG6,
        FIG7,
        TABLES,
        THEORY,
        TREES,
        POLICY_AGAINST_FIXED,
        DRAFTERS_COMPARED,
        EXACT,
    )
}


def chosen(names: str | None) -> list[Experiment]:
    """The experiments of a comma-separated list, in the order of the page; without one, all.

    >>> [one.name for one in chosen("fig5, fig3")]
    ['fig3', 'fig5']
    """
    if names is None:
        return list(EXPERIMENTS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(EXPERIMENTS)}"
            raise ConfigError(f"only names {name!r}, which is no experiment; {hint}")
    if not wanted:
        raise ConfigError(f"only is {names!r}; name one or more of {', '.join(EXPERIMENTS)}")
    return [one for one in EXPERIMENTS.values() if one.name in wanted]
