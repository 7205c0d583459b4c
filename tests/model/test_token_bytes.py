"""The bytes of a text's tokens, put together, are the text's bytes."""

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saguaro.model.tiny import EOS, EOS_ID, tiny_tokenizer
from saguaro.model.token_bytes import spell
from saguaro.model.tokenizer import Tokenizer

TEXTS = ["the end", " in the inn", "é€😀", "a\n\tb", "\x00\x7f", "日本語 in an inn"]


def sentencepiece() -> Tokenizer:
    """A vocabulary as Llama 2 has it: "▁" for spaces, <0xNN> for bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"theindaA",
        "th",
        "the",
        "▁the",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    fast = Fast(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>"), "sp")


def metaspace() -> Tokenizer:
    vocab = {piece: at for at, piece in enumerate(["<unk>", "▁", *"theindab"])}
    fast = Fast(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    fast.decoder = decoders.Metaspace(prepend_scheme="never")
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), "meta")


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_are_their_bytes(text: str) -> None:
    words = Tokenizer(tiny_tokenizer(), "tiny")
    assert b"".join(words.bytes.of(token) for token in words.encode(text)) == text.encode()
    assert [words.bytes.of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_tokens_are_their_bytes_with_a_space_before(text: str) -> None:
    words = sentencepiece()
    assert b"".join(words.bytes.of(token) for token in words.encode(text)) == b" " + text.encode()


def test_a_space_before_a_word_is_a_part_of_it() -> None:
    words = sentencepiece()
    by_name = {name: token for token, name in words.spelling.items()}
    assert [words.bytes.of(by_name[name]) for name in ("▁the", "the", "<0xE2>", "<s>")] == [
        b" the",
        b"the",
        b"\xe2",
        b"<s>",
    ]
    assert words.decode([by_name["▁the"]]) == words.decode([by_name["the"]])  # which the text alone does not tell


def test_metaspace_is_a_space() -> None:
    words = metaspace()
    assert b"".join(words.bytes.of(token) for token in words.encode("the bad inn")) == b"the bad inn"


def test_a_decoder_that_is_not_known_here_tells_by_itself() -> None:
    vocab = {"[UNK]": 0, "the": 1, "##re": 2}
    fast = Fast(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    words = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast), "pieces")
    assert [words.bytes.of(token) for token in (1, 2)] == [words.decode([token]).encode() for token in (1, 2)]


def test_an_added_token_is_its_name() -> None:
    words = Tokenizer(tiny_tokenizer(), "tiny")
    assert words.bytes.of(EOS_ID) == EOS.encode()
    assert words.bytes.of(287) == b""  # beyond the vocabulary: a padded row of the weights


def test_what_is_no_text_is_spelled_as_bytes() -> None:
    assert [spell(b"a"), spell("é".encode()), spell(b"\xc3")] == ["a", "é", "bytes:\\xc3"]
