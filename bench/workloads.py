"""Prompts to measure with: ours, or those of a JSONL file."""

from pathlib import Path

from saguaro.serve.generate import read_prompt_file

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


def read_prompts(files: list[Path], n: int) -> list[str]:
    """The first n prompts, taken in turn from each file; without files, ours."""
    if not files:
        return OURS[:n]
    each = [[asked.prompt for asked in read_prompt_file(path)] for path in files]
    longest = max(len(prompts) for prompts in each)
    mixed = [prompts[i] for i in range(longest) for prompts in each if i < len(prompts)]
    return mixed[:n]
