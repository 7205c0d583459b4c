"""The corpus: what is appended is read again, and what cannot be read or written is said."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from saguaro.distill.corpus import FORMAT, Corpus, Text
from saguaro.errors import CorpusError

ONE = [Text([1, 2, 3], 2), Text([4], 1), Text([5, 6, 7, 8], 1)]
TWO = [Text([9, 3], 1)]


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """A disk on which no larger file can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_shard(folder: Path, tokens: list[int], starts: list[int], n_prompts: list[int], form: str = FORMAT) -> None:
    """A first shard as somebody else may have written it."""
    tensors = {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "starts": torch.tensor(starts),
        "n_prompts": torch.tensor(n_prompts, dtype=torch.int32),
    }
    save_file(tensors, folder / "texts-00000.safetensors", metadata={"format": form})


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "new" / "texts")
    assert len(corpus) == 0
    assert corpus.n_tokens == 0
    assert list(corpus) == []
    corpus.append(ONE)
    corpus.append([])
    corpus.append(TWO)
    names = sorted(path.name for path in corpus.folder.iterdir())
    assert names == ["texts-00000.safetensors", "texts-00001.safetensors"]
    for same in (corpus, Corpus(corpus.folder)):
        assert list(same) == ONE + TWO
        assert [same[i] for i in range(len(same))] == ONE + TWO
        assert same[-1] == TWO[0]
        assert same.n_tokens == 1 + 0 + 3 + 1
    for index in (4, -5):
        with pytest.raises(IndexError, match=f"text {index} of 4"):
            corpus[index]


def test_counts_are_of_continuations(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    assert corpus.counts(3).tolist() == [0, 0, 0]
    corpus.append(ONE)
    corpus.append(TWO)
    assert corpus.counts(10).tolist() == [0, 0, 0, 2, 0, 0, 1, 1, 1, 0]
    with pytest.raises(CorpusError, match=r"texts-00000.safetensors holds token 8, the target knows 8: .* another"):
        corpus.counts(8)


@given(
    st.lists(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 5)), min_size=1), max_size=3)
)
def test_any_texts(tmp_path_factory: pytest.TempPathFactory, shards: list[list[tuple[list[int], int]]]) -> None:
    corpus = Corpus(tmp_path_factory.mktemp("texts"))
    texts = [[Text(tokens, min(n, len(tokens))) for tokens, n in shard] for shard in shards]
    for shard in texts:
        corpus.append(shard)
    every = [text for shard in texts for text in shard]
    assert list(Corpus(corpus.folder)) == every
    said = [token for text in every for token in text.continuation]
    assert corpus.n_tokens == len(said)
    assert corpus.counts(10).tolist() == [said.count(token) for token in range(10)]


def test_a_truncated_shard(tmp_path: Path) -> None:
    Corpus(tmp_path).append(ONE)
    path = tmp_path / "texts-00000.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CorpusError, match=r"texts-00000.safetensors is damaged or truncated .*; delete it and"):
        Corpus(tmp_path)


def test_a_shard_of_another_format(tmp_path: Path) -> None:
    write_shard(tmp_path, [1], [0, 1], [0], form="pt")
    with pytest.raises(CorpusError, match=r"texts-00000.safetensors has the format 'pt', not 'saguaro texts 1'; use"):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "starts", "n_prompts"),
    [
        ([1, 2], [0, 1], [1]),  # a token that is no text's
        ([1, 2], [1, 2], [1]),
        ([1, 2], [0, 3, 2], [1, 0]),  # a text of negative length
        ([1, 2], [0, 2], [3]),  # a prompt longer than its text
        ([1, 2], [0, 2], [-1]),
        ([1, 2], [0, 2], [1, 1]),
        ([1, -2], [0, 2], [1]),
        ([], [], []),
    ],
)
def test_a_shard_that_does_not_add_up(
    tmp_path: Path, tokens: list[int], starts: list[int], n_prompts: list[int]
) -> None:
    write_shard(tmp_path, tokens, starts, n_prompts)
    with pytest.raises(CorpusError, match=r"texts-00000.safetensors is damaged: its texts do not add up; delete it"):
        Corpus(tmp_path)


def test_a_shard_without_a_tensor_or_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "texts-00000.safetensors"
    save_file({"tokens": torch.zeros(1)}, path, metadata={"format": FORMAT})
    with pytest.raises(CorpusError, match=r"texts-00000.safetensors is damaged or truncated"):
        Corpus(tmp_path)
    save_file({name: torch.zeros(1) for name in ("tokens", "starts", "n_prompts")}, path, metadata={"format": FORMAT})
    with pytest.raises(CorpusError, match="do not add up"):
        Corpus(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    for _ in range(3):
        corpus.append(TWO)
    (tmp_path / "texts-00001.safetensors").unlink()
    with pytest.raises(CorpusError, match=r"texts-00001.safetensors is missing and later shards are there; bring it"):
        Corpus(tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match=r"cannot keep texts in .*file .*; choose another folder"):
        Corpus(tmp_path / "file")


def test_a_full_disk_leaves_whole_shards_and_no_other(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.append(ONE)
    with (
        files_of_at_most(4096),
        pytest.raises(CorpusError, match=r"cannot write .*texts-00001.* 3 texts, 4 tokens .* are written: make room"),
    ):
        corpus.append([Text([1] * 10_000, 1)])
    assert [path.name for path in tmp_path.iterdir()] == ["texts-00000.safetensors"]
    assert list(corpus) == ONE
    corpus.append(TWO)
    assert list(Corpus(tmp_path)) == ONE + TWO


def test_what_a_killed_run_left_is_not_read_and_gets_overwritten(tmp_path: Path) -> None:
    (tmp_path / "texts-00000.partial").write_bytes(b"half")
    corpus = Corpus(tmp_path)
    assert len(corpus) == 0
    corpus.append(ONE)
    assert [path.name for path in tmp_path.iterdir()] == ["texts-00000.safetensors"]
