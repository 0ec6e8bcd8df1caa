"""Rewriting of tf.data pipelines to `sg.input.Dataset`."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate.arguments import code_of
from stratagem.cli.migrate.chains import Chain, UnknownChainError, chain_of, converted_chain
from stratagem.cli.migrate.context import FileContext, StatementRewriter
from stratagem.cli.migrate.name_uses import free_loads, parsed, stores
from stratagem.cli.migrate.rules import Advice

_PAGE = "docs/migrate/tool.md"
_WIDTH = 88


class DatasetRewriter(StatementRewriter):
    """Rewrites pipelines that are understood as a whole, over several statements too."""

    def __init__(self, context: FileContext) -> None:
        super().__init__(context)
        self._chains: dict[cst.CSTNode, Chain] = {}
        self._merged: set[cst.CSTNode] = set()
        self._inside: set[cst.CSTNode] = set()

    def visit_Module(self, node: cst.Module) -> bool:
        """Joins the statements of a pipeline."""
        self._join(node.body)
        return True

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> bool:
        """Joins the statements of a pipeline."""
        self._join(node.body)
        return True

    def visit_Call(self, node: cst.Call) -> bool:
        """Notes the outermost call of a pipeline."""
        if node not in self._inside and node not in self._chains:
            chain = chain_of(node, self.tensorflow_name)
            if chain is not None and chain.source is not None:
                self._chains[node] = chain
        if node in self._chains:
            self._inside.update(_calls_below(node))
        return True

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """Puts the dataset in, or asks for a person."""
        chain = self._chains.get(original_node)
        if chain is None or chain.source is None:
            return updated_node
        try:
            return self._expression(*converted_chain(chain))
        except UnknownChainError as unknown:
            name = f"tf.data.Dataset.{chain.source.name}"
            text = f"{name}: {unknown}: write it as sg.input.Dataset(examples, batch_size=...)"
            self.mark(Advice(text, _PAGE))
            return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drops a statement whose operations an earlier one has taken over."""
        return cst.RemoveFromParent() if original_node in self._merged else updated_node

    def _expression(
        self, function: str, arguments: Sequence[str], calls: str
    ) -> cst.BaseExpression:
        code = self.context.code(f"{function}({', '.join(arguments)}){calls}")
        if len(code) > _WIDTH and "\n" not in code:
            first, *options = (self.context.code(one) for one in arguments)
            rows = [f"{first}, {', '.join(options)}"]
            if len(rows[0]) > _WIDTH:
                rows = [f"{one}," for one in (first, *options)]
            inside = "".join(f"    {row}\n" for row in rows)
            code = f"{self.context.code(function)}(\n{inside}){calls}"
        return cst.parse_expression(code)

    def _join(self, body: Sequence[cst.BaseStatement]) -> None:
        """Appends the operations of `v = v.batch(n)` to the chain of `v`."""
        for index, line in enumerate(body):
            name, value = _assigned(line)
            chain = chain_of(value, self.tensorflow_name) if value is not None else None
            if name is None or value is None or chain is None or chain.source is None:
                continue
            joined, lines = self._followed(chain, name, body[index + 1 :])
            if not lines:
                continue
            self._chains[value] = joined
            try:
                converted_chain(joined)
                self._merged.update(lines)
            except UnknownChainError:
                # The comment says why; all of the statements stay.
                continue

    def _followed(
        self, chain: Chain, name: str, following: Sequence[cst.BaseStatement]
    ) -> tuple[Chain, list[cst.CSTNode]]:
        lines: list[cst.CSTNode] = []
        changed: set[str] = set()
        for line in following:
            assigned, value = _assigned(line)
            other = chain_of(value, self.tensorflow_name) if value is not None else None
            nodes = parsed(code_of(line))
            reads = free_loads(nodes)
            if assigned == name and other is not None and other.base == name and _joins(other):
                if (reads - {name}) & changed:
                    break
                chain, lines = chain.then(other), [*lines, line]
                continue
            if name in reads or name in stores(nodes):
                break
            changed.update(stores(nodes))
        return chain, lines


def _joins(chain: Chain) -> bool:
    """Returns True if a chain can be part of a dataset; options are given elsewhere."""
    return all(one.name != "with_options" for one in chain.operations)


def _assigned(line: cst.BaseStatement) -> tuple[str | None, cst.BaseExpression | None]:
    """Returns the name and the value of an assignment of one name."""
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        small = line.body[0]
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            target = small.targets[0].target
            if isinstance(target, cst.Name):
                return target.value, small.value
    return None, None


def _calls_below(node: cst.Call) -> list[cst.CSTNode]:
    return list(m.findall(node.func, m.Call()))
