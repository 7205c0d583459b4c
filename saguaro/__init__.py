"""Saguaro: exact, low-latency LLM inference by speculative speculative decoding.

>>> from saguaro import LLM, SamplingParams
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saguaro import errors, methods
    from saguaro.config import EngineConfig, SamplingParams, Structured
    from saguaro.llm import LLM

# Waiting OpenMP threads spin. On a busy machine this makes a step 50 times slower, so they spin only for some
# microseconds and then sleep (docs/log.md). The variable is read when torch loads.
IS_SPINNING = "torch" in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "Structured", "__version__", "errors", "methods"]


def __getattr__(name: str) -> Any:
    """Import lazily, so that `saguaro --help` does not load torch."""
    import importlib

    homes = {"LLM": "saguaro.llm"}
    homes |= dict.fromkeys(("EngineConfig", "SamplingParams", "Structured"), "saguaro.config")
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    if name in ("errors", "methods"):
        return importlib.import_module(f"saguaro.{name}")
    raise AttributeError(f"module 'saguaro' has no attribute {name!r}")
