"""State of one file's rewriting: names of modules, imports to add, and comments for people."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

import libcst as cst
from libcst.metadata import (
    BaseAssignment,
    GlobalScope,
    ImportAssignment,
    MetadataWrapper,
    QualifiedNameProvider,
    QualifiedNameSource,
    ScopeProvider,
)

from stratagem.cli.migrate.rules import Advice, tensorflow_name

MARK = "# STRATAGEM: "
# Import statements of the roots of new names; other roots are imported by their own name.
_IMPORTS = {"sg": ("stratagem", "sg"), "np": ("numpy", "np")}


@dataclasses.dataclass
class FileContext:
    """The local names of modules in a file, and the modules that the new code needs."""

    local_names: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    needed: set[str] = dataclasses.field(default_factory=set[str])
    taken: set[str] = dataclasses.field(default_factory=set[str])

    def expression(self, code: str) -> cst.BaseExpression:
        """Parses new code, with the roots of its names as this file spells them."""
        return cst.parse_expression(self.code(code))

    def code(self, code: str) -> str:
        """Returns new code with the roots of its names as this file spells them."""
        return re.sub(r"(?<![\w.\"'])([A-Za-z_]\w*)(?=\.[A-Za-z_])", self._local, code)

    def _local(self, match: re.Match[str]) -> str:
        root = match[1]
        if root not in _MODULES:
            return root
        self.needed.add(root)
        return self.name_of(root)

    def name_of(self, root: str) -> str:
        """Returns the name under which this file has a module, or will have it."""
        if root not in self.local_names:
            module, alias = _IMPORTS.get(root, (root, root))
            free = (one for one in (alias, module, f"{module}_module") if one not in self.taken)
            self.local_names[root] = next(free)
        return self.local_names[root]

    def import_line(self, root: str) -> str:
        """Returns the import statement of a module."""
        module, name = _IMPORTS.get(root, (root, root))[0], self.name_of(root)
        line = f"import {module}" if name == module else f"import {module} as {name}"
        if root == "sg":
            line += "  # isort: skip - before keras, because it selects the JAX backend"
        return line


_MODULES = frozenset(
    {"sg", "keras", "jax", "np", "os", "glob", "shutil", "functools", "itertools"},
)


def module_of(root: str) -> str:
    """Returns the module that a root of new names stands for."""
    return _IMPORTS.get(root, (root, root))[0]


def dotted(node: cst.BaseExpression) -> str | None:
    """Returns the code of a name with attributes, such as "tf.keras.Model"; None for others."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (left := dotted(node.value)) is not None:
        return f"{left}.{node.attr.value}"
    return None


class StatementRewriter(cst.CSTTransformer):
    """A rewriting pass that knows qualified names and puts comments above statements."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ScopeProvider)

    def __init__(self, context: FileContext) -> None:
        super().__init__()
        self.context = context
        self._pending: list[tuple[cst.CSTNode, dict[str, Advice]]] = []

    def mark(self, advice: Advice) -> None:
        """Asks for a comment above the statement that is being visited."""
        if self._pending:
            self._pending[-1][1].setdefault(str(advice), advice)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Notes the statement that is being visited."""
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._pending.append((node, {}))
        return super().on_visit(node)

    def on_leave(
        self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT
    ) -> cst.CSTNodeT | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNodeT]:
        """Puts the comments of a statement above it."""
        result = super().on_leave(original_node, updated_node)
        if self._pending and self._pending[-1][0] is original_node:
            _, advice = self._pending.pop()
            if advice and isinstance(result, cst.CSTNode):
                return with_marks(result, advice.values())
        return result

    def tensorflow_name(self, node: cst.CSTNode) -> str | None:
        """Returns the name that a node refers to as the rules spell it, if it is imported."""
        for one in self.get_metadata(QualifiedNameProvider, node, set()) or ():
            if one.source is QualifiedNameSource.IMPORT:
                name = tensorflow_name(one.name)
                if name is not None:
                    return name
        return None


def with_marks(node: cst.CSTNodeT, advice: Iterable[Advice]) -> cst.CSTNodeT:
    """Returns a statement with comments above it, without those that it has already."""
    lines: Collection[cst.EmptyLine] = getattr(node, "leading_lines", ())
    present = {one for line in lines if line.comment for one in _causes(line.comment.value)}
    missing: list[cst.EmptyLine] = []
    for one in advice:
        if not present & (causes := _causes(f"{MARK}{one}")):
            present |= causes
            missing.append(cst.EmptyLine(comment=cst.Comment(f"{MARK}{one}")))
    return node.with_changes(leading_lines=[*lines, *missing]) if missing else node


def _causes(comment: str) -> set[str]:
    """Returns the name and the advice of a comment: a second one with either is left out."""
    name, _, advice = comment.removeprefix(MARK).partition(": ")
    return {name, advice} - {""}


def module_names(wrapper: MetadataWrapper) -> tuple[dict[str, str], set[str]]:
    """Returns the local names of modules imported at the top of a file, and all other names.

    `keras` of TensorFlow counts as Keras, because its import stays.
    """
    scopes = {scope for scope in wrapper.resolve(ScopeProvider).values() if scope is not None}
    taken: set[str] = set()
    names: dict[str, str] = {}
    for scope in scopes:
        for assignment in scope.assignments:
            root = _root_of(assignment)
            if root is None:
                taken.add(assignment.name)
            elif isinstance(scope, GlobalScope):
                names[root] = assignment.name
    return names, taken


def _root_of(assignment: BaseAssignment) -> str | None:
    """Returns the root of new names that an import statement binds."""
    if not isinstance(assignment, ImportAssignment) or "." in assignment.name:
        return None
    by_module = {module_of(root): root for root in _MODULES}
    for qualified in assignment.get_qualified_names_for(assignment.name):
        if tensorflow_name(qualified.name) == "keras":
            return "keras"
        if qualified.name in by_module:
            return by_module[qualified.name]
    return None
