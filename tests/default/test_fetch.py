"""The default model is fetched once, checked, and repaired when something is wrong with it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from saguaro.errors import DownloadError
from saguaro.model.default import GGUF_NAME, HUB_REPO, fetch_default, is_whole, sha256
from saguaro.model.tiny import write_tiny
from saguaro.types import Progress
from tests.default.hub import serve_hub


@pytest.fixture
def gguf(default_folder: Path) -> Path:
    """The downloaded file."""
    return default_folder.parent / GGUF_NAME


def broken(folder: Path, progress: Progress) -> Path:
    """A source that fails like a network does."""
    raise OSError("connection reset")


def truncated(folder: Path, progress: Progress) -> Path:
    """A source whose download was cut off."""
    path = folder / GGUF_NAME
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


def forbidden(folder: Path, progress: Progress) -> Path:
    """A source that must not be asked."""
    pytest.fail("went to the network though everything was there")


def test_sources_are_tried_in_turn_until_one_gives_the_right_file(gguf: Path, tmp_path: Path) -> None:
    stages = []

    def good(folder: Path, progress: Progress) -> Path:
        return Path(shutil.copy(gguf, folder / "copy"))

    (tmp_path / "partial-left-by-a-killed-run").mkdir()
    folder = fetch_default(tmp_path, lambda stage, *_: stages.append(stage), [broken, truncated, good])
    assert is_whole(folder)
    assert "converting" in stages
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", folder.name, GGUF_NAME])
    # Offline from now on.
    assert fetch_default(tmp_path, sources=[forbidden]) == folder
    # A damaged conversion is made again from the download.
    weights = folder / "model.safetensors"
    digest = sha256(weights)
    with weights.open("r+b") as file:
        file.truncate(1000)
    assert not is_whole(folder)
    fetch_default(tmp_path, sources=[forbidden])
    assert sha256(weights) == digest


def test_a_damaged_download_is_fetched_again(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / GGUF_NAME).write_bytes(gguf.read_bytes()[:-1] + b"\x00")
    asked = []

    def failing(folder: Path, progress: Progress) -> Path:
        asked.append(folder)
        raise OSError("no network")

    with pytest.raises(DownloadError, match="no network"):
        fetch_default(tmp_path, sources=[failing])
    assert asked


def test_when_every_source_fails_each_reason_is_named(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"connection reset.*SHA-256 is.*put that file there yourself"):
        fetch_default(tmp_path, sources=[broken, truncated])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


def test_the_hub_serves_the_same_file(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / GGUF_NAME).symlink_to(gguf)
    script = """
import sys
from pathlib import Path
from saguaro.model.default import GGUF_SHA256, from_hub, sha256
assert sha256(from_hub(Path(sys.argv[1]), lambda *_: None)) == GGUF_SHA256
"""
    with serve_hub(HUB_REPO, tmp_path / "repo") as address:
        _python(script, str(tmp_path / "out"), endpoint=address, home=tmp_path / "hf")


def test_a_hub_id_is_downloaded_once_and_then_read_offline(tmp_path: Path) -> None:
    write_tiny(tmp_path / "repo", "qwen2")
    script = """
import sys
from saguaro import LLM, SamplingParams
print(LLM("someone/tiny", device="cpu").generate("the", SamplingParams(temperature=0, max_tokens=4))[0].token_ids)
"""
    with serve_hub("someone/tiny", tmp_path / "repo") as address:
        online = _python(script, endpoint=address, home=tmp_path / "hf")
    assert _python(script, endpoint=address, home=tmp_path / "hf", offline=True) == online


def test_a_hub_id_that_does_not_exist_is_named(tmp_path: Path) -> None:
    script = """
from saguaro import LLM, errors
try:
    LLM("someone/missing")
except errors.ModelNotFound as e:
    print(e)
"""
    (tmp_path / "repo").mkdir()
    with serve_hub("someone/tiny", tmp_path / "repo") as address:
        said = _python(script, endpoint=address, home=tmp_path / "hf")
    assert "'someone/missing' is neither a local folder nor a model on the Hub" in said


def _python(script: str, *args: str, endpoint: str, home: Path, offline: bool = False) -> str:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
