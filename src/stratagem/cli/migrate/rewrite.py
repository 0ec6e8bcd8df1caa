"""Rewriting of one program: the passes, and the guarantees about what comes out."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Collection

import libcst as cst
from libcst.metadata import (
    MetadataWrapper,
    QualifiedName,
    QualifiedNameProvider,
    QualifiedNameSource,
)

from stratagem.cli.migrate.context import MARK, FileContext, StatementRewriter, module_names
from stratagem.cli.migrate.datasets import DatasetRewriter
from stratagem.cli.migrate.functions import FunctionRewriter, function_uses
from stratagem.cli.migrate.imports import ImportRewriter, imports_tensorflow
from stratagem.cli.migrate.module_aliases import ModuleAliasRewriter
from stratagem.cli.migrate.names import NameRewriter
from stratagem.cli.migrate.rules import tensorflow_name
from stratagem.cli.migrate.tapes import TapeRewriter
from stratagem.messages import explain


class UnreadableSourceError(ValueError):
    """Raised for a file that is not Python 3."""


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A program before and after."""

    before: str
    after: str

    @property
    def is_changed(self) -> bool:
        """True if the program changed."""
        return self.before != self.after

    @property
    def num_marks(self) -> int:
        """Number of places that are left to a person."""
        return sum(line.lstrip().startswith(MARK) for line in self.after.splitlines())


def rewrite(source: str) -> Rewritten:
    """Rewrites a program; one that does not import TensorFlow stays as it is.

    Raises UnreadableSourceError if the program does not parse.
    """
    module = _parsed(source)
    if module is None or not imports_tensorflow(module):
        return Rewritten(source, source)
    if ".keras" in source:
        module = _visited(module, ModuleAliasRewriter(FileContext()))
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    names, taken = module_names(wrapper)
    context = FileContext(names, taken=taken)
    uses = function_uses(module)
    module = wrapper.visit(FunctionRewriter(context, uses))
    tapes = TapeRewriter(context)
    # Names of each node take most of the time, so a pass runs only where it has work.
    if "GradientTape" in source:
        module = _visited(module, tapes)
    if "Dataset" in source:
        module = _visited(module, DatasetRewriter(context))
    has_tapes = tapes.num_rewritten > 0
    module = _visited(module, NameRewriter(context, uses.steps, has_tapes=has_tapes))
    module = module.visit(ImportRewriter(context, _used_names(module)))
    after = module.code
    _compile(after)
    return Rewritten(source, after)


def _parsed(source: str) -> cst.Module | None:
    """Parses a program; None for one without the word tensorflow, which needs no tree."""
    try:
        _compile(source)
        module = cst.parse_module(source) if "tensorflow" in source else None
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error).split("\n")[0]
        line = getattr(error, "lineno", None) or getattr(error, "raw_line", "?")
        raise UnreadableSourceError(
            explain(
                f"Line {line} does not parse: {reason}.",
                expected="a program for Python 3.",
                fix="repair it, or convert it with 2to3 first.",
            )
        ) from error
    if module is None or not module.body:
        return module
    # The comments at the top belong to the first statement like those above any other one.
    first = module.body[0]
    lines = [*module.header, *getattr(first, "leading_lines", ())]
    body = [first.with_changes(leading_lines=lines), *module.body[1:]]
    return module.with_changes(header=(), body=body)


def _compile(source: str) -> None:
    compile(source, "<program>", "exec", dont_inherit=True, flags=ast.PyCF_ONLY_AST)


def _visited(module: cst.Module, rewriter: StatementRewriter) -> cst.Module:
    return MetadataWrapper(module, unsafe_skip_copy=True).visit(rewriter)


def _resolved(names: object) -> Collection[QualifiedName]:
    """Returns qualified names, which libcst computes when they are asked for."""
    value = names() if callable(names) else names
    return value if isinstance(value, Collection) else ()


def _used_names(module: cst.Module) -> set[str]:
    """Returns the local names of TensorFlow that a program still reads."""
    found = MetadataWrapper(module, unsafe_skip_copy=True).resolve(QualifiedNameProvider)
    used: set[str] = set()
    for node, names in found.items():
        if isinstance(node, cst.Name):
            for one in _resolved(names):
                is_import = one.source is QualifiedNameSource.IMPORT
                if is_import and tensorflow_name(one.name) is not None:
                    used.add(node.value)
    return used
