"""Text to tokens and back, with transformers; and incremental decoding."""

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

MOST_BYTES = 256 * 2**20  # of one tokenizer file
FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json"]
FILES += ["vocab*", "merges.txt", "*.jinja", "chat_template.json", "*.model"]  # files that transformers may read


class AddedToken(NamedTuple):
    """A token added to the learnt vocabulary."""

    id: int
    is_special: bool


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name  # inner: the transformers tokenizer
        self.run_template: Run = run_here
        self.spelling: dict[int, str] = {token: text for text, token in inner.get_vocab().items()}
        self.n_vocab: int = max(self.spelling) + 1  # largest id + 1
        self.eos_id: int | None = inner.eos_token_id
        self.bytes = TokenBytes(inner, self.spelling)
        self._backend = getattr(inner, "backend_tokenizer", None)  # decodes in a fifth of the time
        self._specials = Specials(self._backend) if self._backend is not None else None

    @property
    def added_tokens(self) -> dict[str, AddedToken]:
        """Added tokens by their spelling. A text is split at them first; special ones are left out when decoding."""
        found = self.inner.added_tokens_decoder
        return {str(token): AddedToken(index, token.special) for index, token in found.items()}

    def copy(self) -> "Tokenizer":
        """A copy for use in another thread."""
        return Tokenizer(copy.deepcopy(self.inner), self.name)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a plain text, with the model's surrounding special tokens if `special`."""
        _check_text(text)
        with self._panics():
            return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def _panics(self) -> AbstractContextManager[None]:
        """Report a panic of the tokenizer as an error of the text."""
        return panics_as(lambda e: RequestError(f"the tokenizer of {self.name} fails on this text ({e}); shorten it"))

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; raises if it has none."""
        source = self.inner.chat_template
        if isinstance(source, Mapping):  # several by name
            source = source.get("default")
        if source is None:
            raise TokenizerMismatch(f"{self.name} has no chat template; use generate with a plain prompt")
        return ChatTemplate(source, self.inner.special_tokens_map, self.name, self.run_template)

    def encode_chat(self, messages: Sequence[Message], *, parse_special: bool = False, **options: Any) -> list[int]:
        """Tokens of a conversation, ready for the assistant's next turn; options are those of ChatTemplate.render.

        Special tokens spelled out in messages stay text, unless parse_special.
        """
        check_messages(messages)
        hidden, options = (messages, options) if parse_special else (self.hide(messages), self.hide(options))
        return self.encode_rendered(self.chat_template.render(hidden, **options))

    def hide(self, value: T) -> T:
        """A value for a template, with special tokens that its strings spell out marked as text."""
        hidden: T = value if self._specials is None else self._specials.hide(value)
        return hidden

    def encode_rendered(self, text: str, special: bool = False) -> list[int]:
        """Tokens of a rendered template; marks of `hide` are encoded as text."""
        if self._specials is not None and self._specials.are_hidden(text):
            _check_text(text)
            with self._panics():
                return self._specials.encode(text, special)
        return self.encode(text, special)

    def encode_opening(self) -> list[int]:
        """Tokens of a conversation before the content of its first user message."""
        mark = "\u2063saguaro\u2063"  # occurs in no template
        before, *after = self.chat_template.render([{"role": "user", "content": mark}]).split(mark)
        tokens = self.encode(before, special=False)
        if len(after) != 1 or not tokens:
            raise TokenizerMismatch(f"the chat template of {self.name} does not say where a user's message begins")
        return tokens

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of these tokens, with special ones only if `special`."""
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=not special))
        skipped = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self.inner.decode(list(tokens), **skipped))


@contextlib.contextmanager
def panics_as(error: Callable[[BaseException], SaguaroError]) -> Iterator[None]:
    """Raise our own error if tokenizers panics: some regular expressions fail on some texts.

    A panic is a BaseException whose class cannot be imported; it would end the thread.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise error(e) from e


def _check_text(text: str) -> None:
    """Refuse lone surrogates, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"the text has {text[e.start]!r} at {e.start}, which is not a character; repair it") from e


def load_tokenizer(path: Path, n_vocab: int, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder or .gguf file; it must fit an embedding of n_vocab rows.

    A given chat template replaces the model's own.
    """

    def unreadable(e: BaseException) -> TokenizerMismatch:
        why = f"{type(e).__name__}: {shortened(str(e))}"
        return TokenizerMismatch(f"the tokenizer in {path} cannot be read ({why}); copy the model's tokenizer there")

    try:
        with panics_as(unreadable):
            inner = _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)
            inner("Hello, world! 1234")  # some load and then fail on any text
            inner.chat_template = chat_template or inner.chat_template
            tokenizer = Tokenizer(inner, str(path))
    except SaguaroError:
        raise
    except Exception as e:  # transformers and tokenizers raise many types, bare Exception among them
        raise unreadable(e) from e
    if tokenizer.n_vocab > n_vocab:
        raise TokenizerMismatch(
            f"the tokenizer in {path} makes ids up to {tokenizer.n_vocab - 1}, the weights know {n_vocab}: "
            "tokenizer and weights are not of the same model"
        )
    return tokenizer


def has_tokenizer(path: Path) -> bool:
    """Whether a model folder or .gguf file has a tokenizer."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return path.suffix == ".gguf" or any(is_there(path / name) for name in files)


def _from_folder(folder: Path) -> Any:
    """The tokenizer of a folder. Code in the folder is never run."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not has_tokenizer(folder):
        raise TokenizerMismatch(
            f"{folder} holds no tokenizer.json or tokenizer.model; copy the model's tokenizer there"
        )
    _check_files(folder)
    # tokenizer.json is complete. AutoTokenizer would rebuild parts of it for the class named in tokenizer_config.json,
    # and take two seconds to look that class up.
    kind = PreTrainedTokenizerFast if is_there(folder / "tokenizer.json") else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as e:
        if "trust_remote_code" not in str(e):
            raise
        raise TokenizerMismatch(  # transformers names a remedy that does not exist here
            f"the tokenizer in {folder} is code (auto_map in a JSON file there), which is never run; "
            "copy the model's tokenizer.json there"
        ) from e


def _check_files(folder: Path) -> None:
    """Check that every file that transformers may read is a regular file with a plain name."""
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
    """Incremental decoding of one output. Text that may still change is held back: an incomplete character, or the
    beginning of a possible stop string.

        tokens   |--- context ---|--- in the text ---|-- undecoded --|
        text                     |------ shown ------|--- held ---|

    The context is the end of the prompt: some tokenizers write a word's leading space only after other text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
        *,
        special: bool = False,  # whether special tokens are decoded
        keeps_stop: bool = False,  # whether a stop string is part of the text
    ) -> None:
        self._tokenizer, self._stop, self._special, self._keeps_stop = tokenizer, stop, special, keeps_stop
        self._tokens = list(context)  # context for decoding, then tokens not in the text yet
        self._read = len(self._tokens)  # how many of these are context, in the text or before it
        self._text = ""  # decoded so far
        self._shown = 0  # characters of _text returned so far
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text returned so far."""
        return self._text[: self._shown]

    def fork(self) -> "TextStream":
        """An independent copy."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        return other

    def push(self, *tokens: int, may_stop: bool = True) -> str:
        """Add tokens and return the text that is now final. After a stop string, `stopped_by` is that string.

        To find the token that completes a stop string, push tokens one at a time.
        """
        self._tokens.extend(tokens)
        new = self._undecoded()
        if new.endswith("\ufffd"):
            return ""  # an incomplete character
        if new:
            self._text += new
            del self._tokens[: self._read]  # the tokens just decoded are enough context
            self._read = len(self._tokens)
        elif len(self._tokens) > self._read + 16:  # special tokens give no text and need no context
            del self._tokens[self._read :]
        return self._show(self._cut() if may_stop else len(self._text))

    def finish(self) -> str:
        """End the output: return the text that was held back."""
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
        """The end of the final text: the first stop string, or the beginning of a possible one."""
        found = [(self._text.find(stop, self._shown), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            return at + len(self.stopped_by) if self._keeps_stop else at
        return len(self._text) - max((_overlap(self._text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a prefix of stop.

    >>> _overlap("hello wo", "world"), _overlap("hello", "world")
    (2, 0)
    """
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
