"""Prompts for benchmarks: ours, or those of a JSONL file."""

from saguaro.measure.prompts import OURS, read_prompts

__all__ = ["OURS", "read_prompts"]
