"""Calls of a tape's `gradient`, and of an optimizer's `minimize` with a tape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from stratagem.cli.migrate import name_uses
from stratagem.cli.migrate.arguments import code_of


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
        return name_uses.free_loads(name_uses.parsed(code_of(self.loss_code)))

    @property
    def source_names(self) -> set[str]:
        """Names that the variables are computed from."""
        return name_uses.free_loads(name_uses.parsed(code_of(self.sources)))


def find_gradients(statements: Sequence[cst.BaseStatement], tape: str) -> list[GradientCall]:
    """Returns the statements that ask a tape for gradients; raises UnusualTapeError for others."""
    found: list[GradientCall] = []
    for index, one in enumerate(statements):
        call = _gradient_of(tape)
        calls = m.findall(one, call)
        minimized = m.findall(one, _minimize_with(tape))
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


def _gradient_of(tape: str) -> m.Call:
    return m.Call(func=m.Attribute(value=m.Name(tape), attr=m.Name("gradient")))


def _minimize_with(tape: str) -> m.Call:
    keyword = m.Arg(value=m.Name(tape), keyword=m.Name("tape"))
    return m.Call(
        func=m.Attribute(attr=m.Name("minimize")), args=[m.ZeroOrMore(), keyword, m.ZeroOrMore()]
    )


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
