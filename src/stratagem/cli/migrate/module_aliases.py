"""Assignments of modules, such as `keras = tf.keras`, as the imports that they stand for."""

from __future__ import annotations

import libcst as cst

from stratagem.cli.migrate.context import FileContext, StatementRewriter, dotted

_MAX_PARTS = 2  # "keras" and "keras.layers"


class ModuleAliasRewriter(StatementRewriter):
    """Replaces `layers = tf.keras.layers` at the top of a file by an import of the same name."""

    def __init__(self, context: FileContext) -> None:
        super().__init__(context)
        self._depth = 0

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> bool:
        """Enters a block."""
        self._depth += 1
        return True

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Leaves a block."""
        self._depth -= 1
        return updated_node

    def leave_Assign(
        self, original_node: cst.Assign, updated_node: cst.Assign
    ) -> cst.BaseSmallStatement:
        """Replaces the assignment."""
        target = original_node.targets[0].target
        if self._depth or len(original_node.targets) > 1 or not isinstance(target, cst.Name):
            return updated_node
        is_name = dotted(original_node.value) is not None
        name = self.tensorflow_name(original_node.value) if is_name else None
        parts = name.split(".") if name else []
        if not parts or parts[0] != "keras" or len(parts) > _MAX_PARTS:
            return updated_node
        module, _, last = f"tensorflow.{name}".rpartition(".")
        alias = "" if last == target.value else f" as {target.value}"
        line = cst.parse_statement(f"from {module} import {last}{alias}")
        return cst.ensure_type(line, cst.SimpleStatementLine).body[0]
