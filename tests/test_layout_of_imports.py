"""Imports only point up the list of folders, and the engine needs nothing of the interfaces."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "saguaro"
ORDER = [
    *("errors", "method", "config", "rng", "types", "algo", "model", "kernels"),
    *("device", "kv", "attention", "runner", "target", "draft", "round", "methods", "link", "parallel"),
    *("engine", "llm", "client", "measure", "distill", "serve", "report", "cluster", "cli"),
]
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))


def part(name: str) -> str:
    """saguaro.kv.pages -> kv."""
    return name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_up(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "saguaro" else [f"saguaro.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("saguaro.") and part(name) != "__version__":
                assert ORDER.index(part(name)) <= ORDER.index(own), f"{path.name} imports {name}"


def test_the_engine_imports_without_the_interfaces() -> None:
    """On a bare GPU machine there is torch, numpy, safetensors, tokenizers and transformers, and no more."""
    script = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("rich", "tyro", "fastapi", "uvicorn", "typer", "gguf", "triton", "llguidance"):
            raise ModuleNotFoundError(f"{name} is not on a bare machine", name=name)
sys.meta_path.insert(0, Bare())
import saguaro.round, saguaro.methods, saguaro.link.null, saguaro.model.load, saguaro.llm
from saguaro import LLM, SamplingParams
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_only_the_server_imports_what_serves() -> None:
    """Whoever generates does not wait for a web framework to load."""
    script = "import sys, saguaro.cli.main, saguaro.cli.generate, saguaro.cli.chat, saguaro.serve.front\n"
    script += "assert not {'fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_no_method_is_named_in_the_loop() -> None:
    for path in [ROOT / "round.py", *(ROOT / "target").glob("*.py"), *(ROOT / "link").glob("*.py")]:
        assert "method ==" not in path.read_text(), path
