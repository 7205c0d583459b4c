"""Chat templates in the shapes of public ones, written small, and tiny models that have them."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from saguaro.model.tiny import CHAT_TEMPLATE, tiny_tokenizer, write_tiny

_CHATML_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}"

HERMES = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}" + _CHATML_TURN + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen3: the reasoning can be switched off, and then the template closes it at once.
THINKING = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)

# As DeepSeek-R1: the template opens the reasoning.
OPENED = HERMES.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")

LLAMA3 = (
    "{% if tools %}<|head|>system\nEnvironment: ipython\n"
    'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot|>{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '<|head|>assistant\n{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|eot|>'
    "{% elif message.role == 'tool' %}<|head|>ipython\n{{ message.content | tojson }}<|eot|>"
    "{% else %}<|head|>{{ message.role }}\n{{ message.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)

MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.role == 'assistant' %}{{ message.content }}</s>"
    "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
)

MISTRAL_ARGS = MISTRAL.replace(
    '[{% for call in message.tool_calls %}', "{% for call in message.tool_calls %}[ARGS]"
)  # fmt: skip

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "hermes": HERMES,
    "thinking": THINKING,
    "opened": OPENED,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
}

# Tokens of their own, as the public tokenizers have them: special, or not.
ADDED: dict[str, dict[str, bool]] = {
    "plain": {},
    "hermes": {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False},
    "thinking": {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False},
    "opened": {},
    "llama3": {"<|head|>": True, "<|eot|>": True, "<|python_tag|>": True},
    "mistral": {"[TOOL_CALLS]": True, "[INST]": True, "[/INST]": True},
    "mistral_args": {"[TOOL_CALLS]": True, "[ARGS]": True},
}


def write_model(folder: Path, kind: str, *, has_tokens: bool = True, **overrides: Any) -> Path:
    """A tiny model whose chat template is of a kind, and which has that kind's tokens."""
    write_tiny(folder, "llama", **{"num_hidden_layers": 4, "max_position_embeddings": 2048, **overrides})
    tokenizer = tiny_tokenizer()
    for text, is_special in ADDED[kind].items() if has_tokens else ():
        tokenizer.add_tokens(AddedToken(text, special=is_special, normalized=False), special_tokens=is_special)
    tokenizer.chat_template = TEMPLATES[kind]
    tokenizer.save_pretrained(folder)
    return folder
