"""`saguaro chat`: a conversation in the terminal. Ctrl-C stops the answer, never the program."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType

from rich.console import Console

from saguaro.config import SamplingParams
from saguaro.errors import CapacityError, PromptTooLong, SaguaroError
from saguaro.serve import cli
from saguaro.serve.llm import LLM
from saguaro.serve.results import Delta

HELP = """\
  /reset          forget the conversation
  /system TEXT    set the system message and forget the conversation
  /regenerate     answer the last message again
  /history        show the conversation
  /quit           leave (so does Ctrl-D)
  \"\"\"             begins a message of several lines; another \"\"\" ends it"""


class Conversation:
    """What was said; the oldest turns are dropped when the context is full."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """System message and turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def say(self, role: str, content: str) -> None:
        """Add a turn."""
        self.turns.append({"role": role, "content": content})

    def drop_oldest(self) -> bool:
        """Forget the oldest question and its answer; False if only the last question is left."""
        if len(self.turns) <= 1:
            return False
        del self.turns[:2]
        return True


def chat(command: cli.Chat) -> int:
    """Talk until the user leaves."""
    params = command.sampling.params()
    llm = cli.load(command.which, command.engine)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    conversation = Conversation(command.system)
    notes = Console(stderr=True, highlight=False)
    notes.print(f"[dim]{llm.engine.loaded.name}, method {llm.engine.method.name}. /help lists commands.[/dim]")
    while True:
        try:
            text = _read()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            notes.print("[dim]Ctrl-D or /quit leaves.[/dim]")
            continue
        if not text.strip():
            continue
        if text.startswith("/"):
            if text.strip() in ("/quit", "/exit"):
                return 0
            if not _command(text.strip(), conversation, notes):
                continue
        else:
            conversation.say("user", text)
        _answer(llm, params, conversation, notes, command.metrics)


def _read() -> str:
    """One message; three quotes begin and end one of several lines."""
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
    """Carry out a slash command; whether an answer is due."""
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
            notes.print(f"[bold]{message['role']}[/bold]: {message['content']}", markup=True)
    elif word == "/help":
        notes.print(HELP, markup=False)
    else:
        notes.print(f"{word} is no command; /help lists them", markup=False)
    return False


def _answer(llm: LLM, params: SamplingParams, conversation: Conversation, notes: Console, shows_metrics: bool) -> None:
    """Stream an answer to the last message and remember it."""
    began, first, n_tokens, pieces = time.perf_counter(), 0.0, 0, []
    deltas = _start(llm, params, conversation, notes)
    if deltas is None:
        return
    with _interrupts() as is_interrupted:
        for delta in deltas:
            first = first or time.perf_counter()
            n_tokens += len(delta.token_ids)
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
            if is_interrupted():
                deltas.close()
                break
    print()
    conversation.say("assistant", "".join(pieces))
    if shows_metrics:
        seconds = time.perf_counter() - first
        speed = (n_tokens - 1) / seconds if n_tokens > 1 and seconds > 0 else 0.0
        notes.print(f"[dim]{n_tokens} tokens, first after {(first - began) * 1e3:.0f} ms, {speed:.1f} tok/s[/dim]")


def _start(llm: LLM, params: SamplingParams, conversation: Conversation, notes: Console) -> Generator[Delta] | None:
    """Begin an answer, forgetting the oldest turns if they no longer fit."""
    while True:
        try:
            return llm.stream(conversation.messages, params)
        except (PromptTooLong, CapacityError) as e:
            if not conversation.drop_oldest():
                notes.print(f"saguaro: {e}", markup=False)
                conversation.turns.clear()
                return None
            notes.print("[dim]The context is full; the oldest turns are forgotten.[/dim]")
        except SaguaroError as e:
            notes.print(f"saguaro: {e}", markup=False)
            conversation.turns.pop()
            return None


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C sets a flag instead of raising in the middle of a round."""
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
