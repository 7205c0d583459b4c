"""The command-line settings for parsing the model's output."""

from dataclasses import dataclass

from saguaro.serve.tools.formats import find_format, find_thinking


@dataclass(frozen=True, kw_only=True)
class Parsers:
    """How the model's output is read."""

    tool_call_parser: str = "auto"
    """How the model writes tool calls: hermes (Qwen too), llama3_json, mistral, json, or auto: as the chat template
    has it; json where it has no tools, which are then listed in the system's text."""
    reasoning_parser: str = "auto"
    """How the model writes its reasoning: deepseek_r1, qwen3 (both <think>), mistral ([THINK]), none, or auto: as the
    chat template has it."""
    enable_auto_tool_choice: bool = True
    """Whether the model may call tools by itself, as tool_choice auto lets it."""

    def __post_init__(self) -> None:
        find_format(self.tool_call_parser, "")
        find_thinking(self.reasoning_parser, "")
