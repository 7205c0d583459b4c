"""Public prompt sets by name, fetched on first use. They are no part of the project; each has a licence of its own.

    cache/datasets/
      NAME.jsonl      the prompts, written when the source was checked
      NAME/FILE       a source file that was put here by hand, read instead of a download

A source is accepted if every row has the expected fields and their number is right. Files are written under a temporary
name and renamed, so an interrupted run leaves nothing that looks finished.
"""

import gzip
import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saguaro.errors import DatasetError

GITHUB = "https://raw.githubusercontent.com"
TIMEOUT = 60.0  # seconds without a byte
MAX_BYTES = 2**30  # of a source, unpacked
ABOUT = 0.05  # a set that is revised now and then may have this share fewer or more rows

Row = Mapping[str, Any]
Fetch = Callable[["Dataset", Path], Path]  # downloads the source into a folder


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A set of prompts and where it comes from."""

    name: str
    source: str  # a URL, or hub:REPO/FILE
    n_rows: int
    is_revised: bool = False  # whether the number of rows may differ a little
    prompt_of: Callable[[Row], str]
    licence: str
    about: str

    @property
    def file(self) -> str:
        """The name of the source file."""
        return self.source.rpartition("/")[2]

    @property
    def place(self) -> str:
        """Where people find the source."""
        repo = self.source.removeprefix("hub:")
        return repo if repo == self.source else f"https://huggingface.co/datasets/{repo.rpartition('/')[0]}"


def _first_turn(row: Row) -> str:
    return str(row["turns"][0])


def _instruction(row: Row) -> str:
    """
    >>> _instruction({"instruction": "Add.", "input": "1 2"}), _instruction({"instruction": "Say hi.", "input": ""})
    ('Add.\\n\\n1 2', 'Say hi.')
    """
    return "\n\n".join(str(row[name]) for name in ("instruction", "input") if row[name])


_ALL = (
    Dataset(
        name="humaneval",
        source=f"{GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz",
        n_rows=164,
        prompt_of=lambda row: str(row["prompt"]),
        licence="MIT",
        about="164 Python functions to complete",
    ),
    Dataset(
        name="gsm8k",
        source=f"{GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
        n_rows=1319,
        prompt_of=lambda row: str(row["question"]),
        licence="MIT",
        about="1,319 school mathematics problems (the test split)",
    ),
    Dataset(
        name="alpaca",
        source=f"{GITHUB}/tatsu-lab/stanford_alpaca/main/alpaca_data.json",
        n_rows=52002,
        is_revised=True,
        prompt_of=_instruction,
        licence="CC BY-NC 4.0 (not for commercial use)",
        about="52,002 instructions",
    ),
    Dataset(
        name="ultrafeedback",
        source="hub:openbmb/UltraFeedback/evol_instruct.jsonl",
        n_rows=10000,
        is_revised=True,
        prompt_of=lambda row: str(row["instruction"]),
        licence="MIT",
        about="10,000 instructions (the part evol_instruct, 169 MB)",
    ),
    Dataset(
        name="mt-bench",
        source=f"{GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        n_rows=80,
        prompt_of=_first_turn,
        licence="Apache-2.0",
        about="80 questions of eight kinds (their first turns)",
    ),
    Dataset(
        name="spec-bench",
        source=f"{GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        n_rows=480,
        prompt_of=_first_turn,
        licence="Apache-2.0",
        about="480 questions of six tasks (their first turns)",
    ),
)
DATASETS = {each.name: each for each in _ALL}


def download(dataset: Dataset, folder: Path) -> Path:
    """Download a source from the Hub or from its address."""
    if dataset.source.startswith("hub:"):
        from huggingface_hub import hf_hub_download

        owner, repo, file = dataset.source.removeprefix("hub:").split("/", 2)
        return Path(hf_hub_download(f"{owner}/{repo}", file, repo_type="dataset"))
    path = folder / dataset.file
    with urllib.request.urlopen(dataset.source, timeout=TIMEOUT) as answer, path.open("wb") as out:
        shutil.copyfileobj(answer, out)
        expected = answer.headers.get("Content-Length")
    if expected is not None and path.stat().st_size != int(expected):
        raise DatasetError(f"only {path.stat().st_size} of {expected} bytes arrived")
    return path


def prompts_file(dataset: Dataset, cache: Path, fetch: Fetch = download) -> Path:
    """The file of a set's prompts, made on first use. Says then where they come from, on standard error."""
    folder = cache / "datasets"
    path = folder / f"{dataset.name}.jsonl"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as partial:
            by_hand = folder / dataset.name / dataset.file
            source = by_hand if by_hand.exists() else _fetched(dataset, Path(partial), by_hand, fetch)
            prompts = read_source(dataset, source)
            made = Path(partial) / "prompts"
            made.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in prompts), encoding="utf-8")
            made.replace(path)
    except OSError as e:
        raise DatasetError(f"cannot write to {folder} ({e.strerror}); choose another folder: SAGUARO_CACHE") from e
    told = f"{dataset.name}: {dataset.about}, from {dataset.place}, licence {dataset.licence}; kept as {path}"
    print(f"saguaro: {told}", file=sys.stderr)
    return path


def _fetched(dataset: Dataset, partial: Path, by_hand: Path, fetch: Fetch) -> Path:
    print(f"saguaro: fetching {dataset.name} from {dataset.place} ...", file=sys.stderr)
    try:
        return fetch(dataset, partial)
    except Exception as e:  # the Hub's client raises many kinds; whatever it is, the remedy is the same
        why = " ".join(str(e).split())[:300].rstrip(".") or type(e).__name__
        raise DatasetError(
            f"{dataset.name} could not be fetched from {dataset.place}: {why}. Fetch its file {dataset.file} elsewhere "
            f"and put it at {by_hand}, or give --prompts a file of your own"
        ) from e


def read_source(dataset: Dataset, path: Path) -> list[dict[str, Any]]:
    """The prompts of a source file, checked."""
    try:
        rows = _rows(path)
        prompts = [dataset.prompt_of(row) for row in rows]
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as e:
        why = f"{type(e).__name__}: {e}"
        raise DatasetError(f"{path} is not the set {dataset.name} ({why}); remove it, and fetch it again") from e
    slack = ABOUT * dataset.n_rows if dataset.is_revised else 0
    if abs(len(prompts) - dataset.n_rows) > slack or not all(prompt.strip() for prompt in prompts):
        raise DatasetError(
            f"{path} holds {len(prompts)} prompts, and {dataset.name} has {dataset.n_rows}, none of them empty; remove "
            "it, and fetch it again"
        )
    return [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)]


def _rows(path: Path) -> list[Row]:
    """The rows of a file: JSON lines or one JSON list, perhaps compressed."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    text = data.decode("utf-8")
    if text.lstrip().startswith("["):
        found: list[Row] = json.loads(text)
        return found
    return [json.loads(line) for line in text.split("\n") if line.strip()]
