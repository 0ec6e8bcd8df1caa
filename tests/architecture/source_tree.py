"""The package's source as data, so that a rule is a function from modules to violations."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src"


# The package's files are read under two names each.
_parsed = cache(ast.parse)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, or one name imported from a module."""

    module: str
    name: str | None
    line: int
    in_function: bool
    for_types_only: bool

    @property
    def full_name(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


@dataclasses.dataclass(frozen=True)
class Module:
    """One file: its dotted name, its path and its text."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return _parsed(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree.body, in_function=False, for_types_only=False))

    @property
    def room(self) -> str:
        """The folder or file directly under the package; "" for the package's own `__init__`."""
        return [*self.name.split("."), ""][1]

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@cache
def load(root: Path, *, under: Path | None = None) -> list[Module]:
    """Reads every Python file below `root`; names and paths are relative to `under` (or `root`)."""
    base = under or root
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(base)
        parts = relative.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name=name, path=relative, text=path.read_text(encoding="utf-8")))
    return modules


def package() -> list[Module]:
    """All modules of the package."""
    modules = load(SOURCE)
    assert modules, f"no module under {SOURCE}"
    return modules


def everything() -> list[Module]:
    """All Python files of the repository that are ours, tests and examples included."""
    return [
        module
        for folder in ("src", "tests", "validation", "benchmarks", "examples")
        for module in load(REPOSITORY / folder, under=REPOSITORY)
    ]


def from_text(text: str, name: str = "stratagem.values.sample") -> Module:
    """A module that exists nowhere, to show that a rule can fail."""
    return Module(name=name, path=Path(*name.split(".")).with_suffix(".py"), text=text)


def _imports(body: list[ast.stmt], *, in_function: bool, for_types_only: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, in_function, for_types_only)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = "." * node.level + (node.module or "")
                yield Import(module, alias.name, node.lineno, in_function, for_types_only)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for field, block in _blocks(node):
                types = for_types_only or (field == "body" and _tests_type_checking(node))
                yield from _imports(block, in_function=inside, for_types_only=types)


def _blocks(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The statement lists inside a statement: bodies, else-branches, handlers, cases."""
    for field, value in ast.iter_fields(node):
        if not isinstance(value, list) or not value:
            continue
        if isinstance(value[0], ast.stmt):
            yield field, value
        elif isinstance(value[0], ast.ExceptHandler | ast.match_case):
            for part in value:
                yield field, part.body


def _tests_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def assert_none(violations: list[str]) -> None:
    """Fails with every violation in full: each is a place to mend."""
    assert not violations, "\n" + "\n".join(violations)
