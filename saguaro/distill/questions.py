"""Prompts that the target writes itself: what it says where a user's message would stand.

A model that was taught conversations knows what people ask. Given the beginning of one, up to the first message, it
goes on as the user (Xu et al., 2024, call this Magpie).
"""

from collections.abc import Sequence

from saguaro.distill.corpus import Corpus
from saguaro.distill.sample import Plan, Target, extend
from saguaro.model.default import Progress

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
    plan = Plan([tokenizer.encode_opening()], MOST_TOKENS, TEMPERATURES, seed)
    extend(llm, plan, corpus, n, n_shard, lambda done, total: progress(STAGE, done, total))
    messages = [text.continuation for text, _ in zip(corpus, range(n), strict=False)]
    said = [tokenizer.decode(message).strip() for message in messages if message[-1] in ends]
    return list(dict.fromkeys(question for question in said if question))


def spread(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Both, each evenly over the whole.

    >>> "".join(spread("aaaaaa", "bbb"))
    'abaabaaba'
    """
    places = [((i + 0.5) / len(all_of), this) for all_of in (one, other) for i, this in enumerate(all_of)]
    return [this for _, this in sorted(places, key=lambda place: place[0])]
