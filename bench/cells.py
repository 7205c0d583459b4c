"""Cells of a benchmark: method[:lookahead[:budget[:nodes[:width]]]]; without nodes, chains."""

from typing import Any

from saguaro.method import find_method


def settings_of(cell: str) -> dict[str, Any]:
    """The engine's settings.

    >>> settings_of("sd:8")
    {'method': 'sd', 'lookahead': 8, 'budget': 8, 'nodes': 8, 'width': 1}
    >>> settings_of("pearl:3")
    {'method': 'pearl', 'lookahead': 3, 'budget': 8}
    """
    method, *sizes = cell.split(":")
    numbers = [int(size) for size in sizes]
    lookahead, budget = (*numbers[:2], *(4, 8)[len(numbers) :])
    settings: dict[str, Any] = {"method": method, "lookahead": lookahead, "budget": budget}
    if find_method(method).trees:
        nodes, width = (*numbers[2:], *(lookahead, 1)[len(numbers[2:]) :])
        settings |= {"nodes": nodes, "width": width}
    return settings
