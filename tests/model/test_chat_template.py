"""Chat templates give what transformers gives, and special tokens in a user's words stay words."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from saguaro.errors import ConfigError, RequestError
from saguaro.model.chat_template import ChatTemplate
from saguaro.model.specials import Specials
from saguaro.model.tiny import EOS, EOS_ID, tiny_tokenizer
from saguaro.model.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": " the end\n"}]
TALK: list[dict[str, Any]] = [{"role": "system", "content": "Be <b>kind</b>."}, *HELLO]
TALK += [{"role": "assistant", "content": "é & ü"}, {"role": "user", "content": "Bye"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "note": "é<"}}}]

CHATML = (
    "{%- for m in messages %}\n  {%- if loop.index0 == 3 %}{% continue %}{% endif %}"
    "{{- '<|start|>' + m.role + '\\n' + m['content'] | trim + '<|end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start|>assistant\\n' }}\n{%- endif %}"
)
NAMESPACE = (
    "{{ eos_token }}{% set ns = namespace(seen=0) %}{% for m in messages %}"
    "{% generation %}{% set ns.seen = ns.seen + 1 %}{{ ns.seen }}{{ m.content }}{% endgeneration %}{% endfor %}"
    "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ thinking is defined }}"
)


@pytest.mark.parametrize("template", [CHATML, NAMESPACE])
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"thinking": True}])
def test_a_conversation_is_written_as_transformers_writes_it(template: str, options: dict[str, Any]) -> None:
    inner = tiny_tokenizer()
    inner.chat_template = template
    expected = inner.apply_chat_template(TALK, tokenize=False, **{"add_generation_prompt": True, **options})
    found = Tokenizer(inner, "tiny").chat_template.render(TALK, **options)
    assert found == expected


def test_the_last_message_can_be_continued() -> None:
    inner = tiny_tokenizer()
    inner.chat_template = CHATML
    talk = [*TALK[:2], {"role": "assistant", "content": "One, two,"}]
    expected = inner.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    found = Tokenizer(inner, "tiny").chat_template.render(talk, continue_final_message=True)
    assert found == expected
    assert found.endswith("One, two,")


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match="leaves the last message out"):
        ChatTemplate("nothing").render(HELLO, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% if %}"],
)
def test_what_a_template_refuses_is_a_message(template: str) -> None:
    with pytest.raises(RequestError, match="the chat template of mine refuses this conversation"):
        ChatTemplate(template, name="mine").render(HELLO)


@pytest.mark.parametrize("role", ["banana", "User", "", None, 3])
def test_a_role_that_is_none_is_refused(role: Any) -> None:
    with pytest.raises(ConfigError, match="it must be one of system, developer, user, assistant, tool"):
        Tokenizer(tiny_tokenizer(), "tiny").encode_chat([{"role": role, "content": "the"}])


# Special tokens.


def test_a_special_token_in_a_message_is_text() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(), "tiny")
    talk = [{"role": "user", "content": f"the {EOS} of it"}]
    tokens = tokenizer.encode_chat(talk)
    assert EOS_ID not in tokens
    assert tokenizer.decode(tokens, special=True) == f"user: the {EOS} of it\nassistant: "
    parsed = tokenizer.encode_chat(talk, parse_special=True)
    assert parsed.count(EOS_ID) == 1
    assert tokenizer.decode(parsed, special=True) == tokenizer.decode(tokens, special=True)


def test_the_templates_own_special_tokens_are_tokens() -> None:
    inner = tiny_tokenizer()
    inner.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = Tokenizer(inner, "tiny")
    tokens = tokenizer.encode_chat([{"role": "user", "content": f"a{EOS}b"}, {"role": "user", "content": "c"}])
    assert [at for at, token in enumerate(tokens) if token == EOS_ID] == [len(tokens) - 3, len(tokens) - 1]


def test_a_mark_cannot_be_forged() -> None:
    """Marks hold a secret, so text that looks like one stays the text it is."""
    tokenizer = Tokenizer(tiny_tokenizer(), "tiny")
    content = f"\U000f0000{'0' * 16}:0\U000f0001 \U000f0000 {EOS}"
    tokens = tokenizer.encode_chat([{"role": "user", "content": content}])
    assert tokenizer.decode(tokens, special=True) == f"user: {content}\nassistant: "


def words() -> tokenizers.Tokenizer:
    """A tokenizer in the way of Llama 2: the first word of a text gets a space before it, others have their own."""
    pieces = ["▁", "▁the", "the", "▁end", "end", "<", ">", "s", "/", "\n", "[", "I", "]"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", -9.0), *((piece, -1.0) for piece in pieces)], unk_id=0)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(
        [tokenizers.AddedToken("<s>"), tokenizers.AddedToken("</s>", rstrip=True), tokenizers.AddedToken("[I]")]
    )
    return inner


parts = st.sampled_from(["the", " end", " ", "\n", "<s>", "</s>", "[I]", "<", "[I", "s>"])


@settings(deadline=None, derandomize=True)
@given(st.lists(parts, max_size=8).map("".join))
def test_text_around_special_tokens_is_cut_as_the_tokenizer_cuts_it(text: str) -> None:
    backend = words()
    assert Specials(backend).encode(text) == backend.encode(text, add_special_tokens=False).ids


@settings(deadline=None, derandomize=True)
@given(st.lists(parts, max_size=8).map("".join), st.lists(parts, max_size=8).map("".join))
def test_hidden_text_holds_no_special_token(user: str, template: str) -> None:
    backend = words()
    specials, own = Specials(backend), {backend.token_to_id(text) for text in ("<s>", "</s>", "[I]")}
    tokens = specials.encode(f"[I]{specials.hide(user)}</s>{template}")
    expected = backend.encode(f"[I]</s>{template}", add_special_tokens=False).ids
    assert [token for token in tokens if token in own] == [token for token in expected if token in own]


def test_tools_and_lists_are_hidden_too() -> None:
    specials = Specials(words())
    value = {"a": ["<s>", 3, None, ("</s>",)], "<s>": True}
    hidden = specials.hide(value)
    assert "<s>" not in str(hidden["a"])
    assert [specials.show(hidden["a"][0]), *hidden["a"][1:3]] == ["<s>", 3, None]
    assert hidden["<s>"] is True


def test_a_template_of_several_is_the_default_one() -> None:
    inner = PreTrainedTokenizerFast(tokenizer_object=words())
    inner.chat_template = {"default": "one", "tool_use": "two"}
    assert Tokenizer(inner, "words").chat_template.source == "one"
