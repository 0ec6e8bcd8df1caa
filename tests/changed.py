"""Lint, types and tests of what changed since a branch, for `make check`.

A changed module runs the test file of its place and name, and every one that imports it.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# Whole rooms of slow tests are no check of a minute; `make test` runs them.
MAX_TEST_FILES = 25
ALWAYS = ("tests/architecture/test_layers.py",)


def changed_files(base: str) -> list[str]:
    """Returns the files that differ from the common ancestor with `base`, and untracked ones."""
    ancestor = _git("merge-base", base, "HEAD")[0]
    names = {*_git("diff", "--name-only", ancestor), *_git("ls-files", "-o", "--exclude-standard")}
    return sorted(name for name in names if (ROOT / name).is_file())


def module_name(path: str) -> str:
    """Returns the dotted name of a file under `src/` or of the tests."""
    parts = Path(path).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def namesake(path: str) -> str:
    """Returns the test file of a module of `src/stratagem`."""
    *rooms, stem = Path(path).with_suffix("").parts[2:]
    return str(Path("tests", *rooms, f"test_{stem}.py"))


def imported_modules(text: str) -> set[str]:
    """Returns every module, and every name in one, that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def tests_of(changed: Iterable[str]) -> list[str]:
    """Returns the test files to run, the namesakes first."""
    changed = [name for name in changed if name.endswith(".py")]
    sources = [name for name in changed if name.startswith("src/stratagem/")]
    first = [name for name in map(namesake, sources) if (ROOT / name).is_file()]
    first += [name for name in changed if Path(name).name.startswith("test_")]
    modules = {module_name(name) for name in changed}
    importing = [name for name, imported in _imports_of_tests().items() if modules & imported]
    return list(dict.fromkeys([*first, *importing]))


@functools.cache
def _imports_of_tests() -> dict[str, set[str]]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {str(path.relative_to(ROOT)): imported_modules(path.read_text()) for path in paths}


def main() -> int:
    """Runs all steps, names those that failed, and returns 1 if there are any."""
    changed = changed_files(sys.argv[1] if len(sys.argv) > 1 else "main")
    python = [name for name in changed if name.endswith((".py", ".pyi"))]
    sources = [name for name in python if name.startswith("src/")]
    tests = tests_of(changed)
    if len(tests) > MAX_TEST_FILES:
        print(f"{len(tests)} test files are concerned; the first {MAX_TEST_FILES} run here.")
    steps = [["codespell", *changed]] if changed else []
    if python:
        steps += [["ruff", "check", *python], ["ruff", "format", "--check", *python]]
    if sources:
        steps.append(["pyright", *sources])
    selected = [*ALWAYS, *tests[:MAX_TEST_FILES]]
    steps.append(["pytest", "-q", "--numprocesses", "2", "--dist", "loadfile", *selected])
    failed = [step[0] for step in steps if _run(step)]
    print(f"Failed: {', '.join(dict.fromkeys(failed))}." if failed else "All passed.")
    return int(bool(failed))


def _run(step: list[str]) -> int:
    print(f"--- {step[0]}", flush=True)
    return subprocess.run([str(BIN / step[0]), *step[1:]], cwd=ROOT, check=False).returncode


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
