"""What the suffix drafter takes: CPU time per token of a text that it reads and per look-up, and memory per token.

python -m bench.suffix --tokens 20000
"""

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import tyro

from saguaro.draft.automaton import SuffixAutomaton
from saguaro.draft.growth import Shape
from saguaro.draft.rows import DraftRows
from saguaro.draft.suffix import Suffix
from saguaro.types import Joined

ROOT = Path(__file__).parent.parent
FILES = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "saguaro" / "draft").glob("*.py")))
N_OUTPUT = 2000  # last tokens of a text, which come one at a time and are drafted for
SHAPES = {"a chain of 4": Shape(4, 4, 1), "a chain of 16": Shape(16, 16, 1), "a tree of 16": Shape(8, 16, 2)}

clock = time.process_time


@dataclass(frozen=True)
class Args:
    """What to measure."""

    tokens: int = 20000


def main(args: Args) -> None:
    """Print a line each."""
    texts = {
        "this project's texts": words(args.tokens),
        "a period of three": [1, 2, 3] * (args.tokens // 3),
        "two tokens by chance": Random(1).choices((0, 1), k=args.tokens),
    }
    for name, text in texts.items():
        began = clock()
        index(text)
        read = 1e6 * (clock() - began) / len(text)
        tracemalloc.start()
        kept = index(text)
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        print(f"{name}: {read:.1f} us and {size:.0f} bytes per token")
        for shape_name, shape in SHAPES.items():
            print(f"    {shape_name}: {look_up(text, shape):.1f} us per output token, read, learnt and looked up")


def words(n: int) -> list[int]:
    """The first words of this project's files, as tokens."""
    ids: dict[str, int] = {}
    text = " ".join(path.read_text() for path in FILES).split(" ")[:n]
    return [ids.setdefault(word, len(ids)) for word in text]


def index(text: Sequence[int]) -> SuffixAutomaton:
    """The automaton of a text."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def look_up(text: Sequence[int], shape: Shape) -> float:
    """Microseconds per token of an output: what may follow is looked up, then the token is read and learnt from."""
    suffix = Suffix(shape, 2**31)
    (row,) = DraftRows().admit([Joined(0, text[:-N_OUTPUT], len(text) - N_OUTPUT)])
    suffix.admit([row])
    while suffix.read([row], lambda: False):
        pass
    began = clock()
    for token in text[-N_OUTPUT:]:
        suffix.propose([row], shape.nodes)
        row.text.append(token)
    return 1e6 * (clock() - began) / N_OUTPUT


if __name__ == "__main__":
    main(tyro.cli(Args))
