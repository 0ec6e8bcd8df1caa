"""Which messages the package's errors carry, and which texts the tests look for in them.

Both are read from the syntax trees. A message is known up to its holes: the values that an f-string
fills in. A test's text belongs to a message if it repeats enough of what stands between the holes.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import stratagem.errors
from tests.architecture.source_tree import Module

HOLE = "\0"
MIN_LETTERS = 8
MIN_WORDS_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True)
class Message:
    """One place that makes an error, and the texts from which its message is put together."""

    where: str
    error: str
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Expectation:
    """One text that a test looks for, and the errors it looks in; none named means any."""

    text: str
    errors: frozenset[str]


def messages(modules: Iterable[Module]) -> Iterator[Message]:
    """Every construction of an error with words in it, raised at once or returned to be raised."""
    modules = list(modules)
    functions = {node.name: node for module in modules for node in module.functions()}
    for module in modules:
        for scope, node in _calls_with_scope(module.tree):
            error = _last_name(node.func)
            if _error_class(error) is None and not error.endswith("Error"):
                continue
            texts = tuple(
                text
                for argument in _arguments(node)
                for text in _texts(argument, scope, functions)
                if re.search(r"[A-Za-z]{2}", text)
            )
            if texts:
                yield Message(module.at(node.lineno), error, texts)


def expectations(modules: Iterable[Module]) -> Iterator[Expectation]:
    """Texts given to `match=`, `.match` and `in`, also by way of `parametrize`."""
    for module in modules:
        for scope, node in _calls_with_scope(module.tree):
            errors = _expected_errors(node) or _errors_expected_in(scope)
            for expression in _patterns_of_call(node):
                for text in _expected_texts(expression, scope, module):
                    for chunk in _literal_chunks(text):
                        yield Expectation(chunk, errors)
        for function in module.functions():
            errors = _errors_expected_in(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
                    for text in _expected_texts(node.left, function, module):
                        yield Expectation(text, errors)


def belongs(expectation: Expectation, message: Message) -> bool:
    """Whether a test that finds this text in such an error may have seen this message."""
    if expectation.errors and not expectation.errors & _names_that_catch(message.error):
        return False
    return any(_overlaps(expectation.text, text) for text in message.texts)


def untested(messages: Iterable[Message], expectations: Iterable[Expectation]) -> list[str]:
    """The messages in which no test looks for anything."""
    expected = set(expectations)
    # Most messages are found by words that they share with a text, without a look at all texts.
    sharing = collections.defaultdict[tuple[str, ...], list[Expectation]](list)
    for expectation in expected:
        for run in _runs_of_words(_one_line(expectation.text)):
            sharing[run].append(expectation)
    return [
        f"{message.where}: {message.error}: {message.texts[0].replace(HOLE, '{}')}"
        for message in messages
        if not any(
            belongs(expectation, message)
            for expectation in itertools.chain(_near(message, sharing), expected)
        )
    ]


def _near(
    message: Message, sharing: Mapping[tuple[str, ...], Sequence[Expectation]]
) -> Iterator[Expectation]:
    for text in message.texts:
        for run in _runs_of_words(text):
            yield from sharing.get(run, ())


def _overlaps(wanted: str, template: str) -> bool:
    wanted = _one_line(wanted)
    if sum(map(str.isalpha, wanted)) >= MIN_LETTERS and wanted in _pieces_in_lines(template):
        return True
    if not _runs_of_words(wanted).isdisjoint(_runs_of_words(template)):
        return True
    return _whole(template).search(wanted) is not None


# Each text is compared with thousands of others.
_one_line = functools.lru_cache(maxsize=None)(lambda text: " ".join(text.split()))


@functools.cache
def _pieces_in_lines(template: str) -> str:
    """What stands between the holes of a template, a piece a line."""
    return "\n".join(map(_one_line, template.split(HOLE)))


@functools.cache
def _runs_of_words(template: str) -> frozenset[tuple[str, ...]]:
    """All that stand in a row within a piece, and are just so many as would do."""
    pieces = [piece.split() for piece in template.split(HOLE)]
    return frozenset(
        tuple(words[start : start + MIN_WORDS_IN_A_ROW])
        for words in pieces
        for start in range(len(words) - MIN_WORDS_IN_A_ROW + 1)
    )


@functools.cache
def _whole(template: str) -> re.Pattern[str]:
    pieces = _pieces_in_lines(template).split("\n")
    return re.compile(".+?".join(re.escape(piece) for piece in pieces if piece))


def _texts(
    node: ast.expr, scope: ast.AST | None, functions: dict[str, ast.AST], depth: int = 2
) -> Iterator[str]:
    """The strings that an expression can be or contain, with holes where values are filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
        yield "".join(map(str, parts))
    for part, part_scope, steps in _parts(node, scope, functions):
        if steps <= depth:
            yield from _texts(part, part_scope, functions, depth - steps)


def _parts(
    node: ast.expr, scope: ast.AST | None, functions: dict[str, ast.AST]
) -> list[tuple[ast.expr, ast.AST | None, int]]:
    """The expressions that a text is taken from, where they stand, and how many steps away."""
    if isinstance(node, ast.Name) and scope is not None:
        return [(value, scope, 1) for value in _assigned(node.id, scope)]
    if isinstance(node, ast.Call):
        called = functions.get(_last_name(node.func))
        inner = ast.walk(called) if called is not None else ()
        returned = [part.value for part in inner if isinstance(part, ast.Return) and part.value]
        return [
            *((argument, scope, 0) for argument in _arguments(node)),
            *((value, called, 1) for value in returned),
        ]
    if isinstance(node, ast.BinOp | ast.IfExp | ast.BoolOp | ast.Starred):
        children = ast.iter_child_nodes(node)
        return [(child, scope, 0) for child in children if isinstance(child, ast.expr)]
    return []


def _last_name(function: ast.expr) -> str:
    """`raises` of `pytest.raises`; much quicker than to write the expression out."""
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _assigned(name: str, scope: ast.AST) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]


def _calls_with_scope(
    tree: ast.AST, scope: ast.AST | None = None
) -> Iterator[tuple[ast.AST | None, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield scope, node
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        yield from _calls_with_scope(node, inner)


def _patterns_of_call(node: ast.Call) -> list[ast.expr]:
    patterns = [keyword.value for keyword in node.keywords if keyword.arg == "match"]
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("match", "search") and node.args:
        patterns.append(node.args[0])
    return patterns


def _expected_texts(node: ast.expr, scope: ast.AST | None, module: Module) -> Iterator[str]:
    """A variable stands for every string in its function's decorators and the tables they name."""
    if isinstance(node, ast.Name | ast.Subscript | ast.Attribute):
        for decorator in getattr(scope, "decorator_list", []):
            tables = {name.id for name in ast.walk(decorator) if isinstance(name, ast.Name)}
            for part in [decorator, *(v for t in tables for v in _assigned(t, module.tree))]:
                for inner in ast.walk(part):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        yield inner.value
        for value in _assigned(ast.unparse(node), scope or module.tree):
            yield from _texts(value, scope, {})
    else:
        yield from (part for text in _texts(node, scope, {}) for part in text.split(HOLE))


def _literal_chunks(pattern: str) -> list[str]:
    """The parts of a regular expression that stand for themselves."""
    special = r"(?<!\\)(?:\.[*+]\??|\[[^\]]*\]|[()|^$?+*{}])|\\[dDwWsSbBAZ][*+?]*"
    return [re.sub(r"\\(.)", r"\1", chunk) for chunk in re.split(special, pattern) if chunk]


def _expected_errors(node: ast.Call) -> frozenset[str]:
    """X of `pytest.raises(X)` or `pytest.raises((X, Y))`."""
    if _last_name(node.func) not in ("raises", "RaisesExc") or not node.args:
        return frozenset()
    first = node.args[0]
    listed = first.elts if isinstance(first, ast.Tuple) else [first]
    names = frozenset(ast.unparse(one).split(".")[-1] for one in listed)
    # A lower-case name is a parameter of the test: it stands for any error.
    return names if all(name[:1].isupper() for name in names) else frozenset()


@functools.cache  # each call in a function asks for those of all
def _errors_expected_in(scope: ast.AST | None) -> frozenset[str]:
    if scope is None:
        return frozenset()
    calls = [node for node in ast.walk(scope) if isinstance(node, ast.Call)]
    return frozenset(name for call in calls for name in _expected_errors(call))


@functools.cache
def _error_class(name: str) -> type[BaseException] | None:
    found = getattr(stratagem.errors, name, getattr(builtins, name, None))
    is_error = isinstance(found, type) and issubclass(found, BaseException)
    return found if is_error else None


@functools.cache  # asked for each pair of a message and a text
def _names_that_catch(error: str) -> set[str]:
    found = _error_class(error)
    return {error, "Exception"} if found is None else {parent.__name__ for parent in found.__mro__}
