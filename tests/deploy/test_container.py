"""The container file: it copies what is there, and starts the server with flags that there are."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Containerfile"


def steps() -> list[tuple[str, str]]:
    """Instructions and what follows them."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines() if line.strip())]


def rest_of(name: str) -> list[str]:
    return [rest for found, rest in steps() if found == name]


def serve_help() -> str:
    command = [sys.executable, "-m", "saguaro", "serve", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = [name for rest in rest_of("COPY") for name in shlex.split(rest)[:-1]]
    assert len(copied) >= 4
    for name in copied:
        assert (ROOT / name).exists(), name
    first, *kept, caches = FILE.with_name("Containerfile.dockerignore").read_text().split()
    assert first == "*"
    assert {f"!{name}" for name in copied} == set(kept)
    assert caches == "**/__pycache__"


def test_the_server_knows_its_flags() -> None:
    (entry,) = rest_of("ENTRYPOINT")
    program, command, *words = json.loads(entry)
    assert (program, command) == ("saguaro", "serve")
    flags = [word for word in words if word.startswith("--")]
    known = serve_help()
    for flag in flags:
        assert re.search(rf"{flag}\b", known), flag
    assert words[words.index("--port") + 1] == rest_of("EXPOSE")[0]


def test_it_is_not_root_and_tells_its_health() -> None:
    (user,) = rest_of("USER")
    assert int(user) > 0
    assert f"--uid {user}" in " ".join(rest_of("RUN"))
    (check,) = rest_of("HEALTHCHECK")
    program, flag, code = json.loads(check[check.index("CMD") + 3 :])
    assert (program, flag) == ("python3", "-c")
    assert ":8000/health" in code
    compile(code, "HEALTHCHECK", "exec")


def test_torch_is_of_the_versions_that_the_package_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(one for one in project["dependencies"] if one.startswith("torch"))
    assert f'TORCH="{wanted}"' in rest_of("ARG")
