"""Which mistakes the tests would miss: make small mistakes at random, run the tests of that folder, list what passed.

    python -m bench.mutants --sample 300 --seed 0

Mistakes are made in a copy of the project, never in place. Each result is one line of a JSON lines file. A second run
with the same file continues where the first ended; mistakes in a file that has changed since are tried again.
"""

import ast
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parent.parent
TESTS = {  # those that take least time first: the first failure ends a run
    "algo": ["tests/algo", "tests/draft/test_planner.py", "tests/round/test_exact.py"],
    "kv": ["tests/kv", "tests/target", "tests/cli/test_flags.py", "tests/model/test_refusals.py"],
    "target": ["tests/target", "tests/round", "tests/engine/test_robust.py", "tests/engine/test_structured.py"],
    "draft": ["tests/draft", "tests/round", "tests/engine/test_stalls.py", "tests/engine/test_methods.py"],
    "link": ["tests/link", "tests/engine/test_draft_process.py"],
    "parallel": ["tests/parallel"],
    "engine": ["tests/engine", "tests/cli/test_flags.py", "tests/model/test_refusals.py"],
    "serve": ["tests/serve/tools", "tests/serve/test_isolated.py", "tests/serve/http"],
    "round.py": ["tests/target/test_round.py", "tests/round", "tests/engine/test_robust.py"],
}
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not browser and not gpu and not network")
LEFT_BEHIND = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "*.jsonl")
LEAST_S, TIMES = 60.0, 4.0  # a run may take so many times as long as one without a mistake, and at least so long
MEMORY = 16 * 2**30  # bytes that a run may take
IDLE = ("TYPE_CHECKING", "__name__ == '__main__'")  # conditions of what is run by type checkers and commands alone
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """What to try."""

    sample: int = 300
    """Mistakes, chosen at random."""
    seed: int = 0
    folder: str | None = None
    """One of saguaro's folders, or round.py; without it, all that have tests in the table."""
    results: Path = ROOT / "mutants.jsonl"
    """Where results are kept, and found by the next run."""


@dataclass(frozen=True)
class Mutant:
    """One mistake in one file."""

    folder: str
    path: str  # from the root
    line: int
    kind: str
    before: str
    after: str
    source: str  # the whole file with it

    @property
    def name(self) -> str:
        """The same for the same mistake in the same text."""
        return hashlib.sha256(f"{self.path}\n{self.source}".encode()).hexdigest()[:16]


def mutants_of(folder: str, path: Path) -> Iterator[Mutant]:
    """Every mistake that can be made in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, kind, after in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = " ".join(source[begin:end].decode().split())
        changed = (source[:begin] + after.encode() + source[end:]).decode()
        yield Mutant(folder, str(path.relative_to(ROOT)), node.lineno, kind, before, after, changed)


def _changes(node: ast.AST) -> Iterator[tuple[Any, str, str]]:
    """Nodes of the tree, and for each a kind of mistake and the text in its place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield node, "comparison", ast.unparse(ast.Compare(node.left, [OTHER[type(op)]()], node.comparators))
        case ast.Constant(value=bool()):
            yield node, "constant", str(not node.value)
        case ast.Constant(value=int(number)):
            yield node, "constant", str(number + 1)
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(a, ast.Starred) for a in node.args):
            if ast.dump(first) != ast.dump(second) and ast.unparse(node.func) not in ("min", "max"):
                yield node, "arguments", ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.Constant):
            is_not = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
            negated = node.test.operand if is_not else ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]
            yield node.test, "condition", ast.unparse(negated)
        case ast.Return(value=ast.expr()) | ast.Raise() | ast.Break() | ast.Continue() | ast.AugAssign():
            yield node, "dropped", "pass"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "dropped", "pass"
    for child in _children(node):
        yield from _changes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that a test can be about: no types, decorators, messages or asserts."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_idle = isinstance(child, ast.If) and ast.unparse(child.test) in IDLE
            if isinstance(child, ast.AST) and not is_idle and not isinstance(child, ast.JoinedStr | ast.Assert):
                yield child


def choose(args: Args) -> list[Mutant]:
    """The sample; the same for the same seed and source."""
    folders = TESTS if args.folder is None else {args.folder: TESTS[args.folder]}
    every: list[Mutant] = []
    for folder in folders:
        path = ROOT / "saguaro" / folder
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            every += mutants_of(folder, file)
    return random.Random(args.seed).sample(every, min(args.sample, len(every)))


def run(copy: Path, folder: str, doctests: str | None, timeout: float | None) -> tuple[str, float]:
    """Run a folder's tests, and a file's own examples: passed, failed or late, and the seconds it took."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *([doctests] if doctests else []), *TESTS[folder]]
    there = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}  # also for processes of tests
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    began = time.monotonic()
    with subprocess.Popen(command, cwd=copy, env=there, start_new_session=True, **quiet) as process:
        try:
            result = "passed" if process.wait(timeout) == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = "late"
        finally:
            if process.poll() is None:  # late, or this program was interrupted
                os.killpg(process.pid, signal.SIGKILL)
    return result, time.monotonic() - began


def try_all(mutants: list[Mutant], results: Path) -> Iterator[tuple[Mutant, str]]:
    """What became of each, from the file where it is known already."""
    lines = results.read_text().splitlines() if results.exists() else []
    known = {one["name"]: one["result"] for one in map(json.loads, lines)}
    limits: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, results.open("a") as out:
        copy = Path(folder) / "saguaro"
        shutil.copytree(ROOT, copy, ignore=LEFT_BEHIND)
        for mutant in mutants:
            if mutant.name not in known:
                if mutant.folder not in limits:
                    result, seconds = run(copy, mutant.folder, None, None)
                    if result != "passed":
                        sys.exit(f"without any mistake these tests fail: {' '.join(TESTS[mutant.folder])}")
                    limits[mutant.folder] = max(LEAST_S, TIMES * seconds)
                path = copy / mutant.path
                original = path.read_text()
                path.write_text(mutant.source)
                result, seconds = run(copy, mutant.folder, mutant.path, limits[mutant.folder])
                path.write_text(original)
                facts = {name: getattr(mutant, name) for name in ("name", "path", "line", "kind", "before", "after")}
                print(json.dumps({**facts, "result": result, "seconds": round(seconds, 1)}), file=out, flush=True)
                known[mutant.name] = result
            yield mutant, known[mutant.name]


def main(args: Args) -> None:
    """Print each survivor as it is found, then the totals."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # processes of tests inherit it
    found = Counter[str]()
    for mutant, result in try_all(choose(args), args.results):
        found[result] += 1
        if result == "passed":
            print(f"{mutant.path}:{mutant.line}: {mutant.kind}: {mutant.before}  ->  {mutant.after}", flush=True)
    n, n_passed = found.total(), found["passed"]
    print(f"{n} mistakes: {found['failed']} failed a test, {found['late']} did not end in time")
    print(f"{n_passed} survived, {n_passed / max(n, 1):.1%}; each lacks a test or changes no behaviour")


if __name__ == "__main__":
    main(tyro.cli(Args))
