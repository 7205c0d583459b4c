"""Check whether a draft's training prompts contain evaluation prompts.

    python -m bench.overlap --texts DRAFT/work/texts --prompts DATA/*.jsonl

Prompts are compared as lower-case words: how many evaluation prompts are fully contained in a training prompt, and how
many share n consecutive words with one. The exit status is 1 if any is fully contained.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from saguaro.distill.corpus import Corpus
from saguaro.llm import default_cache
from saguaro.measure.prompts import read_prompt_file
from saguaro.model.default import fetch_default
from saguaro.model.hf_config import read_spec
from saguaro.model.load import locate
from saguaro.model.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Args:
    """What to compare."""

    texts: Path
    """The folder `work/texts` of a draft."""
    prompts: tuple[Path, ...]
    """Files of prompts."""
    target: str | None = None
    """The draft's target; without it, the default model."""
    n_words: int = 8
    """Words in a row that count as shared."""


def main(args: Args) -> int:
    """Compare and print."""
    folder = locate(args.target) if args.target else fetch_default(default_cache())
    tokenizer = load_tokenizer(folder, read_spec(folder).n_vocab)
    learnt = {
        " ".join(words(tokenizer.decode(list(tokens))))
        for tokens in {tuple(text.prompt) for text in Corpus(args.texts)}
    }
    runs = {run for prompt in learnt for run in runs_of(prompt.split(), args.n_words)}
    n_whole = 0
    for path in args.prompts:
        asked = [words(one.prompt) for one in read_prompt_file(path)]
        whole = [prompt for prompt in asked if any(" ".join(prompt) in one for one in learnt)]
        shared = [prompt for prompt in asked if any(run in runs for run in runs_of(prompt, args.n_words))]
        found = f"{len(whole)} whole, {len(shared)} share {args.n_words} words in a row"
        print(f"{path.stem:14} {len(asked)} prompts: {found}")
        n_whole += len(whole)
    print(f"{len(learnt)} different prompts were learnt from; {n_whole} of the others stand whole in one")
    return 1 if n_whole else 0


def words(text: str) -> list[str]:
    """The words of a text.

    >>> words("Why? (Because!)")
    ['why', 'because']
    """
    return re.findall(r"[^\W_]+", text.lower())


def runs_of(these: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """All runs of n consecutive words.

    >>> list(runs_of(["a", "b", "c"], 2))
    [('a', 'b'), ('b', 'c')]
    """
    return (tuple(these[i : i + n]) for i in range(len(these) - n + 1))


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
