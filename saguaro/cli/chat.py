"""`saguaro chat`: a conversation in the terminal. Ctrl-C stops the answer, never the program."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.markup import escape

from saguaro.cli import commands
from saguaro.cli.conversation import Answer, Conversation, Talk, run
from saguaro.cli.meter import Meter
from saguaro.cli.paint import Painter, legend, wants_color
from saguaro.config import SamplingParams
from saguaro.engine.results import failure_of
from saguaro.errors import ConfigError, SaguaroError
from saguaro.llm import LLM
from saguaro.measure.metrics import Recorder, Summary


def chat(command: commands.Chat) -> int:
    """Run the conversation until the user leaves."""
    if command.key_env is not None:
        raise ConfigError(f"key_env is {command.key_env!r}, and there is no server; give --url http://HOST:PORT/v1")
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
        answerer = _Model(llm, params, notes, has_color)
        run(Talk(answerer, Conversation(command.system), notes, command.metrics))
        if command.metrics:
            why = llm.engine.explain(summary.prepared.n > 0)
            notes.print(f"[dim]{summary}[/dim]" if why is None else f"[dim]{summary}\n{why}[/dim]")
    return 0


class _Model:
    """Answers with a model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams, notes: Console, has_color: bool) -> None:
        self._llm, self._params, self._notes, self._has_color = llm, params, notes, has_color

    def answer(self, conversation: Conversation) -> Answer:
        """Print an answer as it grows."""
        meter, pieces, reason, failure = Meter(), [], None, None
        with _interrupts() as is_interrupted:
            tokens = self._fitting(conversation)
            stream = self._llm.stream(tokens, self._params)
            painter = Painter(self._llm.engine.tokenizer, tokens) if self._has_color else None
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
            raise SaguaroError(failure)
        return Answer("".join(pieces), is_cut=reason == "length", speed=str(meter))

    def _fitting(self, conversation: Conversation) -> list[int]:
        """The conversation's tokens, without the oldest turns if an answer needs their room."""
        engine = self._llm.engine
        longest = engine.kv.longest
        room = self._params.max_tokens or min(512, longest // 4)
        tokens = engine.tokenizer.encode_chat(conversation.messages)
        while len(tokens) + room > longest and conversation.drop_oldest():
            self._notes.print("[dim]The context is full; the oldest turns are forgotten.[/dim]")
            tokens = engine.tokenizer.encode_chat(conversation.messages)
        engine.check(tokens, self._params)
        return tokens


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
