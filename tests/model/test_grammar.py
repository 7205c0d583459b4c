"""Grammars over real tokenizers: masks are a function of the text, and what cannot be is refused by name."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saguaro.config import MAX_STRUCTURED, Structured
from saguaro.errors import ConfigError
from saguaro.model import compiler, grammar
from saguaro.model.gguf import GGUFModel
from saguaro.model.grammar import Grammars, Matcher
from saguaro.model.tiny import EOS_ID, tiny_model, tiny_tokenizer
from saguaro.model.tokenizer import Tokenizer, wrap_gguf_tokenizer
from tests.model.test_gguf_tokenizer import IDS, opened
from tests.model.write_gguf import write_gguf

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "pets": {"type": "array"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
KINDS = [
    Structured(json=True),
    Structured(json=PERSON),
    Structured(regex=r"(the |an? )+[a-z]{2,5}\.?"),
    Structured(choice=("the end", "then", 'a "quoted" é\n')),
    Structured(grammar='root ::= "in" | "(" root ")" root?'),
    Structured(grammar='start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"'),
]


def grammars_of(inner: Any, ends: list[int]) -> Grammars:
    tokenizer = Tokenizer(inner, "here")
    return Grammars(lambda: tokenizer, tokenizer.n_vocab, ends)


@pytest.fixture(scope="module")
def tiny() -> Grammars:
    return grammars_of(tiny_tokenizer(), [EOS_ID])


def allowed(matcher: Matcher, output: list[int]) -> list[int]:
    found: list[int] = np.nonzero(np.unpackbits(matcher.mask(output), bitorder="little"))[0].tolist()
    return found


def walk(matcher: Matcher, chance: random.Random, ends: set[int], longest: int = 40) -> list[int]:
    """A random output: any allowed token, again and again."""
    output: list[int] = []
    while len(output) < longest:
        token = chance.choice(allowed(matcher, output))
        if token in ends:
            assert matcher.accepts(output)
            break
        output.append(token)
    return output


def test_the_mask_of_a_sibling_is_not_taken_for_ones_own(tiny: Grammars) -> None:
    """As in a tree: after the last mask, to another text as long, which is at the same place of another rule."""
    start = list(b'{"name":"u","age":68,"pets":["the"')
    ends = [list(b"]\n"), list(b",\n")]
    for first, second in (ends, ends[::-1]):
        matcher, fresh = (tiny.start(Structured(json=PERSON)) for _ in range(2))
        matcher.mask([*start, *first])
        assert allowed(matcher, [*start, *second]) == allowed(fresh, [*start, *second])


@pytest.mark.parametrize("structured", KINDS, ids=lambda s: s.kind)
def test_a_mask_is_a_function_of_the_text(tiny: Grammars, structured: Structured) -> None:
    """However a matcher came to a text, over speculations that were not accepted and back, it allows the same."""
    chance = random.Random(0)
    texts = [walk(tiny.start(structured), chance, {EOS_ID}) for _ in range(6)]
    moved = tiny.start(structured)
    for _ in range(150):
        text = chance.choice(texts)
        place = text[: chance.randrange(len(text) + 1)]
        strange = [chance.randrange(264) for _ in range(chance.randrange(3))]
        for at in range(len(strange) + 1):  # as speculated tokens are looked at, one after the other
            there = [*place, *strange[:at]]
            assert np.array_equal(moved.mask(there), tiny.start(structured).mask(there))
            assert moved.accepts(there) == tiny.start(structured).accepts(there)


def test_special_tokens_are_never_part_of_it(tiny: Grammars) -> None:
    for structured in KINDS:
        matcher = tiny.start(structured)
        for text in [[], walk(tiny.start(structured), random.Random(1), {EOS_ID})]:
            assert (EOS_ID in allowed(matcher, text)) == matcher.accepts(text)


def test_the_end_comes_when_it_may_and_alone_when_nothing_else_can() -> None:
    three = grammars_of(tiny_tokenizer(), [EOS_ID, 7, 9, 100_000])  # one of them no token of this tokenizer
    matcher = three.start(Structured(regex="ab?"))
    ends = [7, 9, EOS_ID]
    assert allowed(matcher, []) == [ord("a")]
    assert allowed(matcher, [ord("a")]) == sorted([*ends, ord("b")])
    assert allowed(matcher, [*b"ab"]) == ends
    assert matcher.accepts([*b"ab"])
    for after in ([*b"x"], [*b"ab", 7], [*b"a", 9, *b"b"], [*b"abb"]):
        assert allowed(matcher, after) == ends
        assert not matcher.accepts(after)
    assert allowed(matcher, []) == [ord("a")]


def test_json_keeps_the_order_of_a_schema_and_its_whitespace_ends(tiny: Grammars) -> None:
    matcher = tiny.start(Structured(json=PERSON))
    for text in ('{"name": "x", "age": 3}', '{"name":"x","age":3}', '{\n  "name": "é\\n",\n  "age": 0\n}'):
        assert matcher.accepts([*text.encode()]), text
    for text in ('{"age": 3, "name": "x"}', '{"name":"x"}', '{ \n"name":"x","age":3}', '{"name":"x","age":3,"b":1}'):
        assert not matcher.accepts([*text.encode()]), text
    assert len(allowed(matcher, [*b"{\n"])) < 8


def test_any_object_and_nothing_else(tiny: Grammars) -> None:
    matcher = tiny.start(Structured(json=True))
    assert matcher.accepts([*b'{"a": [1, {"b": null}]}'])
    assert allowed(matcher, []) == [ord("{")]


@pytest.mark.parametrize("what", [IDS["</s>"], IDS["<|end|>"]])
def test_a_gguf_file_with_sentencepiece(tmp_path: Path, what: int) -> None:
    grammars = grammars_of(wrap_gguf_tokenizer(opened(tmp_path)), [what])
    tokenizer = Tokenizer(wrap_gguf_tokenizer(opened(tmp_path)), "spm")
    for structured, pattern in ((Structured(json=PERSON), None), (Structured(choice=("the end", "é 中")), "choice")):
        for seed in range(5):
            output = walk(grammars.start(structured), random.Random(seed), {what}, longest=400)
            text = tokenizer.decode([IDS["."], *output])[1:]
            if pattern:
                assert text in ("the end", "é 中")
            assert not {IDS["<unk>"], IDS["<s>"], IDS["</s>"], IDS["<|user|>"]} & set(output)


def test_a_gguf_file_with_byte_pairs(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_model("llama"))
    grammars = grammars_of(wrap_gguf_tokenizer(GGUFModel(path)), [EOS_ID])
    matcher = grammars.start(Structured(choice=("the end",)))
    output = walk(matcher, random.Random(3), {EOS_ID})
    assert tiny_tokenizer().decode(output) == "the end"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "at properties.a: Invalid type: strin"),
        ({"json": {"anyOf": [{"type": "null"}, {"format": "odd"}]}}, r"at anyOf.1: Unknown format: odd"),
        ({"json": {"not": {"type": "null"}}}, r'Unimplemented keys: \["not"\]'),
        ({"json": {"$ref": "http://example.com/x"}}, "does not fetch"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'start: "a" | foo'}, 'unknown name: "foo"'),
        ({"grammar": 'root ::= "a" | foo'}, "Rule 'foo' not found"),
        ({"grammar": 'start: start "a"'}, "no text matches it"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
        ({"regex": "(" * 9000 + "a" + ")" * 9000}, r"invalid regex .* \.\.\. "),
    ],
)
def test_what_cannot_be_is_refused_by_name(tiny: Grammars, wish: dict[str, Any], message: str) -> None:
    structured = Structured(**wish)
    with pytest.raises(ConfigError, match=f"(?s)structured.{structured.kind} cannot be served: .*{message}") as e:
        tiny.compile(structured)
    assert len(str(e.value)) < 1200


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({}, "structured has nothing; give exactly one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "structured has regex and choice; give exactly one"),
        ({"regex": ""}, "structured.regex is ''; it must be non-empty text"),
        ({"grammar": "\ud800"}, "structured.grammar is .*; it must be non-empty text"),
        ({"choice": []}, "structured.choice is .*; it must be a list of non-empty strings"),
        ({"choice": "ab"}, "structured.choice is 'ab'; it must be a list of strings"),
        ({"choice": [1]}, "structured.choice holds 1; it must be a list of str"),
        ({"json": "{"}, "which is not JSON"),
        ({"json": "[" * 100_000}, "which is not JSON"),
        ({"json": {"a": float("nan")}}, "which is not JSON"),
        ({"json": [1]}, "it must be a JSON schema that is an object, or True"),
        ({"json": False}, "it must be a JSON schema that is an object, or True"),
        ({"grammar": "x" * (MAX_STRUCTURED + 1)}, f"has {MAX_STRUCTURED + 1} characters; at most {MAX_STRUCTURED}"),
        ({"xml": "a"}, "unknown key 'xml'"),
    ],
)
def test_wishes_are_checked_when_they_are_made(wish: dict[str, Any], message: str) -> None:
    from saguaro import SamplingParams

    with pytest.raises(ConfigError, match=message):
        SamplingParams(structured=wish)  # type: ignore[arg-type]


def test_a_schema_that_becomes_too_large_is_refused(tiny: Grammars) -> None:
    ways = [[{"type": "object", "properties": {f"a{i}{j}": {"type": "string"}}} for j in range(3)] for i in range(9)]
    with pytest.raises(ConfigError, match=r"structured\.json cannot be served: schema too large"):
        tiny.compile(Structured(json={"allOf": [{"anyOf": each} for each in ways]}))


def test_a_limit_hit_on_the_way_ends_the_text_and_does_not_accept_it(
    tiny: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher in trouble allows the end alone; elsewhere in the text it goes on."""
    monkeypatch.setitem(compiler.LIMITS["grammar"], "max_lexer_states", 30)
    matcher = tiny.start(Structured(grammar='start: "ab" rest\nrest: /.*[xy].{20}/'))
    assert len(allowed(matcher, [*b"abc"])) > 100
    assert allowed(matcher, [*b"abcx"]) == [EOS_ID]
    assert not matcher.accepts([*b"abcx"])
    assert allowed(matcher, [*b"a"]) == [ord("b")]


def test_a_limit_used_up_by_others_is_no_limit(tiny: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs share a grammar's states: what some looked at must not change what another may say."""
    monkeypatch.setitem(compiler.LIMITS["grammar"], "max_lexer_states", 150)
    chance, structured = random.Random(0), Structured(grammar='start: "ab" all\nall: /.*[xy].{20}/')
    compiled = tiny.compile(structured)
    matchers = [tiny.start(structured) for _ in range(4)]
    for at in range(20):
        assert len(allowed(matchers[at % 4], [*b"ab", *chance.choices(b"xyz", k=8)])) > 100
    assert tiny.compile(structured) is not compiled, "the limit was not reached"


def test_grammars_are_compiled_once_and_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    grammars = grammars_of(tiny_tokenizer(), [EOS_ID])
    first = grammars.compile(Structured(json={"type": "null"}))
    assert grammars.compile(Structured(json='{"type": "null"}')) is first
    grammars.compile(Structured(regex="a"))
    assert grammars.compile(Structured(json={"type": "null"})) is first
    grammars.compile(Structured(regex="b"))
    grammars.compile(Structured(regex="c"))
    assert grammars.compile(Structured(json={"type": "null"})) is not first


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model with an end-of-text token"):
        grammars_of(tiny_tokenizer(), []).compile(Structured(regex="a"))


# Limits


def _object(names: list[str], schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, schema), "additionalProperties": False, **more}


_TEXT = {"type": "string"}
_NAMES = [f"property_{i}" for i in range(300)]
_TREE = {"$defs": {"t": _object(["left", "right", "kids"], {"$ref": "#/$defs/t"})}, "$ref": "#/$defs/t"}
_FORMATS = ["date-time", "uri", "email", "uuid", "hostname", "ipv6"]
_NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(12):
    _NESTED = {"type": "array", "items": _NESTED, "maxItems": 40}
ORDINARY = [
    Structured(json=_object(_NAMES, _TEXT, required=_NAMES)),
    Structured(json=_object(_NAMES, {"type": ["string", "integer", "null"]})),
    Structured(json=_object(["a", "b"], {"enum": [f"value number {i * 7919 % 2000}" for i in range(2000)]})),
    Structured(json={"anyOf": [_object([f"x{i}", "name"], _TEXT) for i in range(200)]}),
    Structured(json=_TREE),
    Structured(json=_NESTED),
    Structured(json={"type": "object", "properties": {name: {**_TEXT, "format": name} for name in _FORMATS}}),
    Structured(json=_object(["a", "b"], {**_TEXT, "minLength": 3, "maxLength": 5000})),
    Structured(regex=r"[a-zA-Z0-9._%+-]{1,64}@([a-zA-Z0-9-]{1,63}\.){1,8}[a-zA-Z]{2,24}"),
    Structured(regex=r"([A-Z][a-z]{2,20}( [a-z]{1,20}){3,40}\. ){1,50}"),
    Structured(regex="(" + "|".join(f"word{i}[a-z]{{0,{i % 30}}}" for i in range(1500)) + ")+"),
    Structured(choice=tuple(f"choice {i * 7919 % 3000}" for i in range(3000))),
    Structured(grammar='start: expr\nexpr: expr "+" expr | expr "*" expr | "(" expr ")" | NUMBER\nNUMBER: /[0-9]+/'),
    Structured(grammar='root ::= item (", " item)*\nitem ::= [a-z]+ | "[" root "]"'),
]


@pytest.mark.parametrize("structured", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_grammars_are_within_the_limits(tiny: Grammars, structured: Structured) -> None:
    matcher = tiny.start(structured)
    for seed in range(2):
        text = walk(matcher, random.Random(seed), {EOS_ID}, longest=60)
        assert len(text) == 60 or matcher.accepts(text)


def test_a_limit_that_is_hit_is_named(tiny: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer that has become too large is no reason to say that no text matches."""
    monkeypatch.setitem(compiler.LIMITS["regex"], "step_lexer_fuel", 100)
    with pytest.raises(ConfigError, match="its regular expressions are too large; use fewer or smaller repetitions"):
        tiny.compile(Structured(regex="((((([a-z]?){20}){20}){20}){20}){20}"))


def test_a_regex_that_cannot_go_on_is_refused_at_once(tiny: Grammars) -> None:
    with pytest.raises(ConfigError, match="its regular expressions are too large"):
        tiny.compile(Structured(regex="(((a{100}){100}){100}){100}"))


def test_looking_for_what_is_wrong_ends(tiny: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Structured(json={"properties": {"a": {"type": "strin"}}})
    with pytest.raises(ConfigError, match=r"served: at properties\.a: Invalid type: strin"):
        tiny.compile(wish)
    monkeypatch.setattr(compiler, "TRY_SECONDS", -1.0)
    with pytest.raises(ConfigError, match="served: Invalid type: strin"):
        tiny.compile(wish)


def test_a_text_that_is_too_ambiguous_ends(tiny: Grammars) -> None:
    """Whatever came before: it is the text that hits the limit. Another text goes on."""
    structured = Structured(grammar='start: start start start start | "a" | "b" |')
    matcher, text = tiny.start(structured), list(b"a")
    while allowed(matcher, text) != [EOS_ID]:
        assert len(text) < 1000
        text.append(ord("a"))
    assert len(text) > 50
    assert not matcher.accepts(text)
    assert allowed(matcher, [*text, ord("a")]) == [EOS_ID]
    other = tiny.start(structured)
    assert len(allowed(other, text[:-1])) > 1
    assert allowed(other, text) == [EOS_ID]
    assert len(allowed(matcher, text[:20])) > 1
    assert matcher.accepts(text[:20])


def test_a_mask_that_takes_long_is_noticed(tiny: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = tiny.start(Structured(regex="[a-z]{1,9}"))
    matcher.mask([])
    assert not matcher.is_slow
    monkeypatch.setattr(grammar, "SLOW_SECONDS", 0.0)
    matcher.mask([])
    assert matcher.is_slow
