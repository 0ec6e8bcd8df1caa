"""Public names of Keras and of this package, read from their files without importing them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from stratagem import public_names


def exists(name: str) -> bool:
    """Returns True if a dotted name of `sg` or `keras` exists, up to its first class or function.

    Names of other roots are not checked.
    """
    root, *parts = name.split(".")
    if root == "sg":
        return _exists_here(parts)
    if root == "keras":
        folder = _folder("keras")
        return folder is None or _exists_in(folder, parts)
    return True


def _exists_here(parts: list[str]) -> bool:
    if not parts:
        return True
    if parts[0] not in public_names():
        return parts[0] == "__version__"
    folder = _folder("stratagem")
    if folder is None:
        return True
    path = folder.joinpath(*".".join(public_names()[parts[0]]).split(".")[1:])
    path = path if path.is_dir() else path.with_suffix(".py")
    return not path.exists() or _exists_in(path, parts[1:])  # else it is no module


def _exists_in(path: Path, parts: list[str]) -> bool:
    """Follows submodules from a package's folder, or a module's file, to an exported name."""
    for part in parts:
        if path.is_dir():
            names, below = _names(path / "__init__.py"), path / part
            if below.is_dir() or below.with_suffix(".py").is_file():
                path = below if below.is_dir() else below.with_suffix(".py")
                continue
        else:
            names = _names(path)
        return part in names
    return True


@functools.cache
def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """Names that a module imports or defines at its top, and the strings of its tuples."""
    if not path.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            strings = (one.value for one in node.value.elts if isinstance(one, ast.Constant))
            names.update(one for one in strings if isinstance(one, str))
    return frozenset(names)
