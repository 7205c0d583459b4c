"""The built-in prompts: distinct, the same every time, of every template."""

import random
import re
from collections import Counter

import pytest

from saguaro.distill.seeds import LISTS, PER_TEMPLATE, TEMPLATES, fill, seed_prompts
from saguaro.errors import ConfigError

ALL = PER_TEMPLATE * len(TEMPLATES)


def pattern(template: str) -> re.Pattern[str]:
    """What a template's prompts look like."""
    return re.compile(re.sub(r"<[a-z0-9'\-]+>", lambda _: ".+", re.escape(template).replace(r"\-", "-")), re.DOTALL)


def test_all_are_distinct_and_filled() -> None:
    prompts = seed_prompts(ALL)
    assert len(prompts) == len(set(prompts)) == ALL >= 20_000
    field = re.compile(r"<([a-z]+'?|\d+-\d+)>")
    assert not [prompt for prompt in prompts if field.search(prompt)]
    assert max(len(prompt) for prompt in prompts) < 1000


def test_the_same_every_time_and_fewer_are_the_beginning_of_more() -> None:
    assert seed_prompts(500) == seed_prompts(500)
    assert seed_prompts(500, seed=1)[:77] == seed_prompts(77, seed=1)
    assert len(set(seed_prompts(500, seed=1)) & set(seed_prompts(500, seed=2))) < 50
    assert seed_prompts(0) == []


def test_every_template_is_used_equally_and_in_changing_order() -> None:
    alike = [pattern(template) for template in TEMPLATES if template != "<stub>"]
    first, second = (
        [next((i for i, own in enumerate(alike) if own.fullmatch(prompt)), -1) for prompt in part]
        for part in (seed_prompts(len(TEMPLATES)), seed_prompts(2 * len(TEMPLATES))[len(TEMPLATES) :])
    )
    assert Counter(first) == Counter(second) == Counter(range(-1, len(alike)))  # -1: a bare stub
    assert first != second


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_has_more_than_is_taken(template: str) -> None:
    rng = random.Random(0)
    assert len({fill(template, rng) for _ in range(3 * PER_TEMPLATE)}) > 1.2 * PER_TEMPLATE


def test_every_list_is_used_and_holds_nothing_twice() -> None:
    used = " ".join([*TEMPLATES, *(entry for entries in LISTS.values() for entry in entries)])
    for name, entries in LISTS.items():
        assert f"<{name}>" in used, name
        assert len(set(entries)) == len(entries), name
        assert all(entries), name
    assert len(LISTS["topic"]) >= 150


def test_fields_drawn_once_and_twins_that_differ() -> None:
    rng = random.Random(0)
    for _ in range(200):
        one, same, other = fill("<animal> <animal> <animal'>", rng).split()
        assert one == same != other
        low, high = map(int, fill("<2-4> <5-6>", rng).split())
        assert 2 <= low <= 4
        assert 5 <= high <= 6


def test_more_than_there_are() -> None:
    for n in (ALL + 1, -1):
        with pytest.raises(ConfigError, match=rf"{n} seed prompts; there are {ALL}: take fewer, or give prompts of"):
            seed_prompts(n)
