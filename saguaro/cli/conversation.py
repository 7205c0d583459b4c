"""A conversation in the terminal, with a local engine or a server: turns, slash commands, messages of several lines."""

import contextlib
import sys
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from saguaro.errors import SaguaroError

HELP = """\
  /reset          forget the conversation
  /system TEXT    set the system message and forget the conversation
  /regenerate     answer the last message again
  /history        show the conversation
  /quit           leave (so does Ctrl-D)
  \"\"\"             begins a message of several lines; another \"\"\" ends it"""


class Conversation:
    """The conversation. The oldest turns are dropped when the context is full."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message and the turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def say(self, role: str, content: str) -> None:
        """Add a turn."""
        self.turns.append({"role": role, "content": content})

    def drop_oldest(self) -> bool:
        """Drop the oldest question and its answer. False if only the last question is left."""
        if len(self.turns) <= 1:
            return False
        del self.turns[:2]
        return True


@dataclass(frozen=True)
class Answer:
    """An answer that has been printed."""

    text: str
    is_cut: bool  # by a limit of length
    speed: str


class Answerer(Protocol):
    """Who answers."""

    def answer(self, conversation: Conversation) -> Answer:
        """Stream an answer to the last message; Ctrl-C ends it. Raises SaguaroError if there is none."""
        ...


@dataclass(frozen=True)
class Talk:
    """The state of a conversation."""

    answerer: Answerer
    conversation: Conversation
    notes: Console
    shows_metrics: bool


def run(talk: Talk) -> None:
    """Run turns until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    while True:
        try:
            if not _turn(talk):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # at the prompt; during an answer, Ctrl-C sets a flag
            print()
            talk.notes.print("[dim]Ctrl-D or /quit leaves.[/dim]")


def _turn(talk: Talk) -> bool:
    """Read a message and answer it, or run a command. False: leave."""
    text = _read()
    if text.strip() in ("/quit", "/exit"):
        return False
    is_due = bool(text.strip())
    if text.startswith("/"):
        is_due = _command(text.strip(), talk.conversation, talk.notes)
    elif is_due:
        talk.conversation.say("user", text)
    if is_due:
        _answer(talk)
    return True


def _read() -> str:
    """Read one message; three quotes begin and end a message of several lines."""
    prompt = "> " if sys.stdin.isatty() else ""
    text = input(prompt)
    if not text.startswith('"""'):
        return text
    lines = [text[3:]]
    while not lines[-1].endswith('"""'):
        lines.append(input("… " if prompt else ""))
    lines[-1] = lines[-1][:-3]
    return "\n".join(lines)


def _command(text: str, conversation: Conversation, notes: Console) -> bool:
    """Run a slash command. Returns whether an answer is needed."""
    word, _, rest = text.partition(" ")
    if word == "/regenerate":
        while conversation.turns and conversation.turns[-1]["role"] == "assistant":
            conversation.turns.pop()
        return bool(conversation.turns)
    if word == "/reset":
        conversation.turns.clear()
        notes.print("[dim]Forgotten.[/dim]")
    elif word == "/system":
        conversation.system = rest.strip() or None
        conversation.turns.clear()
        notes.print("[dim]System message set, conversation forgotten.[/dim]")
    elif word == "/history":
        for message in conversation.messages:
            notes.print(f"[bold]{message['role']}[/bold]: {escape(message['content'])}")
    elif word == "/help":
        notes.print(HELP, markup=False)
    else:
        notes.print(f"{word} is no command; /help lists them", markup=False)
    return False


def _answer(talk: Talk) -> None:
    """Have the last message answered, and add the answer to the conversation."""
    try:
        answer = talk.answerer.answer(talk.conversation)
    except SaguaroError as e:
        talk.notes.print(f"saguaro: {e}", markup=False)
        talk.conversation.turns.pop()
        return
    talk.conversation.say("assistant", answer.text)
    if answer.is_cut:
        talk.notes.print("[dim]Cut off: max_tokens is reached, or the context is full.[/dim]")
    if talk.shows_metrics:
        talk.notes.print(f"[dim]{answer.speed}[/dim]")
