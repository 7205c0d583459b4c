"""Prompts that the target writes itself: what it says where a user's message would stand.

A model that was taught conversations knows what people ask. Given the beginning of one, up to the first message, it
goes on as the user (Xu et al., 2024, call this Magpie). Left alone it asks much the same, so of every four
messages three have their first words given, of many kinds in turn.
"""

from collections.abc import Sequence
from typing import TypeVar

from saguaro.distill.beginnings import BEGINNINGS
from saguaro.distill.corpus import Corpus
from saguaro.distill.sample import Plan, Target, extend
from saguaro.model.tokenizer import Tokenizer
from saguaro.types import Progress

T = TypeVar("T")

STAGE = "letting the target ask"
TEMPERATURES = (0.7, 1.0)  # in turn: usual questions, and odd ones
MOST_TOKENS = 160  # a question that has not ended by then is left out


def ask(
    llm: Target,
    corpus: Corpus,
    *,
    n: int,
    seed: int = 0,
    n_shard: int = 64,
    progress: Progress = lambda *_: None,
) -> list[str]:
    """The questions among n messages of the target: those that ended, each once; corpus keeps all of them."""
    tokenizer, ends = llm.engine.tokenizer, llm.engine.eos_ids
    opening = tokenizer.encode_opening()
    extend(llm, messages_of(tokenizer, seed), corpus, n, n_shard, lambda done, total: progress(STAGE, done, total))
    messages = [text.tokens[len(opening) :] for text, _ in zip(corpus, range(n), strict=False)]
    said = [tokenizer.decode(message).strip() for message in messages if message[-1] in ends]
    return list(dict.fromkeys(question for question in said if question))


def messages_of(tokenizer: Tokenizer, seed: int) -> Plan:
    """How the messages are made: prompts are conversations up to the first message, or up to its first words."""
    opening = tokenizer.encode_opening()
    begun = [[*opening, *tokenizer.encode(words, special=False)] for words in BEGINNINGS]
    return Plan(spread([opening] * (len(begun) // 3), begun), MOST_TOKENS, TEMPERATURES, seed)


def spread(one: Sequence[T], other: Sequence[T]) -> list[T]:
    """Both, each evenly over the whole.

    >>> "".join(spread("aaaaaa", "bbb"))
    'abaabaaba'
    """
    places = [((i + 0.5) / len(all_of), this) for all_of in (one, other) for i, this in enumerate(all_of)]
    return [this for _, this in sorted(places, key=lambda place: place[0])]
