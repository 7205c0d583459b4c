"""A SentencePiece vocabulary in a GGUF file gives the tokens that SentencePiece's own rule gives."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from saguaro import LLM, SamplingParams
from saguaro.errors import CorruptModel
from saguaro.model.gguf import GGUFModel
from saguaro.model.tiny import tiny_model
from saguaro.model.tokenizer import Tokenizer, load_tokenizer, wrap_gguf_tokenizer
from tests.model.write_gguf import write_gguf

# Best first, so that a piece is not always best made of what stands before it: "the" of "t" and "he".
MERGED = ["▁t", "he", "in", "▁a", "▁the", "re", "on", "▁▁", "er", "nd", "th", "▁th", "and", "▁and", "the", "▁in"]
MERGED += ["hin", "▁thin", "▁▁▁▁", "end", "▁end", "her", "▁ther", "▁there", "ee", "▁on", "one", "ther", "é▁", "tt"]
LETTERS = [*"▁etaonihsrdé.<>0x"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
HEAD, TAIL = ["<unk>", "<s>", "</s>"], ["<|user|>", "two words", "<|end|>"]
TEXTS = [*HEAD, *BYTES, *MERGED, *LETTERS, *TAIL]
IDS = {text: index for index, text in enumerate(TEXTS)}
SCORES = {piece: -float(rank) for rank, piece in enumerate([*MERGED, *LETTERS])}
TYPES = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
TYPES += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(SCORES)
TYPES += [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.CONTROL]
BOS = IDS["<s>"]

SAMPLES = [
    "the end",
    " the end",
    "there  and    in there",
    "tt ttt\nthe\tend ",
    "café über 中文 🙂",
    "",
    " ",
    "   ",
    "<0x0A>",
    "▁the",
]


def write_sentencepiece(writer: gguf.GGUFWriter, _: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TEXTS)
    writer.add_token_scores([SCORES.get(text, 0.0) for text in TEXTS])
    writer.add_token_types(TYPES)


def opened(folder: Path, **fields: Any) -> GGUFModel:
    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)

    model = tiny_model("llama", vocab_size=len(TEXTS))
    return GGUFModel(write_gguf(folder / "spm.gguf", model, tokenizer=write_sentencepiece, add=add))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return wrap_gguf_tokenizer(opened(tmp_path_factory.mktemp("spm")))


def reference(text: str, prefix: str = "▁") -> list[int]:
    """SentencePiece: merge the neighbours that make the best piece, the first of equals, until there are none."""
    symbols = list(prefix + text.replace(" ", "▁")) if text else []
    while True:
        ways = [(SCORES[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in SCORES]
        if not ways:
            break
        at = -max(ways)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    parts = [[symbol] if symbol in SCORES else [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols]
    return [IDS[piece] for part in parts for piece in part]


@pytest.mark.parametrize("text", SAMPLES, ids=repr)
def test_pieces_are_merged_by_score(ours: Any, text: str) -> None:
    assert ours(text)["input_ids"] == [BOS, *reference(text)]


def test_random_texts_are_merged_by_score(ours: Any) -> None:
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices("  theandinroné.\n中", k=generator.randrange(1, 40)))
        assert ours(text, add_special_tokens=False)["input_ids"] == reference(text), text


def test_random_texts_have_the_tokens_of_transformers(ours: Any) -> None:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    theirs = LlamaTokenizer(vocab=dict(IDS), merges=generate_merges(IDS, SCORES), legacy=True)
    generator = random.Random(1)
    for _ in range(500):
        # Their Metaspace leaves a text alone that begins with a space; SentencePiece puts another before it.
        text = "t" + "".join(generator.choices("  theandinroné.\n中", k=generator.randrange(1, 40)))
        tokens = ours(text, add_special_tokens=False)["input_ids"]
        assert tokens == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(tokens) == theirs.decode(tokens) == text


@pytest.mark.parametrize("text", SAMPLES[:-1], ids=repr)
def test_a_text_survives(ours: Any, text: str) -> None:
    assert Tokenizer(ours, "spm").decode(ours(text)["input_ids"]) == text


def test_control_and_user_defined_tokens_are_found_in_a_text(ours: Any) -> None:
    tokens = ours("<|user|>the two words end<|end|>", add_special_tokens=False)["input_ids"]
    the, end = reference("the "), reference(" end")
    assert tokens == [IDS["<|user|>"], *the, IDS["two words"], *end, IDS["<|end|>"]]
    assert ours.decode(tokens, skip_special_tokens=True) == "the two words  end"
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")


def test_a_file_may_ask_for_no_bos_and_no_space(tmp_path: Path) -> None:
    inner = wrap_gguf_tokenizer(opened(tmp_path, add_bos_token=False, add_space_prefix=False))
    for text in SAMPLES:
        assert inner(text)["input_ids"] == reference(text, prefix="")
    for text in SAMPLES[:-1]:
        assert inner.decode(inner(text)["input_ids"]) == text


def test_a_saved_tokenizer_is_the_same(ours: Any, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path, len(TEXTS))
    for text in SAMPLES:
        assert read.encode(text) == ours(text)["input_ids"]


def test_a_model_with_sentencepiece_talks(tmp_path: Path) -> None:
    llm = LLM(opened(tmp_path).path, device="cpu", kv_memory="1MiB")
    result = llm.generate("there in", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    assert result.prompt_token_ids == [BOS, *reference("there in")]
    assert len(result.outputs[0].token_ids) == 8


def test_everything_that_ends_a_text_is_an_end(tmp_path: Path) -> None:
    assert opened(tmp_path).config()["eos_token_id"] == IDS["</s>"]  # SentencePiece's usual id
    model = opened(tmp_path, eos_token_id=2, eot_token_id=IDS["<|end|>"], eom_token_id=IDS["<|user|>"])
    assert model.config()["eos_token_id"] == [2, IDS["<|end|>"], IDS["<|user|>"]]
    assert model.spec.eos_ids == (2, IDS["<|end|>"], IDS["<|user|>"])
    assert opened(tmp_path, eos_token_id=2, eot_token_id=2).config()["eos_token_id"] == 2


def test_a_special_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=f"special token 5000 beyond its {len(TEXTS)} tokens"):
        wrap_gguf_tokenizer(opened(tmp_path, pad_token_id=5000))


@pytest.mark.parametrize("key", ["tokens", "scores"])
def test_a_vocabulary_without_its_parts(tmp_path: Path, key: str) -> None:
    model = opened(tmp_path)
    del model.metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CorruptModel, match=f"lacks the metadata tokenizer.ggml.{key}"):
        wrap_gguf_tokenizer(model)


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    model = opened(tmp_path, description="ünïcode", pad_token_id=7)
    reader = gguf.GGUFReader(model.path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert model.metadata == fields
    places = {t.name: (t.shape.tolist()[::-1], t.n_bytes, t.data_offset) for t in reader.tensors}
    assert {n: (list(t.shape), t.n_bytes, t.offset) for n, t in model.infos.items()} == places
