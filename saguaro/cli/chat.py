"""`saguaro chat`: a conversation in the terminal. Ctrl-C stops the answer, never the program."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from rich.console import Console
from rich.markup import escape

from saguaro.cli import commands
from saguaro.cli.meter import Meter
from saguaro.cli.paint import Painter, legend, wants_color
from saguaro.config import SamplingParams
from saguaro.engine.results import failure_of
from saguaro.errors import SaguaroError
from saguaro.llm import LLM
from saguaro.measure.metrics import Recorder, Summary

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


def chat(command: commands.Chat) -> int:
    """Run the conversation until the user leaves."""
    params, summary = command.sampling.params(), Summary()
    notes = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(Recorder(command.record)) if command.record else None
        llm = stack.enter_context(commands.load(command.which, command.engine))
        llm.engine.round.observers += [summary.add, *([recorder] if recorder else [])]
        has_color = wants_color(command.color)
        name, method = escape(llm.engine.loaded.name), llm.engine.method
        notes.print(f"[dim]{name}, method {method.name}. /help lists commands.[/dim]")
        if has_color and method.drafts:
            print(legend(), file=sys.stderr)
        _talk(Talk(llm, params, Conversation(command.system), notes, command.metrics, has_color))
        if command.metrics:
            why = llm.engine.preparation.explain(summary.prepared.n > 0)
            notes.print(f"[dim]{summary}[/dim]" if why is None else f"[dim]{summary}\n{why}[/dim]")
    return 0


@dataclass(frozen=True)
class Talk:
    """The state of a conversation."""

    llm: LLM
    params: SamplingParams
    conversation: Conversation
    notes: Console
    shows_metrics: bool
    has_color: bool


def _talk(talk: Talk) -> None:
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
    """Stream an answer to the last message and add it to the conversation."""
    meter, pieces, reason, failure = Meter(), [], None, None
    with _interrupts() as is_interrupted:
        tokens = _fitting(talk)
        if tokens is None:
            return
        stream = talk.llm.stream(tokens, talk.params)
        painter = Painter(talk.llm.engine.tokenizer, tokens) if talk.has_color else None
        while not stream.is_done:
            for delta in stream.ready():
                meter.add(delta)
                pieces.append(delta.text)
                reason, failure = delta.finish_reason, failure_of(delta)
                print(painter.paint(delta) if painter else delta.text, end="", flush=True)
            if is_interrupted():
                stream.close()
            stream.pump()
        print()
        if failure is not None:
            talk.notes.print(f"saguaro: {failure}", markup=False)
            talk.conversation.turns.pop()
            return
        talk.conversation.say("assistant", "".join(pieces))
        if reason == "length":
            talk.notes.print("[dim]Cut off: max_tokens is reached, or the context is full.[/dim]")
        if talk.shows_metrics:
            talk.notes.print(f"[dim]{meter}[/dim]")


def _fitting(talk: Talk) -> list[int] | None:
    """The conversation's tokens, without the oldest turns if needed for an answer; None if it cannot fit."""
    engine, conversation = talk.llm.engine, talk.conversation
    longest = engine.kv.longest
    room = talk.params.max_tokens or min(512, longest // 4)
    try:
        tokens = engine.tokenizer.encode_chat(conversation.messages)
        while len(tokens) + room > longest and conversation.drop_oldest():
            talk.notes.print("[dim]The context is full; the oldest turns are forgotten.[/dim]")
            tokens = engine.tokenizer.encode_chat(conversation.messages)
        engine.check(tokens, talk.params)
        return tokens
    except SaguaroError as e:
        talk.notes.print(f"saguaro: {e}", markup=False)
        conversation.turns.pop()
        return None


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """In this context Ctrl-C sets a flag instead of raising during a round."""
    pressed = False

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
