"""What a package offers: a sorted `__all__`, a lazy root that type checkers see too, docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import subprocess
import sys

import pytest

import stratagem
from tests.architecture.source_tree import Module, assert_none, from_text, package


def exported(module: Module) -> list[str] | None:
    """The names of `__all__`, or None where there is none; `sorted(TABLE)` are the table's keys."""
    for node in module.tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__":
            return []  # only an empty list needs its type
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "sorted":
                return sorted(lazy_table(module))
            return ast.literal_eval(node.value)
    return None


def unsorted_exports(module: Module) -> list[str]:
    names = exported(module)
    if names is None:
        is_package = module.path.name == "__init__.py"
        return [f"{module.at(1)}: a package without __all__"] if is_package else []
    wrong = [
        f"{module.at(1)}: {second!r} stands after {first!r} in __all__"
        for first, second in itertools.pairwise(names)
        if second <= first
    ]
    private = [name for name in names if name.startswith("_") and not name.endswith("__")]
    return wrong + [f"{module.at(1)}: {name!r} is private and in __all__" for name in private]


def seen_by_type_checkers(root: Module) -> dict[str, str]:
    """The names that the root imports under TYPE_CHECKING, with the full names they stand for."""
    names = {}
    for node in ast.walk(root.tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                if isinstance(statement, ast.ImportFrom):
                    for alias in statement.names:
                        full_name = f"{statement.module}.{alias.name}"
                        names[alias.asname or alias.name] = full_name
    return names


def lazy_table(root: Module) -> dict[str, str]:
    """A table for a lazy `__getattr__`: name to (module, name there or None for itself)."""
    for node in root.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            table = ast.literal_eval(value)
            return {name: ".".join(filter(None, place)) for name, place in table.items()}
    return {}


def undocumented(namespace: object, names: list[str]) -> list[str]:
    """Our classes, functions and modules among the names that have no docstring of their own."""
    missing = []
    for name in names:
        value = getattr(namespace, name)
        home = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        if not own and str(home).startswith(("stratagem", __name__)):
            missing.append(name)
    return missing


def module_named(name: str) -> Module:
    return next(module for module in package() if module.name == name)


def root_module() -> Module:
    return module_named("stratagem")


def root_table() -> dict[str, str]:
    return lazy_table(module_named("stratagem.public_names"))


def test_exports_are_sorted() -> None:
    assert_none([violation for module in package() for violation in unsorted_exports(module)])


@pytest.mark.parametrize(
    "text", ['__all__ = ["b", "a"]', '__all__ = ["a", "a"]', '__all__ = ["_a"]']
)
def test_exports_out_of_order_are_found(text) -> None:
    assert len(unsorted_exports(from_text(text))) == 1


def test_lazy_table_names_what_type_checkers_see() -> None:
    table, seen = root_table(), seen_by_type_checkers(root_module())
    assert table
    assert table == seen


def test_root_exports_its_lazy_names() -> None:
    assert exported(root_module()) == sorted(root_table())
    assert exported(root_module()) == stratagem.__all__


def test_name_in_one_of_the_two_lists_only_is_found() -> None:
    root = from_text(
        "if TYPE_CHECKING:\n    from stratagem.a import f, g as h\n"
        "_LAZY = {'f': ('stratagem.a', 'f'), 'i': ('stratagem.b', None)}\n",
        "stratagem",
    )
    assert seen_by_type_checkers(root) == {"f": "stratagem.a.f", "h": "stratagem.a.g"}
    assert lazy_table(root) == {"f": "stratagem.a.f", "i": "stratagem.b"}


def test_lazy_name_is_the_object_of_its_room() -> None:
    for name, full_name in seen_by_type_checkers(root_module()).items():
        assert getattr(stratagem, name) is pkgutil.resolve_name(full_name), name


def test_root_lists_its_lazy_names_before_they_are_loaded() -> None:
    code = "import stratagem; print(sorted(set(stratagem.__all__) - set(dir(stratagem))))"
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert listed.stdout.strip() == "[]"


def test_name_that_the_root_does_not_have_is_named() -> None:
    with pytest.raises(AttributeError, match="'stratagem' has no attribute 'MiroredStrategy'"):
        _ = stratagem.MiroredStrategy


def test_public_names_have_docstrings() -> None:
    missing = [
        f"{module.name}.{name}"
        for module in package()
        if exported(module) and not module.name.endswith("__main__")
        for name in undocumented(importlib.import_module(module.name), exported(module) or [])
    ]
    assert_none(missing)


def test_public_name_without_docstring_is_found() -> None:
    class Documented:
        """It says what it is."""

        class BareError(Exception):
            pass

        def bare(self): ...

        number = 3

    assert undocumented(Documented, ["BareError", "bare", "number"]) == ["BareError", "bare"]
