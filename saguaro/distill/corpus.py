"""Training texts on disk: prompts and the target's continuations.

A corpus is a folder of shards. A shard is written under a temporary name and renamed when it is complete, so the
result of an interrupted run can be read and extended.

    texts-00000.safetensors
      tokens     [T] int32      all texts, one after another
      starts     [N+1] int64    text i is tokens[starts[i] : starts[i+1]]
      n_prompts  [N] int32      the first n_prompts[i] tokens of text i are its prompt
"""

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saguaro.errors import CorpusError

FORMAT = "saguaro texts 1"
_DTYPES = {"tokens": torch.int32, "starts": torch.int64, "n_prompts": torch.int32}


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation.

    >>> Text([5, 6, 7], n_prompt=2).continuation
    [7]
    """

    tokens: list[int]
    n_prompt: int

    def __post_init__(self) -> None:
        assert 0 <= self.n_prompt <= len(self.tokens), (self.n_prompt, len(self.tokens))

    @property
    def prompt(self) -> list[int]:
        """The target's input."""
        return self.tokens[: self.n_prompt]

    @property
    def continuation(self) -> list[int]:
        """The target's output, with the end-of-text token if it was generated."""
        return self.tokens[self.n_prompt :]


class Corpus:
    """The texts of a folder, in the order they were added. A missing folder is created."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = _shard_paths(folder)
        except OSError as e:
            raise CorpusError(f"cannot keep texts in {folder} ({e.strerror}); choose another folder") from e
        self._shards = [_read(path) for path in paths]
        self._ends: list[int] = []  # number of texts up to the end of each shard
        for shard in self._shards:
            self._ends.append(len(self) + len(shard.n_prompts))

    def __len__(self) -> int:
        """Number of texts."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Text:
        """One text; negative indices count from the end."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        number = bisect_right(self._ends, place)
        return self._shards[number].text(place - (self._ends[number - 1] if number else 0))

    def __iter__(self) -> Iterator[Text]:
        for shard in self._shards:
            for index in range(len(shard.n_prompts)):
                yield shard.text(index)

    @property
    def n_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(len(shard.tokens) - int(shard.n_prompts.sum()) for shard in self._shards)

    def counts(self, n_vocab: int) -> Tensor:  # [V] int64
        """How often each token occurs in the continuations; the vocabulary must be the target's."""
        total = torch.zeros(n_vocab, dtype=torch.int64)
        for number, shard in enumerate(self._shards):
            found = torch.bincount(shard.continuations(), minlength=n_vocab)
            if len(found) > n_vocab:
                raise CorpusError(
                    f"{_shard_path(self.folder, number)} holds token {len(found) - 1}, the target knows {n_vocab}: "
                    "its texts are another target's; use another folder"
                )
            total += found
        return total

    def append(self, texts: Sequence[Text]) -> None:
        """Write texts as a new shard, atomically."""
        if not texts:
            return
        shard = _pack(texts)
        path = _shard_path(self.folder, len(self._shards))
        try:
            _write(shard, path)
        except OSError as e:
            raise CorpusError(
                f"cannot write {path} ({e.strerror}); {len(self)} texts, {self.n_tokens} tokens of the target, are "
                "written: make room and run the same command again, it goes on from there"
            ) from e
        self._ends.append(len(self) + len(texts))
        self._shards.append(shard)


@dataclass(frozen=True)
class _Shard:
    """Some texts in their stored form."""

    tokens: Tensor  # [T] int32
    starts: Tensor  # [N+1] int64
    n_prompts: Tensor  # [N] int32

    def text(self, index: int) -> Text:
        start, end = self.starts[index : index + 2].tolist()
        return Text(self.tokens[start:end].tolist(), int(self.n_prompts[index]))

    def continuations(self) -> Tensor:  # [continuation tokens] int32
        begins = (self.starts[:-1] + self.n_prompts).repeat_interleave(self.starts.diff())  # [T]
        return self.tokens[torch.arange(len(self.tokens)) >= begins]

    def is_consistent(self) -> bool:
        """Whether starts go from 0 to the number of tokens, and every prompt is within its text."""
        if len(self.starts) != len(self.n_prompts) + 1:
            return False
        bounds = [int(self.starts[0]), int(self.starts[-1])] == [0, len(self.tokens)]
        prompts = (self.n_prompts >= 0) & (self.n_prompts <= self.starts.diff())
        return bounds and bool(prompts.all()) and bool((self.tokens >= 0).all())


def _pack(texts: Sequence[Text]) -> _Shard:
    lengths = torch.tensor([0, *(len(text.tokens) for text in texts)])
    return _Shard(
        tokens=torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
        starts=lengths.cumsum(0),
        n_prompts=torch.tensor([text.n_prompt for text in texts], dtype=torch.int32),
    )


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"texts-{number:05}.safetensors"


def _shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder; an error if one is missing in between."""
    names = [re.fullmatch(r"texts-(\d{5,})\.safetensors", path.name) for path in folder.iterdir()]
    numbers = {int(match[1]) for match in names if match}
    for number in range(len(numbers)):
        if number not in numbers:
            raise CorpusError(
                f"{_shard_path(folder, number)} is missing and later shards are there; bring it back, or delete those "
                "after it: they are sampled again"
            )
    return [_shard_path(folder, number) for number in range(len(numbers))]


def _read(path: Path) -> _Shard:
    remedy = "delete it and the shards after it: they are sampled again"
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format")
            if found != FORMAT:
                raise CorpusError(f"{path} has the format {found!r}, not {FORMAT!r}; use another folder, or {remedy}")
            tensors = {name: file.get_tensor(name) for name in _DTYPES}
    except (SafetensorError, OSError) as e:
        raise CorpusError(f"{path} is damaged or truncated ({e}); {remedy}") from e
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dim() == 1}
    shard = _Shard(**tensors)
    if kinds != _DTYPES or not shard.is_consistent():
        raise CorpusError(f"{path} is damaged: its texts do not add up; {remedy}")
    return shard


def _write(shard: _Shard, path: Path) -> None:
    """Write a shard under a temporary name, then rename it."""
    from safetensors.torch import save

    tensors = {name: getattr(shard, name) for name in _DTYPES}
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(save(tensors, metadata={"format": FORMAT}))
            file.flush()
            os.fsync(file.fileno())  # the content must be on disk before the rename
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
