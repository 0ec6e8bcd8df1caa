"""Rewriting of tf.data pipelines to `sg.input.Dataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate.context import FileContext, StatementRewriter, dotted
from stratagem.cli.migrate.names import code_of
from stratagem.cli.migrate.rules import Advice
from stratagem.cli.migrate.tapes import free_loads, parsed, stores

# Chains of tf.data: source, operations, and the dataset that has the same batches.

_NameOf = Callable[[cst.CSTNode], str | None]

_DATASET = "data.Dataset."
_UNNEEDED = ("prefetch", "cache")


class UnknownChainError(Exception):
    """Raised for a pipeline that a person has to rewrite; says why."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """A method of a dataset with its arguments."""

    name: str
    arguments: tuple[cst.Arg, ...]

    def argument(self, index: int, keyword: str) -> str | None:
        """Returns the code of an argument."""
        for position, one in enumerate(self.arguments):
            if one.keyword is not None and one.keyword.value == keyword:
                return code_of(one.value)
            if one.keyword is None and position == index:
                return code_of(one.value)
        return None


@dataclasses.dataclass(frozen=True)
class Chain:
    """Operations on a source of tf.data, or on a variable (`base`)."""

    source: Operation | None
    base: str | None
    operations: tuple[Operation, ...]

    def then(self, other: Chain) -> Chain:
        """Returns this chain with the operations of another one on its result."""
        return dataclasses.replace(self, operations=self.operations + other.operations)


def chain_of(node: cst.BaseExpression, name_of: _NameOf) -> Chain | None:
    """Returns the chain of an expression, if it begins with a dataset or with a variable."""
    operations: list[Operation] = []
    while isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name = name_of(node.func) if dotted(node.func) is not None else None
        method = Operation(node.func.attr.value, tuple(node.args))
        if name is not None and name.startswith(_DATASET):
            return Chain(method, None, tuple(reversed(operations)))
        operations.append(method)
        node = node.func.value
    if isinstance(node, cst.Name) and operations:
        return Chain(None, node.value, tuple(reversed(operations)))
    return None


def converted_chain(chain: Chain) -> tuple[str, list[str], str]:
    """Returns a constructor of the dataset, its arguments, and the calls of methods that follow.

    Raises UnknownChainError if an operation has no counterpart.
    """
    if chain.source is None:
        raise UnknownChainError("no source")
    if any(one.star for operation in chain.operations for one in operation.arguments):
        raise UnknownChainError("arguments with a star")
    if chain.source.name == "from_generator":
        # A generator whose elements are batches: those that nothing batches.
        given = [chain.source.argument(0, "generator") or ""]
        if arguments := chain.source.argument(-1, "args"):
            given.append(f"args={arguments}")
        return "sg.input.Dataset.from_generator", given, "".join(map(_after, chain.operations))
    source, operations = _source(chain.source, chain.operations)
    batches = [index for index, one in enumerate(operations) if one.name == "batch"]
    if len(batches) != 1:
        raise UnknownChainError("no batch()" if not batches else "batch() twice")
    before, batch, after = (
        operations[: batches[0]],
        operations[batches[0]],
        operations[batches[0] + 1 :],
    )
    arguments = [source, f"batch_size={batch.argument(0, 'batch_size')}"]
    arguments += [one for operation in before for one in _option(operation)]
    if (drop := batch.argument(1, "drop_remainder")) is not None:
        arguments.append(f"drop_remainder={drop}")
    calls = [_call(one) for one in before if one.name in ("shard", "repeat")]
    calls += [_after(one) for one in after]
    # A shard is of examples, so it is taken before they are repeated.
    calls.sort(key=lambda one: one.startswith(".repeat"))
    return "sg.input.Dataset", arguments, "".join(calls)


def _source(source: Operation, operations: Sequence[Operation]) -> tuple[str, Sequence[Operation]]:
    match source.name:
        case "from_tensor_slices":
            return source.argument(0, "tensors") or "", operations
        case "range" if len(source.arguments) <= 3:
            return f"np.arange({', '.join(code_of(one.value) for one in source.arguments)})", (
                operations
            )
        case "from_tensors" if operations and operations[0].name == "repeat":
            count = operations[0].argument(0, "count")
            if count is None:
                raise UnknownChainError("repeat() without a count")
            return _repeated(source.arguments[0].value, count), operations[1:]
        case _:
            raise UnknownChainError(f"{source.name}()")


def _repeated(value: cst.BaseExpression, count: str) -> str:
    if isinstance(value, cst.Tuple):
        parts = [f"np.repeat([{code_of(one.value)}], {count}, axis=0)" for one in value.elements]
        return f"({', '.join(parts)})"
    return f"np.repeat([{code_of(value)}], {count}, axis=0)"


def _option(operation: Operation) -> list[str]:
    """Returns the arguments of the dataset that stand for an operation before `batch`."""
    if operation.name == "shuffle":
        seed = operation.argument(1, "seed")
        return ["shuffle=True", *([f"seed={seed}"] if seed is not None else [])]
    if operation.name in (*_UNNEEDED, "shard", "repeat"):
        return []
    raise UnknownChainError(f"{operation.name}()")


def _after(operation: Operation) -> str:
    if operation.name in _UNNEEDED:
        return ""
    if operation.name == "repeat":
        return _call(operation)
    raise UnknownChainError(f"{operation.name}() of batches")


def _call(operation: Operation) -> str:
    inside = ", ".join(
        code_of(one.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for one in operation.arguments
    )
    return f".{operation.name}({inside})"


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
            self._inside.update(m.findall(node.func, m.Call()))
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
