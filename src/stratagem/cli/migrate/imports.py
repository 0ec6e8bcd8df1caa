"""Rewriting of imports: TensorFlow's are dropped, and this package comes before Keras."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate import rules
from stratagem.cli.migrate.context import FileContext, dotted, module_of, with_marks
from stratagem.cli.migrate.names import is_kept
from stratagem.cli.migrate.rules import Advice, tensorflow_name

_ImportStatement = cst.Import | cst.ImportFrom
_FIRST = ("sg", "jax", "keras", "np")


@dataclasses.dataclass(frozen=True)
class Imported:
    """One name of an import statement, with its full name and the local one."""

    alias: cst.ImportAlias
    full_name: str
    local_name: str
    binds_root: bool

    @property
    def package(self) -> str:
        """Name of the package that it is from."""
        return self.full_name.split(".")[0]

    @property
    def tensorflow_name(self) -> str | None:
        """Name as the rules spell it, None if it is not from TensorFlow."""
        return None if self.package == "keras" else tensorflow_name(self.full_name)


def imported_names(statement: cst.Import | cst.ImportFrom) -> list[Imported]:
    """Returns the names that a statement imports; none for `*` and for relative imports."""
    if isinstance(statement.names, cst.ImportStar):
        return []
    if isinstance(statement, cst.ImportFrom) and (statement.relative or not statement.module):
        return []
    found: list[Imported] = []
    for alias in statement.names:
        name = dotted(alias.name) or ""
        as_name = alias.evaluated_alias
        if isinstance(statement, cst.Import):
            local = as_name or name.split(".")[0]
            found.append(Imported(alias, name, local, as_name is None))
        else:
            module = dotted(statement.module) if statement.module else ""
            found.append(Imported(alias, f"{module}.{name}", as_name or name, binds_root=False))
    return found


def imports_tensorflow(module: cst.Module) -> bool:
    """Returns True if a file imports TensorFlow anywhere."""
    statements = m.findall(module, m.Import() | m.ImportFrom())
    return any(_is_from(one, "tensorflow") for one in statements)


class ImportRewriter(cst.CSTTransformer):
    """Replaces imports of TensorFlow by those that the new code needs.

    `used` are the local names of TensorFlow that the new code still reads.
    """

    def __init__(self, context: FileContext, used: set[str]) -> None:
        super().__init__()
        self._context = context
        self._used = used
        self._present: set[str] = set()
        self._in_block: set[str] = set()
        self._has_tensorflow_at_top = False
        self._depth = 0

    def visit_Module(self, node: cst.Module) -> bool:
        """Finds what the file imports already, and whether it needs this package."""
        has_keras = False
        for statement in m.findall(node, m.Import() | m.ImportFrom()):
            has_keras |= _is_from(statement, "keras") or self._note_keras(statement)
        for statement in _at_top(node.body):
            self._has_tensorflow_at_top |= _is_from(statement, "tensorflow")
        if has_keras or self._context.needed:
            self._context.needed.add("sg")
        for root in self._context.needed:
            self._context.name_of(root)
        self._present = self._roots(_with_first_imports(node.body))
        return True

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> bool:
        """Enters a block."""
        self._depth += 1
        return True

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Rewrites the imports of a block."""
        if any(_at_top(original_node.body)):
            updated_node = updated_node.with_changes(body=self._body(updated_node.body))
        self._depth -= 1
        return updated_node

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Rewrites the imports at the top of a file."""
        return updated_node.with_changes(body=self._body(updated_node.body))

    def _note_keras(self, statement: cst.CSTNode) -> bool:
        """Notes `keras` where it is imported from TensorFlow; True if Keras is imported."""
        has_keras = False
        names = imported_names(statement) if isinstance(statement, _ImportStatement) else ()
        for one in names:
            name = one.tensorflow_name
            if name is None or not is_kept(name) or one.binds_root:
                continue
            has_keras = True
            if name == "keras":
                self._context.local_names["keras"] = one.local_name
                self._context.needed.add("keras")
        return has_keras

    def _roots(self, body: Sequence[cst.BaseStatement]) -> set[str]:
        """Returns the roots of new names that statements import."""
        names = self._context.local_names
        return {
            root
            for statement in _at_top(body)
            for one in imported_names(statement)
            for root in {*_FIRST, *self._context.needed}
            if one.full_name == module_of(root) and one.local_name == names.get(root)
        }

    def _body(self, body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        if self._depth:
            self._in_block = self._roots(body)
        new: list[cst.BaseStatement] = []
        comments: list[cst.EmptyLine] = []
        for line in body:
            lines: Sequence[cst.BaseStatement] = [line]
            if isinstance(line, cst.SimpleStatementLine) and any(_at_top([line])):
                lines = self._replaced(line)
            if not lines and isinstance(line, cst.SimpleStatementLine):
                comments += [one for one in line.leading_lines if one.comment is not None]
            elif lines and comments:
                first = lines[0]
                leading = getattr(first, "leading_lines", ())
                new.append(first.with_changes(leading_lines=[*comments, *leading]))
                new += lines[1:]
                comments = []
            else:
                new += lines
        return new

    def _replaced(self, line: cst.SimpleStatementLine) -> list[cst.BaseStatement]:
        added = [cst.parse_statement(one) for one in self._added(line)]
        kept: list[cst.BaseSmallStatement] = []
        advice: list[Advice] = []
        for small in line.body:
            if isinstance(small, _ImportStatement):
                kept += self._kept(small, advice)
            else:
                kept.append(small)
        lines: list[cst.BaseStatement] = list(added)
        if kept and isinstance(line.body[0], _ImportStatement) and len(line.body) == 1:
            lines += [line.with_changes(body=[one], leading_lines=()) for one in kept]
        elif kept:
            lines.append(line.with_changes(body=kept, leading_lines=()))
        if lines:
            lines[0] = lines[0].with_changes(leading_lines=line.leading_lines)
            lines[-1] = with_marks(lines[-1], advice)
        return lines

    def _kept(
        self, statement: cst.Import | cst.ImportFrom, advice: list[Advice]
    ) -> list[cst.BaseSmallStatement]:
        """Returns what an import becomes: names of Keras, and those that stay TensorFlow's."""
        names = imported_names(statement)
        advice += filter(None, (rules.foreign_advice(one.package) for one in names))
        if not any(one.tensorflow_name is not None for one in names):
            return [statement]
        from_keras: list[Imported] = []
        others: list[cst.ImportAlias] = []
        for one in names:
            name = one.tensorflow_name
            if name is None:
                others.append(one.alias)
            elif is_kept(name) and not one.binds_root:
                from_keras += [one] if name != "keras" else []
            elif one.local_name in self._used:
                others.append(one.alias)
                if name and rules.resolve(name) is None:
                    advice.append(rules.advice(name))
        new = [_from_keras(statement, from_keras)] if from_keras else []
        return [*new, *([_with_names(statement, others)] if others else [])]

    def _added(self, line: cst.SimpleStatementLine) -> list[str]:
        """Returns the imports that belong above a line."""
        has_tensorflow = any(_is_from(one, "tensorflow") for one in line.body)
        has_keras = any(_is_from(one, "keras") for one in line.body)
        if self._depth and self._has_tensorflow_at_top:
            return []
        present = self._in_block if self._depth else self._present
        needed = self._context.needed - self._present - present
        if not has_tensorflow:
            needed &= {"sg"} if has_keras and not self._depth else set()
        present |= needed
        ordered = [one for one in _FIRST if one in needed] + sorted(needed - set(_FIRST))
        return [self._context.import_line(one) for one in ordered]


def _at_top(body: Sequence[cst.BaseStatement]) -> Iterator[cst.Import | cst.ImportFrom]:
    for line in body:
        if isinstance(line, cst.SimpleStatementLine):
            yield from (one for one in line.body if isinstance(one, _ImportStatement))


def _with_first_imports(body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Returns the statements up to the end of the imports around TensorFlow's.

    A module that is imported later may be needed before.
    """
    lines: list[cst.BaseStatement] = []
    has_tensorflow = False
    for line in body:
        imports = list(_at_top([line]))
        has_tensorflow |= any(_is_from(one, "tensorflow") for one in imports)
        if has_tensorflow and not imports:
            break
        lines.append(line)
    return lines


def _is_from(node: cst.CSTNode, package: str) -> bool:
    if not isinstance(node, _ImportStatement):
        return False
    if isinstance(node.names, cst.ImportStar):
        module = dotted(node.module) if isinstance(node, cst.ImportFrom) and node.module else ""
        return (module or "").split(".")[0] == package
    return any(one.package == package for one in imported_names(node))


def _from_keras(
    statement: cst.Import | cst.ImportFrom, names: Sequence[Imported]
) -> cst.BaseSmallStatement:
    if isinstance(statement, cst.Import):
        parts = (f"{one.tensorflow_name} as {one.local_name}" for one in names)
        line = cst.ensure_type(
            cst.parse_statement(f"import {', '.join(parts)}"), cst.SimpleStatementLine
        )
        return line.body[0]
    module = (names[0].tensorflow_name or "").rpartition(".")[0]
    new = _with_names(statement, [one.alias for one in names])
    return new.with_changes(module=cst.parse_expression(module))


def _with_names(
    statement: cst.Import | cst.ImportFrom, names: Sequence[cst.ImportAlias]
) -> cst.BaseSmallStatement:
    *rest, last = names
    original = statement.names if not isinstance(statement.names, cst.ImportStar) else names
    return statement.with_changes(names=[*rest, last.with_changes(comma=original[-1].comma)])
