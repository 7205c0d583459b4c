"""The tokenizer of a GGUF file, built with the tokenizers library."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from saguaro.errors import CorruptModel, SaguaroError, UnsupportedModel
from saguaro.model.files import brief
from saguaro.model.gguf import GGUFModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")

LONGEST_TEXT = 1024  # characters of a token

# Token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def build_tokenizer(model: GGUFModel) -> "Tokenizer":
    """The tokenizer of a GGUF file: byte-level BPE ("gpt2") or SentencePiece's BPE ("llama")."""
    from tokenizers import AddedToken, processors

    kind, pre = model.text("tokenizer.ggml.model", "none"), model.text("tokenizer.ggml.pre", "default")
    if kind != "llama" and (kind != "gpt2" or pre not in _SPLITS):
        raise UnsupportedModel(
            f"{model.path} carries a tokenizer of kind {brief(kind)}/{brief(pre)}; Saguaro reads llama, and gpt2 with "
            f"one of {', '.join(_SPLITS)}: pass the original tokenizer's folder as tokenizer"
        )
    texts = _vocabulary(model, "tokens", str)
    types = _vocabulary(model, "token_type", int, [NORMAL] * len(texts))
    _check_counts(model, texts, types, "token types")
    try:
        tokenizer = _sentencepiece(model, texts, types) if kind == "llama" else _byte_level(model, texts, pre)
    except SaguaroError:
        raise
    except Exception as e:  # tokenizers raises bare Exception for merges of unknown tokens
        raise CorruptModel(f"{model.path} carries a damaged tokenizer ({e}); download it again") from e
    of_type = {t: [text for text, own in zip(texts, types, strict=True) if own == t] for t in (CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in of_type[CONTROL]])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in of_type[USER_DEFINED]])
    bos = model.special_id("bos")
    if model.flag("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe") and bos is not None:
        template = processors.TemplateProcessing(
            single=["bos", "$A"], special_tokens=[{"id": "bos", "ids": [bos], "tokens": [token_text(model, bos)]}]
        )
        before = [] if kind == "llama" else [processors.ByteLevel(trim_offsets=False)]
        tokenizer.post_processor = processors.Sequence([*before, template])
    return tokenizer


def token_text(model: GGUFModel, token: int) -> str:
    """The text of a special token; its id must be in the vocabulary."""
    texts = _vocabulary(model, "tokens", str)
    if not 0 <= token < len(texts):
        raise CorruptModel(
            f"{model.path} names the special token {token} beyond its {len(texts)} tokens; download it again"
        )
    return texts[token]


def _vocabulary(model: GGUFModel, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
    """A list in the metadata, with all values of one type."""
    found = model.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(found, list):
        raise CorruptModel(f"{model.path} lacks the metadata tokenizer.ggml.{key}; download it again")
    wrong = next((value for value in found if type(value) is not kind), None)
    if wrong is not None:
        raise CorruptModel(
            f"{model.path} has {brief(wrong)} among tokenizer.ggml.{key}, which are {kind.__name__}s; download it again"
        )
    return found


def _check_counts(model: GGUFModel, texts: list[str], others: Sequence[object], what: str) -> None:
    """Check that there is one entry per token, and that no token is too long: _merges tries every split of a token."""
    if len(others) != len(texts):
        raise CorruptModel(f"{model.path} has {len(texts)} tokens and {len(others)} {what}; download it again")
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_TEXT:
        raise CorruptModel(
            f"{model.path} has a token of {longest} characters; {LONGEST_TEXT} are the most: download it again"
        )


def _byte_level(model: GGUFModel, texts: list[str], pre: str) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [(left, right) for left, _, right in (one.partition(" ") for one in _vocabulary(model, "merges", str))]
    broken = next((left for left, right in merges if not right), None)
    if broken is not None:
        raise CorruptModel(f"{model.path} has the merge {brief(broken)}, which is no pair of tokens; download it again")
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_split(pre))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(model: GGUFModel, texts: list[str], types: list[int]) -> "Tokenizer":
    """As Llama 2's tokenizer.json: "▁" is a space, one is prepended to every text, and characters without a piece are
    written as bytes. Merges run over whole texts, without pre-tokenisation."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _vocabulary(model, "scores", float)
    _check_counts(model, texts, scores, "scores")
    pieces = {
        text: score
        for text, score, kind in zip(texts, scores, types, strict=True)
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    vocab = {text: index for index, text in enumerate(texts)}
    unknown = model.special_id("unknown")
    assert unknown is not None
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(pieces),
            unk_token=token_text(model, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = model.flag("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if has_prefix else []
    after = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Every split of a piece into two others: best piece first; for one piece the longest left part first.

    >>> _merges({"a": -3.0, "b": -4.0, "ab": -1.0, "bab": -2.0, "ba": 0.0})
    [('b', 'a'), ('a', 'b'), ('ba', 'b'), ('b', 'ab')]
    """
    ways = [
        (score, left, right)
        for piece, score in pieces.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in pieces and right in pieces
    ]
    ways.sort(key=lambda way: (-way[0], -len(way[1]), -len(way[2])))  # the order of transformers
    return [(left, right) for _, left, right in ways]


# llama.cpp's pre-tokeniser names -> the regular expression that splits text before merges.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
    "qwen2": _WORDS % r"\p{N}",
}


def _split(pre: str) -> list[Any]:
    from tokenizers import Regex, pre_tokenizers

    if _SPLITS[pre]:
        return [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    return [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
