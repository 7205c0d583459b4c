"""Cells of a benchmark: method[:lookahead[:budget[:nodes[:width]]]][/inline][/process[:cores]][/always].

Without nodes it speculates chains. `always` forces preparing, and drafting the misses with the model: nothing is left
to the policy.
"""

from typing import Any

from saguaro.method import find_method


def settings_of(cell: str) -> dict[str, Any]:
    """The engine's settings.

    >>> settings_of("sd:8")
    {'method': 'sd', 'lookahead': 8, 'budget': 8, 'nodes': 8, 'width': 1}
    >>> settings_of("pearl:3")
    {'method': 'pearl', 'lookahead': 3, 'budget': 8}
    >>> settings_of("pearl:3:2/process:2/always")["draft_threads"]
    2
    """
    shape, *options = cell.split("/")
    method, *sizes = shape.split(":")
    numbers = [int(size) for size in sizes]
    lookahead, budget = (*numbers[:2], *(4, 8)[len(numbers) :])
    settings: dict[str, Any] = {"method": method, "lookahead": lookahead, "budget": budget}
    if find_method(method).trees:
        nodes, width = (*numbers[2:], *(lookahead, 1)[len(numbers[2:]) :])
        settings |= {"nodes": nodes, "width": width}
    for option in options:
        settings |= _option(option)
    return settings


def _option(option: str) -> dict[str, Any]:
    """
    >>> _option("inline"), _option("process:2")
    ({'link': 'inline'}, {'link': 'process', 'draft_threads': 2})
    """
    if option == "always":
        return {"prepare": "always", "fallback": "draft"}
    link, _, n_cores = option.partition(":")
    return {"link": link} | ({"draft_threads": int(n_cores)} if n_cores else {})
