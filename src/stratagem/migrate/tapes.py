"""Rewriting of `tf.GradientTape` blocks to `sg.value_and_grad`."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

import libcst as cst

from stratagem.migrate import name_uses
from stratagem.migrate.arguments import code_of
from stratagem.migrate.context import FileContext, StatementRewriter, with_marks
from stratagem.migrate.rules import Advice
from stratagem.migrate.tape_calls import GradientCall, UnusualTape, find_gradients

__all__ = ["TapeRewriter"]

_PAGE = "docs/migrate/guides.md"
_WIDTH = 88

_Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


@dataclasses.dataclass
class _Plan:
    """A tape's loss function: statements, values to return, and where its gradients go."""

    call: GradientCall
    body: list[_Statement]
    before: list[_Statement]
    parameters: list[str]
    aux: list[str]


class TapeRewriter(StatementRewriter):
    """Moves the block of a tape into a loss function, and marks unusual tapes."""

    def __init__(self, context: FileContext) -> None:
        super().__init__(context)
        self._tapes: dict[cst.CSTNode, list[str]] = {}
        self._owners: list[cst.FunctionDef | cst.Module] = []
        self.num_rewritten = 0

    def visit_Module(self, node: cst.Module) -> bool:  # noqa: N802 - a name of libcst
        """Enters the file."""
        self._owners.append(node)
        return True

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - a name of libcst
        """Enters a function."""
        self._owners.append(node)
        return True

    def leave_FunctionDef(  # noqa: N802 - a name of libcst
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Leaves a function."""
        self._owners.pop()
        return updated_node

    def visit_With(self, node: cst.With) -> bool:  # noqa: N802 - a name of libcst
        """Notes a block with tapes."""
        calls = [one.item for one in node.items if isinstance(one.item, cst.Call)]
        tapes = [one for one in calls if self.tensorflow_name(one.func) == "GradientTape"]
        if tapes:
            self._tapes[node] = [
                one.asname.name.value
                for one in node.items
                if one.item in tapes
                and one.asname is not None
                and isinstance(one.asname.name, cst.Name)
            ]
        return True

    def leave_IndentedBlock(  # noqa: N802 - a name of libcst
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Rewrites the tapes of a block."""
        body = self._rewritten(original_node.body, updated_node.body)
        return updated_node if body is None else updated_node.with_changes(body=body)

    def leave_Module(  # noqa: N802 - a name of libcst
        self, original_node: cst.Module, updated_node: cst.Module
    ) -> cst.Module:
        """Rewrites the tapes at the top of a file."""
        body = self._rewritten(original_node.body, updated_node.body)
        return updated_node if body is None else updated_node.with_changes(body=body)

    def _rewritten(
        self, original: Sequence[cst.BaseStatement], updated: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement] | None:
        if not any(node in self._tapes for node in original):
            return None
        body = list(updated)
        # From the end, so that the positions of earlier statements stay.
        for index in reversed(range(len(original))):
            node, new = original[index], body[index]
            if node not in self._tapes or not isinstance(new, cst.With):
                continue
            try:
                body[index:] = self._without_tape(node, new, body[index + 1 :])
                self.num_rewritten += 1
            except UnusualTape as unusual:
                text = f"tf.GradientTape: {unusual}: write it as sg.value_and_grad(fn, variables)"
                body[index] = with_marks(new, [Advice(text, _PAGE)])
        return body

    def _without_tape(
        self, original: cst.CSTNode, node: cst.With, following: list[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        names = self._tapes[original]
        if len(names) != 1 or len(node.items) != 1:
            raise UnusualTape("several contexts in one statement")
        inside = _statements(node.body)
        first = find_gradients(inside, names[0])
        if first:
            inside, following = inside[: first[0].index], inside[first[0].index :] + following
        calls = find_gradients(following, names[0])
        if len(calls) != 1:
            raise UnusualTape(f"{len(calls)} calls of gradient()")
        call = calls[0]
        plan = self._plan(original, inside, following, call)
        between = following[: call.index]
        new = [*plan.before, self._function(node, plan), self._call(plan, call)]
        if _sources_need(call, between):
            return [*between, *new, *call.remaining, *following[call.index + 1 :]]
        return [*new, *between, *call.remaining, *following[call.index + 1 :]]

    def _plan(
        self,
        original: cst.CSTNode,
        inside: list[_Statement],
        following: Sequence[cst.BaseStatement],
        call: GradientCall,
    ) -> _Plan:
        between = following[: call.index]
        before, inside = _hoisted(inside, call)
        nodes = _parsed(inside)
        if (jump := name_uses.has_jump(nodes)) is not None:
            raise UnusualTape(f"{jump} in the block")
        if call.tape in name_uses.free_loads(nodes):
            raise UnusualTape(f"{call.tape} is used in the block")
        stored = name_uses.stores(nodes)
        if not set(call.loss_names) & set(stored):
            raise UnusualTape("the loss is computed outside of the block")
        if set(call.source_names) & set(stored):
            raise UnusualTape("the variables are chosen in the block")
        if _sources_need(call, between) and name_uses.free_loads(_parsed(between)) & set(stored):
            raise UnusualTape("statements between the block and gradient()")
        used = self._used_elsewhere(original, inside, following, call)
        aux = [name for name in stored if name in used and name != call.loss]
        return _Plan(call, inside, before, name_uses.read_first(nodes), aux)

    def _used_elsewhere(
        self,
        original: cst.CSTNode,
        inside: Sequence[cst.BaseStatement],
        following: Sequence[cst.BaseStatement],
        call: GradientCall,
    ) -> set[str]:
        """Returns the names that the function reads outside of the tape's block."""
        owner = self._owners[-1]
        rest = owner.deep_remove(original)
        body: Sequence[cst.BaseStatement] = ()
        if isinstance(rest, cst.FunctionDef):
            body = _statements(rest.body)
        elif isinstance(rest, cst.Module):
            body = rest.body
        later = [*following[: call.index], *call.remaining, *following[call.index + 1 :]]
        outside = name_uses.free_loads(_parsed(body)) | name_uses.free_loads(_parsed(later))
        if call.tape in name_uses.free_loads(_parsed(later)):
            raise UnusualTape(f"{call.tape} is used again")
        return outside

    def _function(self, node: cst.With, plan: _Plan) -> cst.FunctionDef:
        result = code_of(plan.call.loss_code)
        if plan.aux:
            values = ", ".join(plan.aux)
            result += f", ({values})" if len(plan.aux) > 1 else f", {values}"
        code = ", ".join(f"{name}={name}" for name in plan.parameters)
        definition = cst.parse_statement(f"def {self._name(plan)}({code}):\n    pass\n")
        block = node.body
        body = [*plan.body, cst.parse_statement(f"return {result}")]
        if isinstance(block, cst.IndentedBlock):
            block = block.with_changes(body=body)
        else:
            block = cst.IndentedBlock(body)
        return cst.ensure_type(definition, cst.FunctionDef).with_changes(
            body=block, leading_lines=node.leading_lines
        )

    def _name(self, plan: _Plan) -> str:
        taken = self.context.taken
        names = ["loss_fn", *(f"loss_fn_{number}" for number in range(2, 100))]
        return next(name for name in names if name not in taken)

    def _call(self, plan: _Plan, call: GradientCall) -> cst.BaseStatement:
        value = call.loss or "_"
        if plan.aux:
            aux = ", ".join(plan.aux)
            value = f"({value}, ({aux}))" if len(plan.aux) > 1 else f"({value}, {aux})"
        function = self.context.code("sg.value_and_grad")
        arguments = f"{self._name(plan)}, {code_of(call.sources)}"
        if plan.aux:
            arguments += ", has_aux=True"
        code = f"{value}, {call.target} = {function}({arguments})"
        if len(code) > _WIDTH and "\n" not in code:
            code = f"{value}, {call.target} = {function}(\n    {arguments}\n)"
        return cst.parse_statement(code).with_changes(leading_lines=call.leading_lines)


def _statements(block: cst.BaseSuite) -> list[_Statement]:
    if isinstance(block, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine(block.body)]
    return [one for one in block.body if isinstance(one, _Statement)]


def _parsed(statements: Sequence[cst.BaseStatement]) -> list[ast.stmt]:
    return name_uses.parsed("".join(code_of(one) for one in statements))


def _hoisted(
    inside: list[_Statement], call: GradientCall
) -> tuple[list[_Statement], list[_Statement]]:
    """Splits off assignments of the variables, which need nothing else of the block."""
    before, rest = [], []
    for one in inside:
        nodes = _parsed([one])
        is_source = bool(set(name_uses.stores(nodes)) & set(call.source_names))
        needs = name_uses.free_loads(nodes) & set(name_uses.stores(_parsed(rest)))
        (before if is_source and not needs else rest).append(one)
    return before, rest


def _sources_need(call: GradientCall, between: Sequence[cst.BaseStatement]) -> bool:
    return bool(set(name_uses.stores(_parsed(between))) & set(call.source_names))
