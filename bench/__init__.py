"""Measurements. Each module is a command: `python -m bench.NAME --help`."""

import saguaro  # noqa: F401  before torch, which would otherwise make threads spin
