"""Direct uses of the package's modules by a test file, read from the sources alone.

A test file uses a module if it does one of these:

* it imports the module or one of its names, also through another module, as `sg.Checkpoint`
* it names the module in a string: a program to run, or a place to patch
* it reads an attribute of two words or more that only classes of this module define
* it contains five words in a row of a message that only this module has
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.architecture.source_tree import Module

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NUM_WORDS = 5


@dataclasses.dataclass(frozen=True)
class Package:
    """The package's modules, and what marks each of them in a test."""

    modules: dict[str, Module]
    homes: dict[str, str]
    attributes: dict[str, set[str]]
    phrases: dict[tuple[str, ...], set[str]]

    @classmethod
    def of(cls, modules: Iterable[Module]) -> Package:
        """Reads the imports, the attributes and the messages of each module."""
        by_name = {module.name: module for module in modules}
        homes = {}
        attributes = defaultdict(set)
        phrases = defaultdict(set)
        for name, module in by_name.items():
            for bound, full_name in imported_names(module.tree):
                homes[f"{name}.{bound}"] = full_name
            for attribute in public_attributes(module.tree):
                attributes[attribute].add(name)
            for phrase in phrases_of(module.tree):
                phrases[phrase].add(name)
        return cls(by_name, homes, attributes, phrases)

    def resolve(self, name: str) -> str:
        """Follows a full name through re-exports to its definition."""
        seen = set()
        while name not in self.modules and name in self.homes and name not in seen:
            seen.add(name)
            name = self.homes[name]
        return name

    def used_by(self, tree: ast.Module) -> set[str]:
        """Returns the modules that a test file uses directly."""
        used = set()
        for name in self._full_names(tree):
            parts = name.split(".")
            prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            used.update(prefix for prefix in prefixes if prefix in self.modules)
        marks = [self.attributes.get(name, set()) for name in set(_attributes(tree))]
        marks += [self.phrases.get(phrase, set()) for phrase in phrases_of(tree)]
        return used.union(*(owners for owners in marks if len(owners) == 1))

    def _full_names(self, tree: ast.Module) -> Iterator[str]:
        """Yields each name of the package that a file uses, and the modules on the way to it."""
        bound = dict(imported_names(tree))
        for name in bound.values():
            yield from (name, name.rpartition(".")[0], self.resolve(name))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and str(node.value).startswith("stratagem."):
                yield node.value
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                # `columns = sg.estimator.feature_column`, before its uses.
                *_, name = "", *self._chain(node.value, bound)
                bound.setdefault(node.targets[0].id, name)
        for node in ast.walk(tree):
            yield from self._chain(node, bound)

    def _chain(self, node: ast.expr, bound: dict[str, str]) -> Iterator[str]:
        """Yields the places on the way of `sg.train.Checkpoint`; nothing for other expressions."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and attributes and bound.get(node.id):
            name = self.resolve(bound[node.id])
            for attribute in attributes:
                name = self.resolve(f"{name}.{attribute}")
                yield name


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields each name that a file imports, with its full name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def public_attributes(tree: ast.Module) -> set[str]:
    """Returns the methods and class attributes whose names are of two words or more."""
    names: set[str] = set()
    for owner in ast.walk(tree):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, FUNCTIONS):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if "_" in name.strip("_") and not name.startswith("_")}


def phrases_of(tree: ast.Module) -> set[tuple[str, ...]]:
    """Returns every run of words in the messages of a file; what a message inserts ends a run."""
    found = set()
    for text in _texts(tree):
        for part in re.split(r"[{}\0]", text):
            words = re.findall(r"[A-Za-z_`']+", part)
            found |= {tuple(words[i : i + NUM_WORDS]) for i in range(len(words) - NUM_WORDS + 1)}
    return found


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yields the strings of a file except its docstrings; an f-string is one, with gaps."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


def _attributes(tree: ast.Module) -> Iterator[str]:
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
