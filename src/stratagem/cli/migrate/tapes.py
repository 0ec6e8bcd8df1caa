"""Rewriting of `tf.GradientTape` blocks to `sg.value_and_grad`."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate.context import FileContext, StatementRewriter, with_marks
from stratagem.cli.migrate.names import code_of
from stratagem.cli.migrate.rules import Advice

# Names that code reads and assigns, in the order of evaluation.

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_JUMPS = (*(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete),)


def parsed(code: str) -> list[ast.stmt]:
    """Parses a block of statements of any indentation."""
    return ast.parse(textwrap.dedent(code)).body


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


def has_jump(nodes: Iterable[ast.AST], *, in_loop: bool = False) -> str | None:
    """Returns the statement that leaves the block, or has no place in a function of its own."""
    for node in nodes:
        if isinstance(node, _FUNCTIONS):
            continue
        leaves_loop = isinstance(node, ast.Break | ast.Continue) and not in_loop
        if leaves_loop or isinstance(node, _JUMPS):
            return type(node).__name__.lower()
        is_loop = isinstance(node, ast.For | ast.While)
        if found := has_jump(ast.iter_child_nodes(node), in_loop=in_loop or is_loop):
            return found
    return None


def events(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yields names with True for an assignment, and False for a read."""
    for node in nodes:
        match node:
            case ast.Name():
                yield node.id, not isinstance(node.ctx, ast.Load)
            case ast.AugAssign(target=ast.Name() as target):
                yield target.id, False
                yield from events([node.value])
                yield target.id, True
            case ast.Assign():
                yield from events([node.value, *node.targets])
            case ast.For() | ast.AsyncFor():
                yield from events([node.iter, node.target, *node.body, *node.orelse])
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield (alias.asname or alias.name).split(".")[0], True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _function_events(node)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inside = list(events(ast.iter_child_nodes(node)))
                local = {name for name, is_store in inside if is_store}
                yield from ((name, False) for name, _ in inside if name not in local)
            case ast.ClassDef():
                yield from events([*node.bases, *node.body])
                yield node.name, True
            case _:
                yield from events(ast.iter_child_nodes(node))


def _function_events(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
) -> Iterator[tuple[str, bool]]:
    body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
    decorators = getattr(node, "decorator_list", [])
    parts = list(ast.iter_child_nodes(node.args))
    local = {one.arg for one in parts if isinstance(one, ast.arg)} | set(stores(body))
    yield from events([*(one for one in parts if not isinstance(one, ast.arg)), *decorators])
    yield from ((name, False) for name in free_loads(body) if name not in local)
    if not isinstance(node, ast.Lambda):
        yield node.name, True


# Calls of a tape's `gradient`, and of an optimizer's `minimize` with a tape.


class UnusualTapeError(Exception):
    """Raised for a tape that a person has to rewrite; says why."""


@dataclasses.dataclass(frozen=True)
class GradientCall:
    """A statement that asks a tape for gradients, and its remainder without the tape."""

    index: int
    tape: str
    loss_code: cst.BaseExpression
    sources: cst.BaseExpression
    target: str
    remaining: tuple[cst.BaseStatement, ...]
    leading_lines: tuple[cst.EmptyLine, ...]

    @property
    def loss(self) -> str | None:
        """Name of the loss, if it is a name."""
        return self.loss_code.value if isinstance(self.loss_code, cst.Name) else None

    @property
    def loss_names(self) -> set[str]:
        """Names that the loss is computed from."""
        return free_loads(parsed(code_of(self.loss_code)))

    @property
    def source_names(self) -> set[str]:
        """Names that the variables are computed from."""
        return free_loads(parsed(code_of(self.sources)))


def find_gradients(statements: Sequence[cst.BaseStatement], tape: str) -> list[GradientCall]:
    """Returns the statements that ask a tape for gradients; raises UnusualTapeError for others."""
    found: list[GradientCall] = []
    gradient = m.Call(func=m.Attribute(value=m.Name(tape), attr=m.Name("gradient")))
    keyword = m.Arg(value=m.Name(tape), keyword=m.Name("tape"))
    arguments = [m.ZeroOrMore(), keyword, m.ZeroOrMore()]
    minimize = m.Call(func=m.Attribute(attr=m.Name("minimize")), args=arguments)
    for index, one in enumerate(statements):
        calls, minimized = m.findall(one, gradient), m.findall(one, minimize)
        if not calls and not minimized:
            continue
        if not isinstance(one, cst.SimpleStatementLine) or len(one.body) != 1:
            raise UnusualTapeError("gradient() in a nested statement")
        if len(calls) + len(minimized) != 1:
            raise UnusualTapeError("several calls of gradient() in one statement")
        make = _from_gradient if calls else _from_minimize
        node = cst.ensure_type((calls or minimized)[0], cst.Call)
        found.append(make(index, tape, one, node))
    return found


def _from_gradient(
    index: int, tape: str, line: cst.SimpleStatementLine, call: cst.Call
) -> GradientCall:
    loss, sources = _loss_and_sources(call, ("target", "sources"))
    small = line.body[0]
    if isinstance(small, cst.Assign) and small.value is call and len(small.targets) == 1:
        target = small.targets[0].target
        code = code_of(target)
        if isinstance(target, cst.Tuple) and not target.lpar:
            code = f"({code})"
        return GradientCall(index, tape, loss, sources, code, (), tuple(line.leading_lines))
    rest = line.deep_replace(call, cst.Name("gradients"))
    new = cst.ensure_type(rest, cst.SimpleStatementLine).with_changes(leading_lines=())
    return GradientCall(index, tape, loss, sources, "gradients", (new,), tuple(line.leading_lines))


def _from_minimize(
    index: int, tape: str, line: cst.SimpleStatementLine, call: cst.Call
) -> GradientCall:
    arguments = [one for one in call.args if one.keyword is None or one.keyword.value != "tape"]
    loss, sources = _loss_and_sources(call.with_changes(args=arguments), ("loss", "var_list"))
    function = cst.ensure_type(call.func, cst.Attribute)
    code = f"{code_of(function.value)}.apply_gradients(zip(gradients, {code_of(sources)}))"
    new = line.deep_replace(call, cst.parse_expression(code))
    kept = cst.ensure_type(new, cst.SimpleStatementLine).with_changes(leading_lines=())
    return GradientCall(index, tape, loss, sources, "gradients", (kept,), tuple(line.leading_lines))


def _loss_and_sources(
    call: cst.Call, names: tuple[str, str]
) -> tuple[cst.BaseExpression, cst.BaseExpression]:
    found: dict[str, cst.BaseExpression] = {}
    for index, argument in enumerate(call.args):
        name = argument.keyword.value if argument.keyword else (*names, "", "")[index]
        found[name] = argument.value
    if set(found) != set(names):
        raise UnusualTapeError("gradient() with other arguments")
    return found[names[0]], found[names[1]]


# Several losses of one block, as in adversarial training: statements of each loss function.


@dataclasses.dataclass(frozen=True)
class LossPart:
    """The statements that one loss needs; `repeated` are names that an earlier part has too."""

    call: GradientCall
    statements: list[cst.BaseStatement]
    repeated: list[str]


def split_losses(
    statements: Sequence[cst.BaseStatement], calls: Sequence[GradientCall]
) -> list[LossPart]:
    """Splits a block by its losses; raises UnusualTapeError if a loss is not assigned in it.

    A statement that an earlier loss computes is reused by a later one if it does not depend on
    the later one's variables. Otherwise both compute it.
    """
    parsed = [parsed_statements([one]) for one in statements]
    slices = [_slice(parsed, call.loss_names) for call in calls]
    if not all(slices) or any(call.loss is None for call in calls):
        raise UnusualTapeError("a loss is computed outside of the block")
    # What no loss needs, such as updates of metrics, runs once, with the first one.
    rest = set(range(len(parsed))) - {index for needed in slices for index in needed}
    done: set[int] = set()
    parts: list[LossPart] = []
    for call, needed in zip(calls, slices, strict=True):
        depending = _depending(parsed, needed, call.source_names)
        own = {index for index in needed if index not in done or index in depending}
        repeated = [name for index in sorted(own & done) for name in stores(parsed[index])]
        own |= set() if parts else rest
        done |= own
        parts.append(LossPart(call, [statements[index] for index in sorted(own)], repeated))
    return parts


def parsed_statements(statements: Sequence[cst.BaseStatement]) -> list[ast.stmt]:
    """Parses statements with Python's own parser."""
    return parsed("".join(code_of(one) for one in statements))


def _slice(parsed: Sequence[list[ast.stmt]], names: set[str]) -> list[int]:
    """Returns the statements that names are computed by, in order."""
    needed, found = set(names), list[int]()
    for index in reversed(range(len(parsed))):
        if needed & set(stores(parsed[index])):
            found.append(index)
            needed |= free_loads(parsed[index])
    return found[::-1]


def _depending(
    parsed: Sequence[list[ast.stmt]], indices: Sequence[int], names: set[str]
) -> set[int]:
    """Returns the statements that read names, or values computed from them."""
    reached, found = set(names), set[int]()
    for index in indices:
        if reached & free_loads(parsed[index]):
            found.add(index)
            reached.update(stores(parsed[index]))
    return found


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
                *(name for name in stores(parsed_statements(plan.body)) if name in later),
            }
            ordered = [name for name in stores(parsed_statements(plan.body)) if name in used]
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
        nodes = parsed_statements(inside)
        if (jump := has_jump(nodes)) is not None:
            raise UnusualTapeError(f"{jump} in the block")
        if call.tape in free_loads(nodes):
            raise UnusualTapeError(f"{call.tape} is used in the block")
        stored = stores(nodes)
        if not set(call.loss_names) & set(stored):
            raise UnusualTapeError("the loss is computed outside of the block")
        if set(call.source_names) & set(stored):
            raise UnusualTapeError("the variables are chosen in the block")
        if _sources_need(call, between) and free_loads(parsed_statements(between)) & set(stored):
            raise UnusualTapeError("statements between the block and gradient()")
        used = self._used_elsewhere(original, following, (call, *others))
        aux = [name for name in stored if name in used and name != call.loss]
        return _Plan(call, inside, before, read_first(nodes), aux)

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
        after = free_loads(parsed_statements(later))
        if again := after & {call.tape for call in calls}:
            raise UnusualTapeError(f"{min(again)} is used again")
        return free_loads(parsed_statements(body)) | after

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
    nodes = parsed_statements(statements)
    assigned = set(stores(nodes)) - set(read_first(nodes))
    return free_loads(nodes) - assigned


def _hoisted(inside: _Statements, call: GradientCall) -> tuple[_Statements, _Statements]:
    """Splits off assignments of the variables, which need nothing else of the block."""
    before, rest = [], []
    for one in inside:
        nodes = parsed_statements([one])
        is_source = bool(set(stores(nodes)) & set(call.source_names))
        needs = free_loads(nodes) & set(stores(parsed_statements(rest)))
        (before if is_source and not needs else rest).append(one)
    return before, rest


def _sources_need(call: GradientCall, between: Sequence[cst.BaseStatement]) -> bool:
    return bool(set(stores(parsed_statements(between))) & set(call.source_names))
