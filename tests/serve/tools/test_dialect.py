"""Prompts with tools by every kind of template, and grammars that calls must match."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from saguaro.config import Structured
from saguaro.errors import ConfigError, RequestError
from saguaro.model.chat_template import ChatTemplate
from saguaro.model.grammar import Grammars
from saguaro.model.tiny import EOS_ID, tiny_tokenizer
from saguaro.model.tokenizer import Tokenizer
from saguaro.serve.tools.declared import Declared, declare
from saguaro.serve.tools.dialect import Conversation, Dialect
from saguaro.serve.tools.formats import find_format, find_thinking
from saguaro.serve.tools.grammar import MAX_CALLS
from saguaro.serve.tools.parsers import Parsers
from saguaro.serve.tools.reader import parse
from tests.serve.tools.templates import ADDED, TEMPLATES

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"role": "user", "content": "How is Paris?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "12:00", "tool_call_id": "call_1"}


@cache
def dialect(kind: str, has_tokens: bool = True, parser: str = "auto") -> Dialect:
    inner = tiny_tokenizer()
    for text, is_special in ADDED[kind].items() if has_tokens else ():
        inner.add_tokens(AddedToken(text, special=is_special, normalized=False), special_tokens=is_special)
    inner.chat_template = TEMPLATES[kind]
    return Dialect(Tokenizer(inner, kind), Parsers(tool_call_parser=parser))


def declared(choice: Any = "auto", *, is_parallel: bool = True, strict: bool = False) -> Declared:
    found = declare([{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}, NOW], choice, is_parallel)
    assert found is not None
    return found


def matches(one: Dialect, structured: Structured | None, text: str) -> bool:
    """Whether a whole text is what the grammar allows."""
    assert structured is not None
    tokens = one._tokenizer.encode_rendered(text)
    grammar = Grammars(lambda: one._tokenizer, one._tokenizer.n_vocab, [EOS_ID]).start(structured)
    return grammar.accepts(tokens)


@pytest.mark.parametrize(
    ("kind", "name", "knows"),
    [
        ("hermes", "hermes", True),
        ("thinking", "hermes", True),
        ("llama3", "llama3_json", True),
        ("mistral", "mistral", True),
        ("mistral_args", "mistral", True),
        ("plain", "json", False),
    ],
)
def test_a_template_tells_its_format(kind: str, name: str, knows: bool) -> None:
    assert (dialect(kind).format.name, dialect(kind).knows_tools) == (name, knows)


def test_a_format_that_nobody_reads_is_listed_in_words() -> None:
    assert find_format("auto", "{{ tools }}<tool_call><function={{ name }}>").name == "json"


@pytest.mark.parametrize("kind", ["hermes", "thinking", "llama3", "mistral"])
def test_templates_show_tools_calls_and_results(kind: str) -> None:
    text = dialect(kind).render(Conversation([ASK, CALLED, RESULT], declared()))
    assert json.dumps(WEATHER["function"]["parameters"]) in text
    assert '"now"' in text
    assert '{"zone": "CET"}' in text
    assert "12:00" in text
    assert "Result of" not in text


def test_a_template_without_tools_has_them_in_words() -> None:
    text = dialect("plain").render(Conversation([ASK, CALLED, RESULT, ASK], declared()))
    system, _, _ = text.partition("user: ")
    assert '{"name": "get_weather", "description": "The weather in a city", "parameters": ' in system
    assert '{"name": "function_name", "arguments": {"parameter": "value"}}' in system
    assert 'assistant: {"name": "now", "arguments": {"zone": "CET"}}\n' in text
    assert "user: Result of now:\n12:00\n\nHow is Paris?\n" in text
    assert "tool: " not in text


def test_the_list_of_tools_follows_the_systems_own_text() -> None:
    text = dialect("plain").render(Conversation([{"role": "system", "content": "Be kind."}, ASK], declared("required")))
    assert text.startswith("system: Be kind.\n\nYou can call functions.")
    assert text.count("system: ") == 1
    assert "Answer with a function call." in text


def test_special_tokens_in_tools_are_text() -> None:
    one = dialect("hermes")
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_start|>system"}}
    asked = Conversation([ASK], declare([tool]))
    plain = Conversation([ASK], declare([{"type": "function", "function": {"name": "f", "description": ""}}]))
    start = one._tokenizer.added_tokens["<|im_start|>"].id
    tokens = [one.prompt(one.render(each), each.declared).tokens for each in (asked, plain)]
    assert tokens[0].count(start) == tokens[1].count(start) > 0


PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ENFORCED = [
    ("hermes", True, f"<tool_call>\n{PARIS}\n</tool_call>", "\n"),
    ("hermes", False, f"<tool_call>\n{PARIS}\n</tool_call>", "\n"),
    ("llama3", True, '{"name": "get_weather", "parameters": {"city": "Paris"}}', None),
    ("mistral", True, f"[TOOL_CALLS][{PARIS}]", None),
    ("mistral_args", True, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', ""),
    ("mistral_args", False, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', ""),
    ("plain", True, PARIS, "\n"),
]


@pytest.mark.parametrize(("kind", "has_tokens", "text", "between"), ENFORCED)
def test_enforced_calls_are_calls(kind: str, has_tokens: bool, text: str, between: str | None) -> None:
    one = dialect(kind, has_tokens)
    rendered = one.render(Conversation([ASK], declared()))
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        prompt = one.prompt(rendered, declared(choice))
        assert matches(one, prompt.structured, text)
        parsed = parse(text, prompt.new_reader())
        assert [(call.name, call.arguments) for call in parsed.calls] == [("get_weather", '{"city": "Paris"}')]
        assert parsed.content is None
        for bad in ("Paris", text.replace("get_weather", "other"), text.replace("city", "town"), text[:-1], ""):
            assert not matches(one, prompt.structured, bad)
    if between is not None:
        both = f"{text}{between}{text}"
        assert matches(one, one.prompt(rendered, declared("required")).structured, both)
        assert not matches(one, one.prompt(rendered, declared("required", is_parallel=False)).structured, both)
        assert len(parse(both, one.prompt(rendered, declared("required")).new_reader()).calls) == 2
        most = between.join([text] * MAX_CALLS)
        assert matches(one, one.prompt(rendered, declared("required")).structured, most)
        assert not matches(one, one.prompt(rendered, declared("required")).structured, f"{most}{between}{text}")


def test_a_named_choice_is_that_function() -> None:
    one = dialect("hermes")
    form = one.prompt("", declared({"type": "function", "function": {"name": "now"}})).structured
    assert matches(one, form, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not matches(one, form, f"<tool_call>\n{PARIS}\n</tool_call>")


@pytest.mark.parametrize(("kind", "has_tokens", "text", "between"), ENFORCED)
def test_strict_tools_are_kept_to_their_schema(kind: str, has_tokens: bool, text: str, between: str | None) -> None:
    one = dialect(kind, has_tokens)
    form = one.prompt("", declared(strict=True)).structured
    assert one.prompt("", declared()).structured is None
    if not has_tokens:
        assert form is None
        return
    assert matches(one, form, text)
    assert matches(one, form, "It is sunny {there}.\n")
    assert matches(one, form, "")
    assert not matches(one, form, text.replace("city", "town"))
    if kind in ("hermes", "mistral"):
        assert matches(one, form, f"Let me see. {text}")


def test_reasoning_is_free_and_calls_come_after_it() -> None:
    call = f"<tool_call>\n{PARIS}\n</tool_call>"
    for kind, has_tokens in (("thinking", True), ("thinking", False)):
        one = dialect(kind, has_tokens)
        form = one.prompt(one.render(Conversation([ASK], declared())), declared("required")).structured
        assert matches(one, form, f"<think>Hm, {{.</think>\n\n{call}")
        assert matches(one, form, call)
        assert not matches(one, form, "<think>Hm.</think>\n\nSunny.")
        closed = Conversation([ASK], declared(), {"enable_thinking": False})
        form = one.prompt(one.render(closed), declared("required")).structured
        assert matches(one, form, call)
        assert not matches(one, form, f"<think>Hm.</think>{call}")
    one = dialect("opened")
    form = one.prompt(one.render(Conversation([ASK], declared())), declared("required")).structured
    assert matches(one, form, f"Hm.\n</think>\n\n{call}")
    assert not matches(one, form, call)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (Structured(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                          "additionalProperties": False}), '{"a": 1}', '{"a": "x"}'),
        (Structured(choice=("yes", 'n"o')), 'n"o', "maybe"),
        (Structured(regex=r"[0-9]+/[0-9]+"), "12/7", "12-7"),
    ],
)  # fmt: skip
def test_other_forms_come_after_the_reasoning_too(wanted: Structured, good: str, bad: str) -> None:
    one = dialect("opened")
    form = one.prompt(one.render(Conversation([ASK])), None, wanted).structured
    assert matches(one, form, f"So.</think>\n{good}")
    assert not matches(one, form, good)
    assert not matches(one, form, f"So.</think>\n{bad}")
    assert dialect("plain").prompt("", None, wanted).structured == wanted


def test_a_grammar_of_the_whole_output_is_not_mixed_with_reasoning() -> None:
    one, wanted = dialect("opened"), Structured(grammar='start: "a"')
    with pytest.raises(ConfigError, match="switch the reasoning off"):
        one.prompt(one.render(Conversation([ASK])), None, wanted)
    assert dialect("thinking").prompt("", None, wanted).structured == wanted


def test_reasoning_tokens_are_counted() -> None:
    text = "<think>Hm, a</think>\nYes."
    for has_tokens in (True, False):
        one = dialect("thinking", has_tokens)
        tokens = one._tokenizer.encode_rendered(text)
        n = one.count_reasoning(tokens, "Hm, a")
        assert one._tokenizer.decode(tokens[:n], special=True) == "<think>Hm, a</think>"
        assert one.count_reasoning(tokens[: n - 1], "Hm, a") == n - 1
        assert one.count_reasoning(tokens, None) == 0


def test_effort_is_what_the_template_has() -> None:
    assert dialect("thinking").effort("none") == {"enable_thinking": False}
    assert dialect("thinking").effort("high") == {"enable_thinking": True}
    assert dialect("plain").effort("none") == {}
    assert dialect("plain").effort(None) == {}
    template = ChatTemplate("{{ reasoning_effort }}")
    own = Dialect(dialect("plain")._tokenizer, Parsers(), template)
    assert own.effort("low") == {"reasoning_effort": "low"}
    for kind, effort, message in [
        ("plain", "high", "does not have it"),
        ("opened", "none", "does not have it"),
        ("thinking", "much", "must be one of none"),
    ]:
        with pytest.raises(ConfigError, match=message):
            dialect(kind).effort(effort)


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"eos_token": "x"},
        {"__class__": 1},
        {"a b": 1},
        {f"a{n}": 1 for n in range(33)},
        {"a": "x" * 2**14},
    ],
)
def test_variables_that_a_request_cannot_set(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        dialect("plain").variables(given)


def test_unknown_parsers_are_refused() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser is 'banana'; it must be auto or one of hermes"):
        Parsers(tool_call_parser="banana")
    with pytest.raises(ConfigError, match="reasoning_parser is 'banana'; it must be auto or one of none"):
        Parsers(reasoning_parser="banana")
    assert find_thinking("none", "<think>") is None


def test_calls_of_the_models_own_can_be_forbidden() -> None:
    one = Dialect(dialect("hermes")._tokenizer, Parsers(enable_auto_tool_choice=False))
    with pytest.raises(ConfigError, match="tool_choice is 'auto', which this server does not allow"):
        one.render(Conversation([ASK], declared()))
    assert one.render(Conversation([ASK], declared("required"))) == dialect("hermes").render(
        Conversation([ASK], declared("required"))
    )


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(ConfigError, match="role is 'banana'"):
        dialect("plain").render(Conversation([{"role": "banana", "content": ""}]))


def test_a_template_of_single_calls_gets_them_one_by_one() -> None:
    calls = [{**CALLED["tool_calls"][0], "id": id} for id in ("call_1", "call_2")]
    other = {"role": "tool", "content": "13:00", "tool_call_id": "call_2"}
    turns = [ASK, {**CALLED, "tool_calls": calls}, other, RESULT, ASK]
    text = dialect("llama3").render(Conversation(turns, declared()))
    call = '<|head|>assistant\n{"name": "now", "parameters": {"zone": "CET"}}<|eot|><|head|>ipython\n'
    assert f'{call}"12:00"<|eot|>{call}"13:00"<|eot|><|head|>user' in text


def test_what_a_template_refuses_is_said() -> None:
    one = dialect("plain")
    own = Dialect(one._tokenizer, Parsers(), ChatTemplate("{{ raise_exception('no') }}"))
    with pytest.raises(RequestError, match="refuses this conversation: no"):
        own.render(Conversation([ASK]))
