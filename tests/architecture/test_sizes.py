"""Files of at most 400 lines, functions of at most 50, concrete strategies of at most 150."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import Module, assert_none, everything, from_text, package

MAX_FILE_LINES = 400
MAX_CODE_LINES = 300
MAX_FUNCTION_LINES = 50
# Tests, benchmarks and examples.
MAX_FILE_LINES_ELSEWHERE = 500
MAX_FUNCTION_LINES_ELSEWHERE = 60
MAX_STRATEGY_LINES = 150
MAX_PUBLIC_METHODS = 25


def long_files(module: Module) -> list[str]:
    limit = MAX_FILE_LINES if _is_in_package(module) else MAX_FILE_LINES_ELSEWHERE
    return _over(module, 1, "file", module.num_lines, limit)


def long_functions(module: Module) -> list[str]:
    limit = MAX_FUNCTION_LINES if _is_in_package(module) else MAX_FUNCTION_LINES_ELSEWHERE
    return [
        violation
        for node in module.functions()
        for violation in _over(module, node.lineno, node.name, _span(node), limit)
    ]


def files_with_much_code(module: Module) -> list[str]:
    """Lines that are no docstring, no comment and not empty."""
    without = set()
    for node in ast.walk(module.tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            without.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    code = [
        line
        for number, line in enumerate(module.text.splitlines(), start=1)
        if number not in without and line.strip() and not line.strip().startswith("#")
    ]
    return _over(module, 1, "code of the file", len(code), MAX_CODE_LINES)


def long_strategies(module: Module) -> list[str]:
    """A file that defines a strategy, other than the one class they all are."""
    names = [node.name for node in module.tree.body if isinstance(node, ast.ClassDef)]
    concrete = [name for name in names if name.endswith("Strategy") and name != "Strategy"]
    if module.room not in ("strategies", "parameter_server") or not concrete:
        return []
    return _over(module, 1, "concrete strategy", module.num_lines, MAX_STRATEGY_LINES)


def wide_classes(module: Module) -> list[str]:
    violations = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            methods = {
                item.name
                for item in node.body
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
            }
            what = f"public methods of {node.name}"
            violations += _over(module, node.lineno, what, len(methods), MAX_PUBLIC_METHODS)
    return violations


def _is_in_package(module: Module) -> bool:
    return "stratagem" in module.path.parts


def _span(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _over(module: Module, line: int, what: str, size: int, limit: int) -> list[str]:
    return [f"{module.at(line)}: {what}: {size}, at most {limit}"] if size > limit else []


@pytest.mark.parametrize("rule", [long_files, long_functions], ids=lambda rule: rule.__name__)
def test_repository_keeps_the_rule(rule) -> None:
    assert_none([violation for module in everything() for violation in rule(module)])


@pytest.mark.parametrize(
    "rule", [files_with_much_code, long_strategies, wide_classes], ids=lambda rule: rule.__name__
)
def test_package_keeps_the_rule(rule) -> None:
    assert_none([violation for module in package() for violation in rule(module)])


METHODS = "".join(f"    def m{i}(self): ...\n" for i in range(MAX_PUBLIC_METHODS))
AT_THE_LIMIT = [
    (long_files, "stratagem.values.x", "x = 1\n" * MAX_FILE_LINES),
    (long_functions, "stratagem.values.x", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (long_files, "tests.values.x", "x = 1\n" * MAX_FILE_LINES_ELSEWHERE),
    (
        long_functions,
        "tests.values.x",
        "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES_ELSEWHERE - 1),
    ),
    (files_with_much_code, "stratagem.values.x", '"""A.\n\nB.\n"""\n#\n' + "x\n" * MAX_CODE_LINES),
    (
        long_strategies,
        "stratagem.strategies.mirrored",
        "class MirroredStrategy: ...\n" + "x = 1\n" * (MAX_STRATEGY_LINES - 1),
    ),
    (wide_classes, "stratagem.values.x", f"class A:\n{METHODS}    def _n(self): ...\n"),
]
ONE_MORE = {
    long_files: "x = 1\n",
    long_functions: "    x = 1\n",
    files_with_much_code: "x\n",
    long_strategies: "x = 1\n",
    wide_classes: "    def n(self): ...\n",
}


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    AT_THE_LIMIT,
    ids=lambda value: getattr(value, "__name__", str(value))[:30],
)
def test_rule_begins_one_line_after_the_limit(rule, name, text) -> None:
    assert rule(from_text(text, name)) == []
    assert len(rule(from_text(text + ONE_MORE[rule], name))) == 1


def test_file_that_all_strategies_share_may_be_longer() -> None:
    text = "class Strategy: ...\n" + "x = 1\n" * MAX_STRATEGY_LINES
    assert long_strategies(from_text(text, "stratagem.strategies.base.strategy")) == []
