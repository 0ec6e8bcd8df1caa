"""Names that code reads and assigns, in the order of evaluation."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def parsed(code: str) -> list[ast.stmt]:
    """Parses a block of statements of any indentation."""
    return ast.parse(textwrap.dedent(code)).body


def events(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yields names with True for an assignment, and False for a read."""
    for node in nodes:
        yield from _events(node)


def stores(nodes: Sequence[ast.AST]) -> list[str]:
    """Returns the names that are assigned, in order."""
    return list(dict.fromkeys(name for name, is_store in events(nodes) if is_store))


def read_first(nodes: Sequence[ast.AST]) -> list[str]:
    """Returns the assigned names that are read before their first assignment."""
    first: dict[str, bool] = {}
    for name, is_store in events(nodes):
        first.setdefault(name, is_store)
    assigned = set(stores(nodes))
    return [name for name, is_store in first.items() if not is_store and name in assigned]


def free_loads(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names that are read, without the local names of functions."""
    return {name for name, is_store in events(nodes) if not is_store}


def has_jump(nodes: Sequence[ast.AST]) -> str | None:
    """Returns the statement that leaves the block, or has no place in a function of its own."""
    for node in nodes:
        found = _jump(node, in_loop=False)
        if found is not None:
            return found
    return None


def _events(node: ast.AST) -> Iterator[tuple[str, bool]]:
    match node:
        case ast.Name():
            yield node.id, not isinstance(node.ctx, ast.Load)
        case ast.AugAssign(target=ast.Name() as target):
            yield target.id, False
            yield from _events(node.value)
            yield target.id, True
        case ast.Assign():
            yield from _events(node.value)
            yield from events(node.targets)
        case ast.For() | ast.AsyncFor():
            yield from events([node.iter, node.target, *node.body, *node.orelse])
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0], True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            yield from _function_events(node)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield from _comprehension_events(node)
        case ast.ClassDef():
            yield from events([*node.bases, *node.body])
            yield node.name, True
        case _:
            yield from events(list(ast.iter_child_nodes(node)))


def _function_events(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
) -> Iterator[tuple[str, bool]]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    local = {one.arg for one in named}
    local |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
    body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    local |= set(stores(body))
    defaults = [*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)]
    yield from events(defaults)
    if not isinstance(node, ast.Lambda):
        yield from events(node.decorator_list)
    yield from ((name, False) for name in free_loads(body) if name not in local)
    if not isinstance(node, ast.Lambda):
        yield node.name, True


def _comprehension_events(node: ast.AST) -> Iterator[tuple[str, bool]]:
    inside = list(events(list(ast.iter_child_nodes(node))))
    local = {name for name, is_store in inside if is_store}
    yield from ((name, False) for name, _ in inside if name not in local)


def _jump(node: ast.AST, *, in_loop: bool) -> str | None:
    if isinstance(node, _FUNCTIONS):
        return None
    if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Global):
        return type(node).__name__.lower()
    if isinstance(node, ast.Nonlocal | ast.Delete):
        return type(node).__name__.lower()
    if isinstance(node, ast.Break | ast.Continue) and not in_loop:
        return type(node).__name__.lower()
    in_loop = in_loop or isinstance(node, ast.For | ast.While)
    for child in ast.iter_child_nodes(node):
        found = _jump(child, in_loop=in_loop)
        if found is not None:
            return found
    return None
