"""Text to tokens and back, through transformers; and text that arrives token by token."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from saguaro.errors import RequestError, SaguaroError, TokenizerMismatch
from saguaro.model.chat_template import ChatTemplate, Message, Run, check_messages, run_here
from saguaro.model.files import is_there, neighbour, read_json, shortened
from saguaro.model.gguf import GGUFModel
from saguaro.model.gguf_tokenizer import build_tokenizer, token_text
from saguaro.model.specials import Specials
from saguaro.model.token_bytes import TokenBytes

T = TypeVar("T")

MOST_BYTES = 256 * 2**20  # of a file of a tokenizer
FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json"]
FILES += ["vocab*", "merges.txt", "*.jinja", "chat_template.json", "*.model"]  # that transformers may read


class AddedToken(NamedTuple):
    """A token beside the vocabulary that was learnt."""

    id: int
    is_special: bool


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name  # transformers' own
        self.run_template: Run = run_here
        self.spelling: dict[int, str] = {token: text for text, token in inner.get_vocab().items()}
        self.n_vocab: int = max(self.spelling) + 1  # ids the tokenizer can make or read
        self.eos_id: int | None = inner.eos_token_id
        self.bytes = TokenBytes(inner, self.spelling)
        self._backend = getattr(inner, "backend_tokenizer", None)  # which decodes in a fifth of the time
        self._specials = Specials(self._backend) if self._backend is not None else None

    @property
    def added_tokens(self) -> dict[str, AddedToken]:
        """Tokens that a text is cut at before anything else, by their spelling; special ones are left out of texts."""
        found = self.inner.added_tokens_decoder
        return {str(token): AddedToken(index, token.special) for index, token in found.items()}

    def copy(self) -> "Tokenizer":
        """One that another thread can use at the same time."""
        return Tokenizer(copy.deepcopy(self.inner), self.name)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a plain text, with the special tokens the model puts around one unless these are not wanted."""
        _check_text(text)
        with self._panics():
            return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def _panics(self) -> AbstractContextManager[None]:
        """What the tokenizer's own code may break with is told as an error of the text."""
        return panics_as(lambda e: RequestError(f"the tokenizer of {self.name} fails on this text ({e}); shorten it"))

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; raises where it has none."""
        source = self.inner.chat_template
        if isinstance(source, Mapping):  # several by name
            source = source.get("default")
        if source is None:
            raise TokenizerMismatch(f"{self.name} has no chat template; use generate with a plain prompt")
        return ChatTemplate(source, self.inner.special_tokens_map, self.name, self.run_template)

    def encode_chat(self, messages: Sequence[Message], *, parse_special: bool = False, **options: Any) -> list[int]:
        """Tokens of a conversation, ready for the assistant's next turn; options are those of ChatTemplate.render.

        A special token that a message spells out is text, unless parse_special.
        """
        check_messages(messages)
        hidden, options = (messages, options) if parse_special else (self.hide(messages), self.hide(options))
        return self.encode_rendered(self.chat_template.render(hidden, **options))

    def hide(self, value: T) -> T:
        """A value for a template to render, in which special tokens that its strings spell out are marked as text."""
        hidden: T = value if self._specials is None else self._specials.hide(value)
        return hidden

    def encode_rendered(self, text: str, special: bool = False) -> list[int]:
        """Tokens of a text that a template rendered; marks of `hide` are the text they stand for."""
        if self._specials is not None and self._specials.are_hidden(text):
            _check_text(text)
            with self._panics():
                return self._specials.encode(text, special)
        return self.encode(text, special)

    def encode_opening(self) -> list[int]:
        """Tokens of a conversation up to where its first user's message begins."""
        mark = "\u2063saguaro\u2063"  # nobody's words
        before, *after = self.chat_template.render([{"role": "user", "content": mark}]).split(mark)
        tokens = self.encode(before, special=False)
        if len(after) != 1 or not tokens:
            raise TokenizerMismatch(f"the chat template of {self.name} does not say where a user's message begins")
        return tokens

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of these tokens, special ones left out unless they are wanted."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=not special))
        skipped = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.inner.decode(list(tokens), **skipped))


@contextlib.contextmanager
def panics_as(error: Callable[[BaseException], SaguaroError]) -> Iterator[None]:
    """Raise an error of ours where tokenizers panics: some regular expressions fail on some texts.

    A panic is a BaseException of a class that cannot be imported, and would end a thread.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise error(e) from e


def _check_text(text: str) -> None:
    """Text that can be encoded: no half of a surrogate pair, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"the text has {text[e.start]!r} at {e.start}, which is not a character; repair it") from e


def load_tokenizer(path: Path, n_vocab: int, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder or .gguf file; it must fit an embedding of n_vocab rows.

    A chat template takes the place of the model's own.
    """

    def unreadable(e: BaseException) -> TokenizerMismatch:
        why = f"{type(e).__name__}: {shortened(str(e))}"
        return TokenizerMismatch(f"the tokenizer in {path} cannot be read ({why}); copy the model's tokenizer there")

    try:
        with panics_as(unreadable):
            inner = _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)
            inner("Hello, world! 1234")  # some are built and fail on any text
            inner.chat_template = chat_template or inner.chat_template
            tokenizer = Tokenizer(inner, str(path))
    except SaguaroError:
        raise
    except Exception as e:  # transformers and tokenizers raise many kinds here, bare Exception among them
        raise unreadable(e) from e
    if tokenizer.n_vocab > n_vocab:
        raise TokenizerMismatch(
            f"the tokenizer in {path} makes ids up to {tokenizer.n_vocab - 1}, the weights know {n_vocab}: "
            "tokenizer and weights are not of the same model"
        )
    return tokenizer


def has_tokenizer(path: Path) -> bool:
    """Whether a model folder or .gguf file comes with a tokenizer."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return path.suffix == ".gguf" or any(is_there(path / name) for name in files)


def _from_folder(folder: Path) -> Any:
    """The tokenizer of a folder. Code that the folder brings is never run."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not has_tokenizer(folder):
        raise TokenizerMismatch(
            f"{folder} holds no tokenizer.json or tokenizer.model; copy the model's tokenizer there"
        )
    _check_files(folder)
    # tokenizer.json says all there is to say. AutoTokenizer would rebuild parts of it by the class that is named beside
    # it, and take two seconds to look that up.
    kind = PreTrainedTokenizerFast if is_there(folder / "tokenizer.json") else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_files(folder: Path) -> None:
    """Every file that transformers may read is a file, and is named by its usual name."""
    for place in (folder, folder / "additional_chat_templates"):
        for path in sorted(place.iterdir()) if place.is_dir() else []:
            if any(path.match(pattern) for pattern in FILES):
                is_there(path, MOST_BYTES)
    config = folder / "tokenizer_config.json"
    versions = read_json(config).get("fast_tokenizer_files", []) if is_there(config) else []
    for name in versions if isinstance(versions, list) else [versions]:
        neighbour(config, name)


def _from_gguf(path: Path) -> Any:
    return wrap_gguf_tokenizer(GGUFModel(path))


def wrap_gguf_tokenizer(model: GGUFModel) -> Any:
    """A GGUF file's tokenizer and chat template as a transformers tokenizer."""
    from transformers import PreTrainedTokenizerFast

    inner, template = build_tokenizer(model), "tokenizer.chat_template"
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.special_id(role) for name, role in names.items()}
    special = {name: token_text(model, index) for name, index in ids.items() if index is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=model.text(template) if template in model.metadata else None,
        model_max_length=model.spec.max_length,
        clean_up_tokenization_spaces=False,
        **special,
    )


class TextStream:
    """The text of one growing output. Nothing is shown that may yet change: not half a character, and not the
    beginning of what may become a stop string.

        tokens   |--- context ---|--- in the text ---|-- undecoded --|
        text                     |------ shown ------|--- held ---|

    The context is the end of the prompt: some tokenizers write a word's space only if something comes before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        special: bool = False,  # whether special tokens have a text
        keeps_stop: bool = False,  # whether a stop string is part of the text
    ) -> None:
        self._tokenizer, self._stop, self._special, self._keeps_stop = tokenizer, stop, special, keeps_stop
        self._tokens = list(context)  # those needed to decode what comes, and those not in the text yet
        self._read = len(self._tokens)  # of these, how many are in the text or before it
        self._text = ""  # decoded so far
        self._shown = 0  # characters of _text handed out
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return self._text[: self._shown]

    def fork(self) -> "TextStream":
        """Another that goes on from here by itself."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        return other

    def push(self, *tokens: int, may_stop: bool = True) -> str:
        """Take tokens, return the text that is now certain. After a stop string, `stopped_by` names it.

        Who must know at which token a stop string is complete gives them one by one.
        """
        self._tokens.extend(tokens)
        new = self._undecoded()
        if new.endswith("\ufffd"):
            return ""  # a character of which bytes are missing
        if new:
            self._text += new
            del self._tokens[: self._read]  # what was just decoded is context enough for what comes
            self._read = len(self._tokens)
        elif len(self._tokens) > self._read + 16:  # special tokens give no text and need no context
            del self._tokens[self._read :]
        return self._show(self._cut() if may_stop else len(self._text))

    def finish(self) -> str:
        """No token will follow: return what was held back."""
        if self.stopped_by is not None:
            return ""
        self._text += self._undecoded()
        self._tokens, self._read = [], 0
        end = self._cut()
        return self._show(end if self.stopped_by is not None else len(self._text))

    def _undecoded(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._read], self._special)
        return self._tokenizer.decode(self._tokens, self._special)[len(before) :]

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _cut(self) -> int:
        """Where the certain text ends: at the first stop string, or before what may become one."""
        found = [(self._text.find(stop, self._shown), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            return at + len(self.stopped_by) if self._keeps_stop else at
        return len(self._text) - max((_overlap(self._text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop.

    >>> _overlap("hello wo", "world"), _overlap("hello", "world")
    (2, 0)
    """
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
