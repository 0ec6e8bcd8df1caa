"""Rewriting of `tf.GradientTape` blocks to `sg.value_and_grad`."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

import libcst as cst

from stratagem.cli.migrate import name_uses
from stratagem.cli.migrate.arguments import code_of
from stratagem.cli.migrate.context import FileContext, StatementRewriter, with_marks
from stratagem.cli.migrate.rules import Advice
from stratagem.cli.migrate.tape_calls import GradientCall, UnusualTapeError, find_gradients
from stratagem.cli.migrate.tape_groups import parse_statements, split_losses

_PAGE = "docs/migrate/guides.md"
_WIDTH = 88

_Statements = list[cst.BaseStatement]


@dataclasses.dataclass
class _Plan:
    """A tape's loss function: statements, values to return, and where its gradients go."""

    call: GradientCall
    body: _Statements
    before: _Statements
    parameters: list[str]
    aux: list[str]


class TapeRewriter(StatementRewriter):
    """Moves the block of a tape into a loss function, and marks unusual tapes."""

    def __init__(self, context: FileContext) -> None:
        super().__init__(context)
        self._tapes: dict[cst.CSTNode, list[str]] = {}
        self._owners: list[cst.FunctionDef | cst.Module] = []
        self.num_rewritten = 0

    def visit_Module(self, node: cst.Module) -> bool:
        """Enters the file."""
        self._owners.append(node)
        return True

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """Enters a function."""
        self._owners.append(node)
        return True

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        """Leaves a function."""
        self._owners.pop()
        return updated_node

    def visit_With(self, node: cst.With) -> bool:
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

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Rewrites the tapes of a block."""
        body = self._rewritten(original_node.body, updated_node.body)
        return updated_node if body is None else updated_node.with_changes(body=body)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
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
            except UnusualTapeError as unusual:
                text = f"tf.GradientTape: {unusual}: write it as sg.value_and_grad(fn, variables)"
                body[index] = with_marks(new, [Advice(text, _PAGE)])
        return body

    def _without_tape(
        self, original: cst.CSTNode, node: cst.With, following: list[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        names = self._tapes[original]
        if len(names) != len(node.items) or not names:
            raise UnusualTapeError("other contexts in the statement")
        inside = _statements(node.body)
        calls = _all_gradients(following, names)
        if len(calls) > 1:
            return self._split(original, node, inside, following, calls)
        first = _all_gradients(inside, names)
        if first:
            inside, following = inside[: first[0].index], inside[first[0].index :] + following
        calls = _all_gradients(following, names)
        if len(calls) != 1:
            raise UnusualTapeError(f"{len(calls)} calls of gradient()")
        call = calls[0]
        plan = self._plan(original, inside, following, call)
        between = following[: call.index]
        name = self._free_name("loss_fn")
        new = [*plan.before, self._function(node, plan, name), self._call(plan, name)]
        if _sources_need(call, between):
            return [*between, *new, *call.remaining, *following[call.index + 1 :]]
        return [*new, *between, *call.remaining, *following[call.index + 1 :]]

    def _split(
        self,
        original: cst.CSTNode,
        node: cst.With,
        inside: list[cst.BaseStatement],
        following: list[cst.BaseStatement],
        calls: Sequence[GradientCall],
    ) -> list[cst.BaseStatement]:
        """Makes a function for each loss of the block."""
        indices = [call.index for call in calls]
        if len(set(indices)) < len(indices):
            raise UnusualTapeError("several calls of gradient() in one statement")
        parts = split_losses(inside, calls)
        new: list[cst.BaseStatement] = []
        known: set[str] = set()
        for position, part in enumerate(parts):
            later = {name for one in parts[position + 1 :] for name in _reads(one.statements)}
            others = [one for one in calls if one is not part.call]
            plan = self._plan(original, part.statements, following, part.call, others)
            used = {
                *plan.aux,
                *(name for name in name_uses.stores(_parsed(plan.body)) if name in later),
            }
            ordered = [name for name in name_uses.stores(_parsed(plan.body)) if name in used]
            plan.aux = [name for name in ordered if name not in (part.call.loss, *known)]
            plan.parameters = [name for name in plan.parameters if name not in part.repeated]
            known.update(plan.aux)
            name = self._free_name(f"{part.call.loss}_fn")
            definition = self._function(node, plan, name)
            if position:
                definition = definition.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            if part.repeated:
                text = (
                    f"tf.GradientTape: {part.call.loss} computes {', '.join(part.repeated)} again"
                )
                advice = Advice(f"{text}: check dropout and updates of statistics", _PAGE)
                definition = with_marks(definition, [advice])
            new += [*plan.before, definition, self._call(plan, name)]
        remaining = {call.index: call.remaining for call in calls}
        for index, line in enumerate(following):
            new += remaining.get(index, (line,))
        return new

    def _plan(
        self,
        original: cst.CSTNode,
        inside: _Statements,
        following: Sequence[cst.BaseStatement],
        call: GradientCall,
        others: Sequence[GradientCall] = (),
    ) -> _Plan:
        between = following[: call.index]
        before, inside = _hoisted(inside, call)
        nodes = _parsed(inside)
        if (jump := name_uses.has_jump(nodes)) is not None:
            raise UnusualTapeError(f"{jump} in the block")
        if call.tape in name_uses.free_loads(nodes):
            raise UnusualTapeError(f"{call.tape} is used in the block")
        stored = name_uses.stores(nodes)
        if not set(call.loss_names) & set(stored):
            raise UnusualTapeError("the loss is computed outside of the block")
        if set(call.source_names) & set(stored):
            raise UnusualTapeError("the variables are chosen in the block")
        if _sources_need(call, between) and name_uses.free_loads(_parsed(between)) & set(stored):
            raise UnusualTapeError("statements between the block and gradient()")
        used = self._used_elsewhere(original, following, (call, *others))
        aux = [name for name in stored if name in used and name != call.loss]
        return _Plan(call, inside, before, name_uses.read_first(nodes), aux)

    def _used_elsewhere(
        self,
        original: cst.CSTNode,
        following: Sequence[cst.BaseStatement],
        calls: Sequence[GradientCall],
    ) -> set[str]:
        """Returns the names that the function reads outside of the tape's block."""
        owner = self._owners[-1]
        rest = owner.deep_remove(original)
        body: Sequence[cst.BaseStatement] = ()
        if isinstance(rest, cst.FunctionDef):
            body = _statements(rest.body)
        elif isinstance(rest, cst.Module):
            body = rest.body
        remaining = {call.index: call.remaining for call in calls}
        later = [
            one for index, line in enumerate(following) for one in remaining.get(index, (line,))
        ]
        after = name_uses.free_loads(_parsed(later))
        if again := after & {call.tape for call in calls}:
            raise UnusualTapeError(f"{min(again)} is used again")
        return name_uses.free_loads(_parsed(body)) | after

    def _function(self, node: cst.With, plan: _Plan, name: str) -> cst.FunctionDef:
        result = code_of(plan.call.loss_code)
        if plan.aux:
            values = ", ".join(plan.aux)
            result += f", ({values})" if len(plan.aux) > 1 else f", {values}"
        code = ", ".join(f"{one}={one}" for one in plan.parameters)
        definition = cst.parse_statement(f"def {name}({code}):\n    pass\n")
        block = node.body
        body = [*plan.body, cst.parse_statement(f"return {result}")]
        if isinstance(block, cst.IndentedBlock):
            block = block.with_changes(body=body)
        else:
            block = cst.IndentedBlock(body)
        return cst.ensure_type(definition, cst.FunctionDef).with_changes(
            body=block, leading_lines=node.leading_lines
        )

    def _free_name(self, wanted: str) -> str:
        names = (wanted, *(f"{wanted}_{number}" for number in range(2, 100)))
        return next(name for name in names if name not in self.context.taken)

    def _call(self, plan: _Plan, name: str) -> cst.BaseStatement:
        call = plan.call
        value = call.loss or "_"
        if plan.aux:
            aux = ", ".join(plan.aux)
            value = f"({value}, ({aux}))" if len(plan.aux) > 1 else f"({value}, {aux})"
        function = self.context.code("sg.value_and_grad")
        arguments = f"{name}, {code_of(call.sources)}"
        if plan.aux:
            arguments += ", has_aux=True"
        code = f"{value}, {call.target} = {function}({arguments})"
        if len(code) > _WIDTH and "\n" not in code:
            code = f"{value}, {call.target} = {function}(\n    {arguments}\n)"
        return cst.parse_statement(code).with_changes(leading_lines=call.leading_lines)


def _all_gradients(
    statements: Sequence[cst.BaseStatement], tapes: Sequence[str]
) -> list[GradientCall]:
    """Returns the calls of all tapes in the order of the statements."""
    calls = (call for tape in tapes for call in find_gradients(statements, tape))
    return sorted(calls, key=lambda call: call.index)


def _statements(block: cst.BaseSuite) -> _Statements:
    if isinstance(block, cst.SimpleStatementSuite):
        return [cst.SimpleStatementLine(block.body)]
    return list(cst.ensure_type(block, cst.IndentedBlock).body)


def _reads(statements: Sequence[cst.BaseStatement]) -> set[str]:
    """Returns the names that statements read and do not assign before."""
    nodes = _parsed(statements)
    assigned = set(name_uses.stores(nodes)) - set(name_uses.read_first(nodes))
    return name_uses.free_loads(nodes) - assigned


def _parsed(statements: Sequence[cst.BaseStatement]) -> list[ast.stmt]:
    return parse_statements(statements)


def _hoisted(inside: _Statements, call: GradientCall) -> tuple[_Statements, _Statements]:
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
