"""Prompts from files or public sets, or the built-in ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro.errors import ConfigError
from saguaro.measure.datasets import DATASETS, prompts_file

OURS = [
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "List five vegetables that grow well in a cold climate.",
    "Write a short letter to a friend who has moved to another city.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: The library opens at eight in the morning.",
    "Describe how bread is made, step by step.",
    "Write a poem of four lines about a river in winter.",
    "Give three reasons to learn a musical instrument.",
    "What does a compiler do?",
    "Summarise the story of the tortoise and the hare.",
    "How many hours are there in a leap year?",
    "Write an SQL query that counts the orders of each customer.",
    "Name the planets of the solar system in order.",
    "Explain what inflation means to a ten-year-old.",
    "Write the opening paragraph of a detective story set in a lighthouse.",
    "What should one pack for a week of hiking?",
    "Rewrite politely: Send me the report now.",
    "How does a bicycle stay upright?",
]
QUESTIONS = (0, 2, 3, 5, 7, 9, 10, 12, 14, 15, 17, 19)  # of OURS, those that ask for facts
BUILT_IN = {
    "questions": [OURS[index] for index in QUESTIONS],
    "writing": [text for index, text in enumerate(OURS) if index not in QUESTIONS],
}


@dataclass(frozen=True)
class Asked:
    """A prompt and the id of its answer."""

    id: Any
    prompt: str


def read_prompts(files: Sequence[Path], n: int) -> list[str]:
    """The first n prompts, taken from the files in turn; without files, the built-in ones."""
    if not files:
        return OURS[:n]
    each = [[asked.prompt for asked in read_prompt_file(path)] for path in files]
    longest = max(len(prompts) for prompts in each)
    mixed = [prompts[i] for i in range(longest) for prompts in each if i < len(prompts)]
    return mixed[:n]


def read_prompt_file(path: Path) -> list[Asked]:
    """The prompts of a file: JSON lines with `prompt` and optionally `id`, or one plain text per line; or those of a
    public set, by its name if there is no such file."""
    name = str(path)
    if name in DATASETS and not path.is_file():
        from saguaro.llm import default_cache

        path = prompts_file(DATASETS[name], default_cache())
    try:
        lines = [(n, line) for n, line in enumerate(path.read_text(encoding="utf-8").split("\n")) if line.strip()]
    except OSError as e:
        sets = ", ".join(DATASETS)
        raise ConfigError(
            f"cannot read prompts from {path}: {e.strerror}; give a JSONL or text file, or one of the sets {sets}"
        ) from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not UTF-8 text ({e}); give a JSONL or text file") from e
    if not lines:
        raise ConfigError(f"{path} holds no prompts; write one per line")
    if path.suffix in (".jsonl", ".json"):
        return [_parse_line(path, number, line) for number, line in lines]
    return [Asked(str(number), line) for number, line in lines]


def _parse_line(path: Path, number: int, line: str) -> Asked:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as e:
        raise ConfigError(f'{path} line {number + 1} is not JSON ({e.msg}); write {{"prompt": ...}}') from e
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigError(f'{path} line {number + 1} has no text under "prompt"; write {{"id": ..., "prompt": ...}}')
    return Asked(entry.get("id", str(number)), entry["prompt"])
