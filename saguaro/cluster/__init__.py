"""Replicas of the server in a Ray cluster: `saguaro serve --ray`, and `serve run saguaro.cluster:app`.

Only this folder imports ray, which is installed with the extra `ray`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import lazily: the settings are read where ray is not installed."""
    if name == "app":
        from saguaro.cluster.application import app

        return app
    raise AttributeError(f"module 'saguaro.cluster' has no attribute {name!r}")
