"""`python -m validation.mutants`: coverage, and mistakes that the quick tests notice, by package.

The quick tests run under coverage, which says which of them run each line. A mutant is one changed
place in a function, drawn by a seed; the most special tests of its line run against a copy of the
source with that change. One that none of them notices survives, and is printed with its line.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGE = Path("src/stratagem")
# Lines that only processes of a test run are nobody's: no mutant is drawn there. Without `sigterm`,
# whose handler ends the test process itself, to which some tests send this signal.
_COVERAGE = """
[run]
branch = true
source = {root}/src/stratagem
data_file = {data}
parallel = true
patch = subprocess
concurrency = thread, multiprocessing
"""
# A loop that a mutant never ends counts as noticed.
_LIMIT_S = 90
_MAX_TESTS = 12

_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file: the `index`-th possible one."""

    path: str
    index: int
    line: int
    change: str


def changed_places(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Changes the tree in each possible way in turn; it is as before when the next is asked for."""
    for node, parent in _nodes_of_functions(tree):
        if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
            owner, field = (node.ops, 0) if isinstance(node, ast.Compare) else (node, "op")
            before = owner[field] if isinstance(owner, list) else node.op
            if (other := _OPPOSITES.get(type(before))) is not None:
                _set(owner, field, other())
                yield node.lineno, f"{type(before).__name__} -> {other.__name__}"
                _set(owner, field, before)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            before = node.test
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), before), before)
            yield before.lineno, "negated condition"
            node.test = before
        elif isinstance(node, ast.Constant) and not isinstance(parent, ast.Expr | ast.JoinedStr):
            before = node.value
            if isinstance(before, bool) or type(before) in (int, float):
                node.value = not before if isinstance(before, bool) else before + 1
                yield node.lineno, f"{before!r} -> {node.value!r}"
                node.value = before
        elif isinstance(node, ast.Return) and node.value is not None:
            before = node.value
            if not (isinstance(before, ast.Constant) and before.value is None):
                node.value = ast.copy_location(ast.Constant(None), before)
                yield node.lineno, "return None"
                node.value = before
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            before = node.value
            node.value = ast.copy_location(ast.Constant(None), before)
            yield node.lineno, f"no call of {ast.unparse(before.func)}"
            node.value = before


def _set(owner: ast.AST | list[ast.AST], field: str | int, value: ast.AST) -> None:
    if isinstance(owner, list):
        owner[field] = value
    else:
        setattr(owner, field, value)


def _nodes_of_functions(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes in bodies of functions with their parents: what runs at an import has no test."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            stack: list[tuple[ast.AST, ast.AST]] = [(one, function) for one in function.body]
            while stack:
                node, parent = stack.pop()
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue
                # Texts of errors are nobody's numbers.
                if not isinstance(node, ast.Raise):
                    yield node, parent
                    stack += [(child, node) for child in ast.iter_child_nodes(node)]


def tests_by_line(coverage_file: Path, path: str) -> dict[int, set[str]]:
    """Returns the ids of tests that run each line of a file, by the paths that coverage noted."""
    import coverage

    data = coverage.CoverageData(str(coverage_file))
    data.read()
    found: dict[int, set[str]] = collections.defaultdict(set)
    for measured in data.measured_files():
        if measured.endswith("/" + path):
            for line, contexts in data.contexts_by_lineno(measured).items():
                found[line] |= {one.partition("|")[0] for one in contexts if "::" in one}
    return found


def drawn(
    files: list[str], tests: dict[str, dict[int, set[str]]], number: int, seed: int
) -> list[Mutant]:
    """Draws mutants of lines that tests run, equally likely wherever they are."""
    possible = [
        Mutant(path, index, line, change)
        for path in files
        for index, (line, change) in enumerate(
            changed_places(ast.parse((_ROOT / path).read_text()))
        )
        if tests[path].get(line)
    ]
    return random.Random(seed).sample(possible, min(number, len(possible)))


def mutated(mutant: Mutant) -> str:
    """Returns the source of the changed file."""
    tree = ast.parse((_ROOT / mutant.path).read_text())
    next(itertools.islice(changed_places(tree), mutant.index, None))
    return ast.unparse(tree)


def fails(tests: list[str], source: Path) -> bool:
    """Runs tests against a copy of the source; True if one fails, or takes too long."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            sys.path.insert(0, str(source))
            os.environ["PYTHONPATH"] = f"{source}:{os.environ.get('PYTHONPATH', '')}"
            silent = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silent, descriptor)
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
            os._exit(pytest.main([*options, *tests]))
        finally:  # whatever the mistake does: nothing of the parent's runs here
            os._exit(1)
    status, end_s = None, time.monotonic() + _LIMIT_S
    while status is None and time.monotonic() < end_s:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = code if done else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status != 0


def is_noticed(mutant: Mutant, tests: list[str], source: Path) -> bool:
    """Runs tests against a copy of the source with the change; True if one fails."""
    target = source / Path(mutant.path).relative_to("src")
    before = target.read_text()
    target.write_text(mutated(mutant))
    try:
        return fails(tests, source)
    finally:
        target.write_text(before)


def _chosen(ids: set[str], package: str, sizes: dict[str, int]) -> list[str]:
    """The tests of the package first, of these the most special."""
    return sorted(ids, key=lambda one: (f"/{package}/" not in one, sizes[one], one))[:_MAX_TESTS]


def measure_coverage(data: Path, tests: list[str]) -> None:
    """Runs the quick tests, or some, and writes which of them run each line."""
    settings = data.with_name("settings.ini")  # coverage erases files that begin with the name
    settings.write_text(_COVERAGE.format(root=_ROOT, data=data))
    command = [sys.executable, "-m", "pytest", "--numprocesses", "3", "--dist", "loadfile", "-q"]
    command += ["--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
    # A test that is too slow under coverage may fail; its lines ran.
    subprocess.run([*command, *tests], cwd=_ROOT, check=False)


def print_coverage(data: Path) -> None:
    """Prints the part of branches and lines that ran, by package."""
    import coverage

    measured = coverage.Coverage(
        data_file=str(data), config_file=str(data.with_name("settings.ini"))
    )
    measured.load()
    report = data.with_name("lines.json")
    measured.json_report(outfile=str(report))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path, entry in json.loads(report.read_text())["files"].items():
        inside = path.partition("src/stratagem/")[2].split("/")
        counts[inside[0] if len(inside) > 1 else "(root)"].update(
            {name: entry["summary"][name] for name in _COUNTS}
        )
    for package, count in sorted(counts.items()):
        ran = count["covered_lines"] + count["covered_branches"]
        print(f"{package}: {ran / (count['num_statements'] + count['num_branches']):.1%} covered")


_COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def main() -> int:
    """Prints the coverage, survivors and a line a package; writes all results."""
    parser = argparse.ArgumentParser(prog="python -m validation.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=40, help="mutants a package")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--packages", nargs="*", help="all by default")
    parser.add_argument("--tests", nargs="*", default=[], help="what runs under coverage")
    parser.add_argument("--output", type=Path, default=_ROOT / "build" / "mutants")
    options = parser.parse_args()
    packages = options.packages or sorted(
        one.parent.name for one in (_ROOT / _PACKAGE).glob("*/__init__.py")
    )
    os.environ["KERAS_BACKEND"] = "jax"
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output.resolve() / "coverage"
    if not data.exists():
        measure_coverage(data, options.tests)
    print_coverage(data)
    # Loaded once, not in each fork; JAX starts its threads with its backend, later.
    import jax  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401

    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(_ROOT / "src", source)
        for package in packages:
            noticed = 0
            root = _ROOT / _PACKAGE / package
            files = sorted(str(one.relative_to(_ROOT)) for one in root.rglob("*.py"))
            tests = {path: tests_by_line(data, path) for path in files}
            sizes = collections.Counter(
                one for lines in tests.values() for ids in lines.values() for one in ids
            )
            mutants = drawn(files, tests, options.number, options.seed)
            for mutant in mutants:
                ids = _chosen(tests[mutant.path][mutant.line], package, sizes)
                found = is_noticed(mutant, ids, source)
                if found and fails(ids, source):
                    print(f"Fails without a change: one of {ids}", flush=True)
                noticed += found
                results.append({**dataclasses.asdict(mutant), "is_noticed": found})
                if not found:
                    print(f"{mutant.path}:{mutant.line}: {mutant.change}", flush=True)
            print(f"{package}: {noticed} of {len(mutants)} noticed", flush=True)
            (options.output / "results.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
