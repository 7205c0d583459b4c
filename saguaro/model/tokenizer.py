"""Text to tokens and back, through transformers; and text that arrives token by token."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saguaro.errors import ConfigError, ModelError, TokenizerMismatch
from saguaro.model.gguf import GGUFModel, build_tokenizer
from saguaro.model.spec import read_json

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name
        self.n_vocab: int = max(inner.get_vocab().values()) + 1  # ids the tokenizer can make or read
        self.eos_id: int | None = inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens the model puts around one."""
        return list(self._inner(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, ready for the assistant's next turn."""
        if self._inner.chat_template is None:
            raise TokenizerMismatch(f"{self._name} has no chat template; use generate with a plain prompt")
        check_messages(messages)
        text = self._inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens, special ones left out."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_messages(messages: Sequence[Message]) -> None:
    """A conversation is a list of {"role": ..., "content": ...}."""
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ConfigError(f"a message is {message!r}; it must be a mapping with 'role' and 'content'")


def load_tokenizer(path: Path, n_vocab: int) -> Tokenizer:
    """The tokenizer of a model folder or .gguf file; it must fit an embedding of n_vocab rows."""
    tokenizer = Tokenizer(_from_gguf(path) if path.suffix == ".gguf" else _from_folder(path), str(path))
    if tokenizer.n_vocab > n_vocab:
        raise TokenizerMismatch(
            f"the tokenizer in {path} makes ids up to {tokenizer.n_vocab - 1}, the weights know {n_vocab}: "
            "tokenizer and weights are not of the same model"
        )
    return tokenizer


def _from_folder(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TokenizerMismatch(
            f"{folder} holds no tokenizer.json or tokenizer.model; copy the model's tokenizer there"
        )
    # AutoTokenizer looks through every class there is, for two seconds; where the folder names the generic one, ask it.
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("tokenizer_class") if config.exists() else None
    kind = PreTrainedTokenizerFast if named in ("PreTrainedTokenizerFast", "TokenizersBackend") else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # transformers and tokenizers raise many kinds here, bare Exception among them
        raise TokenizerMismatch(f"the tokenizer in {folder} cannot be read ({type(e).__name__}: {e})") from e


def _from_gguf(path: Path) -> Any:
    return wrap_gguf_tokenizer(GGUFModel(path))


def wrap_gguf_tokenizer(model: GGUFModel) -> Any:
    """A GGUF file's tokenizer and chat template as a transformers tokenizer."""
    from transformers import PreTrainedTokenizerFast

    texts = model.get("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: model.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    try:
        special = {name: texts[index] for name, index in ids.items() if index is not None}
    except IndexError as e:
        raise ModelError(f"{model.path} names a special token beyond its {len(texts)} tokens") from e
    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(model),
        chat_template=model.get("tokenizer.chat_template"),
        model_max_length=model.spec.max_length,
        clean_up_tokenization_spaces=False,
        **special,
    )


class TextStream:
    """The text of one growing output. Nothing is shown that may yet change: not half a character, and not the
    beginning of what may become a stop string.

        tokens   |--- shown ---|-- held --|        shown never ends inside a character or a stop string
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._start = 0  # tokens before this are wholly in _text and give the context to decode the rest
        self._read = 0  # tokens before this are in _text
        self._text = ""  # decoded so far
        self._shown = 0  # characters of _text handed out
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return self._text[: self._shown]

    def push(self, token: int) -> str:
        """Take one token, return the text that is now certain. After a stop string, `stopped_by` names it."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        after = self._tokenizer.decode(self._tokens[self._start :])
        if len(after) <= len(before) or after.endswith("�"):
            return ""  # a special token, or a character of which bytes are missing
        self._text += after[len(before) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._show(self._cut())

    def finish(self) -> str:
        """No token will follow: return what was held back."""
        if self.stopped_by is not None:
            return ""
        before = self._tokenizer.decode(self._tokens[self._start : self._read])
        self._text += self._tokenizer.decode(self._tokens[self._start :])[len(before) :]
        end = self._cut()
        return self._show(end if self.stopped_by is not None else len(self._text))

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _cut(self) -> int:
        """Where the certain text ends: before the first stop string, or before what may become one."""
        found = [(self._text.find(stop, self._shown), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if hits:
            at, self.stopped_by = min(hits)
            return at
        return len(self._text) - max((_overlap(self._text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop.

    >>> _overlap("hello wo", "world"), _overlap("hello", "world")
    (2, 0)
    """
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
