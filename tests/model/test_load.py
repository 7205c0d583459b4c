"""A name becomes a folder or a file, and of a Hub repository no more is downloaded than is read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from saguaro.errors import DownloadError, ModelNotFound
from saguaro.model.load import locate
from saguaro.model.tiny import write_tiny
from tests.default.hub import serve_hub

REPO = "someone/tiny"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of REPO on a Hub of our own, with a cache of our own."""
    folder = tmp_path / "repo"
    folder.mkdir()
    with serve_hub(REPO, folder) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield folder


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_read_is_downloaded(repo: Path) -> None:
    write_tiny(repo, "llama")
    wanted = files(repo)
    extra = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/params.json"]
    extra += ["original/consolidated.00.safetensors", "onnx/config.json", "README.md", "tiny.gguf", "model.bin"]
    for name in extra:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_bytes(b"{}")
    assert files(locate(REPO)) == wanted


def test_a_tokenizer_is_downloaded_without_the_weights(repo: Path) -> None:
    write_tiny(repo, "llama")
    for name in ("generation_config.json", "model.safetensors.index.json", "vocab.json", "tokenizer.model"):
        (repo / name).write_text("{}")
    unwanted = {"model.safetensors", "model.safetensors.index.json", "generation_config.json"}
    assert files(locate(REPO, None, tokenizer_only=True)) == files(repo) - unwanted


def test_a_repository_of_gguf_files_names_them(repo: Path) -> None:
    for name in ("README.md", "tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
        (repo / name).write_bytes(b"x")
    message = (
        r"has no config.json but tiny-Q4_0.gguf, tiny-Q8_0.gguf; .*`hf download someone/tiny tiny-Q4_0.gguf`.*path"
    )
    with pytest.raises(ModelNotFound, match=message):
        locate(REPO)


def test_a_cached_repository_without_a_config_and_without_a_network(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "tokenizer.json").write_text("{}")
    locate(REPO, tokenizer_only=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"someone/tiny has no config.json in the Hub's cache .* check the network"):
        locate(REPO)


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for index in range(10):
        (tmp_path / f"{index}.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"no config.json but 0.gguf, .*7.gguf and 2 more; pass the path .*/0.gguf"):
        locate(str(tmp_path))
    assert locate(str(tmp_path / "3.gguf")) == tmp_path / "3.gguf"


def test_a_folder_with_a_config_may_hold_gguf_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    assert locate(str(tmp_path), tokenizer_only=True) == tmp_path
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path
